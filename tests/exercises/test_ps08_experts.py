"""Set 8 beside the package: its rules are those of the router, the sort, the experts and the operator."""

import random

import pytest
import torch
from classroom import solved_sheet

from minivllm.exercises import ExerciseFailure, check, find
from minivllm.moe import ops
from minivllm.moe.experts import experts_by_loop, sort_into_tiles
from minivllm.moe.routing import noaux_tc


@pytest.fixture(scope="module")
def sheet():
    """All that the solved sheet defines."""
    return solved_sheet("ps08_experts")


def random_ids(rng: random.Random, num_experts: int, most_tokens: int = 12) -> list[list[int]]:
    top_k = rng.randint(1, min(4, num_experts))
    return [rng.sample(range(num_experts), top_k) for _ in range(rng.randint(0, most_tokens))]


def test_the_route_is_the_engines():
    rng, oracle = random.Random(0), find("ps08.route").oracle
    for trial in range(300):
        num_groups, size = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
        topk_group = rng.randint(1, num_groups)
        top_k = rng.randint(1, topk_group * size)
        # Either no ties at all, or many: sigmoid(0) is 0.5 exactly, and so are its sums with quarters.
        logits = torch.tensor([[rng.gauss(0, 1) * (trial % 2) for _ in range(num_groups * size)]])
        scores = logits.sigmoid()[0].tolist()
        bias = [rng.randint(-8, 4) / 4 + 0.1 * rng.random() * (trial % 2) for _ in scores]
        weights, ids = noaux_tc(logits, torch.tensor(bias), top_k, num_groups, topk_group, True, 2.5)
        wanted_ids, wanted = oracle(scores, bias, num_groups, topk_group, top_k, 2.5)
        assert ids[0].tolist() == wanted_ids
        assert weights[0].tolist() == pytest.approx(wanted, rel=1e-5)


def test_the_sort_is_the_engines():
    rng, oracle = random.Random(1), find("ps08.sort_pairs").oracle
    for _ in range(300):
        num_experts, tile = rng.randint(1, 8), rng.choice([1, 2, 4, 16])
        ids = random_ids(rng, num_experts)
        tensor = torch.tensor(ids, dtype=torch.int64).view(len(ids), -1 if ids else 1)
        pairs, expert_of_tile = oracle(ids, num_experts, tile)
        assert [t.tolist() for t in sort_into_tiles(tensor, num_experts, tile)] == [pairs, expert_of_tile]


def test_starts_are_where_the_sorted_pairs_of_an_expert_begin():
    rng, oracle = random.Random(2), find("ps08.count_experts").oracle
    for _ in range(100):
        num_experts = rng.randint(1, 8)
        ids = random_ids(rng, num_experts)
        counts, starts = oracle(ids, num_experts)
        in_order = sorted(expert for row in ids for expert in row)
        for expert, (count, start) in enumerate(zip(counts, starts, strict=True)):
            assert in_order[start : start + count] == [expert] * count == [e for e in in_order if e == expert]


@pytest.mark.parametrize("tile", [1, 4, 16])
def test_rows_that_are_combined_are_the_layer(tile):
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(9, 8, generator=generator), torch.rand(9, 2, generator=generator)
    gate_up, down = torch.randn(4, 12, 8, generator=generator), torch.randn(4, 8, 6, generator=generator)
    ids = torch.rand(9, 4, generator=generator).argsort(1)[:, :2]
    pairs, expert_of_tile = sort_into_tiles(ids, 4, tile)
    rows = torch.full((len(pairs), 8), float("nan"))
    for row, pair in enumerate(pairs.tolist()):
        if pair < 18:
            expert = int(expert_of_tile[row // tile])
            gate, up = (gate_up[expert] @ x[pair // 2]).chunk(2)
            rows[row] = down[expert] @ (torch.nn.functional.silu(gate) * up)
    got = find("ps08.combine").oracle(rows, pairs, weights)
    torch.testing.assert_close(got, experts_by_loop(x, weights, ids, gate_up, down))


def test_the_fake_says_what_the_operators_fake_says():
    x, logits = torch.empty(5, 8, dtype=torch.bfloat16, device="meta"), torch.empty(5, 4, device="meta")
    ours, engines = find("ps08.moe_shared_fake").oracle(x, logits, "a"), ops.moe_forward_shared_fake(x, logits, "a")
    for a, b in zip(ours, engines, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


def test_an_answer_that_asks_torch_for_numbers_is_told_so_and_not_that_it_is_unwritten():
    def looks(hidden_states, router_logits, layer_name):
        tokens = torch.nonzero(router_logits > 0)
        return hidden_states.new_empty(hidden_states.shape), tokens

    with pytest.raises(ExerciseFailure, match="it raised an error") as caught:
        check("ps08.moe_shared_fake", looks)
    assert "is not written yet" not in str(caught.value)


def test_the_exhibit_sends_tokens_to_a_third_group(sheet, capsys):
    capsys.readouterr()
    sheet["groups_visited"](sheet["choose_experts_as_found"])
    lines = capsys.readouterr().out.splitlines()
    assert "2 groups at most,    0 of 1,000" in lines[0] and "3 groups at most,  974 of 1,000" in lines[3]
    sheet["groups_visited"](sheet["choose_experts"])
    assert capsys.readouterr().out.count("2 groups at most,    0 of 1,000") == 4


def test_the_exhibit_adds_padding_to_the_last_token(sheet, capsys):
    capsys.readouterr()
    sheet["wrong_tokens"](sheet["combine_as_found"])
    assert [line.partition("wrong: ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "[]",
        "[5]",
        "[5]",
        "[5]",
    ]
    sheet["wrong_tokens"](sheet["combine"])
    assert capsys.readouterr().out.count("[]") == 4
