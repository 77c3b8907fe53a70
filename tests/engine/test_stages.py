"""Which layers a stage holds."""

import pytest

from minivllm.engine.stages import Stage, split_layers


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [(6, 1, [6]), (6, 2, [3, 3]), (6, 4, [1, 2, 2, 1]), (7, 2, [4, 3]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2])],
)
def test_what_does_not_divide_goes_before_the_last_stage(num_layers, num_stages, counts):
    stages = split_layers(num_layers, num_stages)
    assert [len(stage.layers) for stage in stages] == counts


@pytest.mark.parametrize("num_layers", range(1, 13))
def test_every_layer_is_in_one_stage_and_shares_differ_by_one_at_most(num_layers):
    for num_stages in range(1, num_layers + 1):
        stages = split_layers(num_layers, num_stages)
        assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
        counts = [len(stage.layers) for stage in stages]
        assert max(counts) - min(counts) <= 1 and counts[-1] == min(counts)
        assert [stage.is_first for stage in stages] == [index == 0 for index in range(num_stages)]
        assert [stage.is_last for stage in stages] == [index == num_stages - 1 for index in range(num_stages)]


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_layers_are_refused(num_stages):
    with pytest.raises(ValueError, match=f"pipeline_parallel_size is {num_stages}.*at most 4 stages"):
        split_layers(4, num_stages)


def test_a_whole_model_is_first_and_last():
    assert Stage.whole(5).is_first and Stage.whole(5).is_last and list(Stage.whole(5).layers) == [0, 1, 2, 3, 4]
