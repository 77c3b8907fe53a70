"""Who is chosen and with what weight: worked examples, ties, broken gates, and transformers' own routers."""

import pytest
import torch

from minivllm.moe.routing import Routing, best, greedy, group_limited_greedy, noaux_tc

SCORES = torch.tensor([[0.95, 0.1, 0.6, 0.5, 0.8, 0.2, 0.3, 0.4]])
LOGITS = SCORES.logit()
BIAS = torch.tensor([0.0, 0.0, 0.3, 0.3, 0.0, 0.0, 0.0, 0.0])


def test_a_worked_example_of_v3():
    """b = .95 .1 .9 .8 .8 .2 .3 .4; the groups' sums 1.05 1.7 1.0 .7 keep groups 0 and 1, and those experts 0 and 2."""
    weights, ids = noaux_tc(LOGITS, BIAS, top_k=2, num_groups=4, topk_group=2, scaling=2.5)
    assert ids.tolist() == [[0, 2]]
    expected = torch.tensor([[0.95, 0.6]]) / (0.95 + 0.6) * 2.5
    torch.testing.assert_close(weights, expected)
    assert weights.round(decimals=3).tolist() == torch.tensor([[1.532, 0.968]]).tolist()


def test_the_bias_decides_who_is_chosen_and_not_with_what_weight():
    _, without = noaux_tc(LOGITS, torch.zeros(8), top_k=2)
    assert without.tolist() == [[0, 4]]
    weights, ids = noaux_tc(LOGITS, BIAS, top_k=2, renormalize=False)
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.95, 0.6]]))


def test_a_group_of_v2_is_as_good_as_its_best_expert_and_one_of_v3_as_its_best_two():
    logits = torch.log(torch.tensor([[0.4, 0.01, 0.25, 0.24, 0.05, 0.05]]))
    _, v2 = group_limited_greedy(logits, top_k=2, num_groups=3, topk_group=1)
    _, v3 = noaux_tc(logits, torch.zeros(6), top_k=2, num_groups=3, topk_group=1)
    assert v2.tolist() == [[0, 1]]
    assert v3.tolist() == [[2, 3]]


def test_v2_weighs_by_the_probability_among_all_experts():
    probabilities = torch.tensor([[0.4, 0.01, 0.25, 0.24, 0.05, 0.05]])
    weights, ids = greedy(probabilities.log(), top_k=3, scaling=16.0)
    assert ids.tolist() == [[0, 2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.25, 0.24]]) * 16)


ROUTINGS = [
    Routing("greedy", 3),
    Routing("group_limited_greedy", 3, 4, 2),
    Routing("noaux_tc", 3, 4, 2, renormalize=True, scaling=2.5),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.method)
def test_ties_go_to_the_lower_expert(routing):
    _, ids = routing(torch.zeros(5, 8), torch.zeros(8))
    assert ids.tolist() == [[0, 1, 2]] * 5
    _, ids = routing(torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]]), torch.zeros(8))
    # Grouped in pairs: V2 finds all groups equally good and keeps 0 and 1, V3 keeps 2 (two ones) and then 0.
    expected = {"greedy": [1, 3, 4], "group_limited_greedy": [1, 3, 0], "noaux_tc": [1, 4, 5]}
    assert ids.tolist() == [expected[routing.method]]


def test_best_is_sorted_and_prefers_the_lower_index():
    assert best(torch.tensor([[2.0, 3.0, 2.0, 3.0]]), 3).tolist() == [[1, 3, 0]]


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.method)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_gate_still_gives_distinct_experts(routing, broken):
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    logits[0] = broken
    logits[1, 3] = broken
    logits[2, ::2] = broken
    _, ids = routing(logits, torch.zeros(8))
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in ids.tolist())
    expected = routing(logits[3:], torch.zeros(8))
    assert torch.equal(ids[3:], expected[1]), "a broken row changes its neighbours"


def test_groups_that_do_not_divide_the_experts_are_no_groups():
    logits = torch.randn(9, 10, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(10, generator=torch.Generator().manual_seed(1))
    for grouped, plain in [
        (group_limited_greedy(logits, 3, num_groups=4, topk_group=1), greedy(logits, 3)),
        (noaux_tc(logits, bias, 3, num_groups=4, topk_group=1), noaux_tc(logits, bias, 3)),
    ]:
        assert all(torch.equal(a, b) for a, b in zip(grouped, plain, strict=True))


def test_groups_of_one_expert_are_experts():
    logits, bias = torch.randn(9, 8), torch.zeros(8)
    assert torch.equal(noaux_tc(logits, bias, 3, 8, 3)[1], noaux_tc(logits, bias, 3)[1])


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("renormalize", [True, False])
def test_v3_routes_as_transformers_does(num_groups, renormalize):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=num_groups,
        topk_group=max(1, num_groups // 2), norm_topk_prob=renormalize, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    torch.manual_seed(0)
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_(0.0, 0.2)
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(200, 16))
        mine = noaux_tc(
            logits, router.e_score_correction_bias, 4, num_groups, max(1, num_groups // 2), renormalize, 2.5
        )
    assert_same_choice((weights, ids), mine)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_v2_routes_as_transformers_does_which_ignores_norm_topk_prob(method, num_groups, norm_topk_prob):
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=16, num_attention_heads=4, n_routed_experts=16, num_experts_per_tok=4, n_group=num_groups,
        topk_method=method,
        topk_group=max(1, num_groups // 2), norm_topk_prob=norm_topk_prob, routed_scaling_factor=16.0,
    )  # fmt: skip
    router = DeepseekV2TopkRouter(config)
    torch.manual_seed(0)
    router.weight.data.normal_()
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(200, 16))
    routing = Routing(method, 4, num_groups, max(1, num_groups // 2), scaling=16.0)
    assert_same_choice((weights, ids), routing(logits, None))


def assert_same_choice(theirs, mine):
    """Equal weights for equal experts; transformers leaves their order open."""
    dense = []
    for weights, ids in (theirs, mine):
        dense.append(torch.zeros(len(ids), 16).scatter_(1, ids, weights))
        assert (dense[-1] > 0).sum() == ids.numel()
    torch.testing.assert_close(*dense)
