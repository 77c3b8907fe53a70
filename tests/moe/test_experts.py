"""Three ways through the experts, one result; and a sort into tiles that loses and invents nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.moe.experts import experts_by_loop, experts_grouped, experts_in_tiles, run_experts, sort_into_tiles
from minivllm.moe.layer import RoutedExperts
from minivllm.moe.routing import Routing

FAST = {"tiles": experts_in_tiles, "grouped": experts_grouped, "chosen": run_experts}


def problem(num_tokens, num_experts=6, top_k=2, hidden=24, width=16, skew=False, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(num_tokens)
    x, gate_up, down = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in [(num_tokens, hidden), (num_experts, 2 * width, hidden), (num_experts, hidden, width)]
    )
    scores = torch.randn(num_tokens, num_experts, generator=generator)
    if skew:
        scores[:, 1] += 10.0  # everybody visits expert 1
        scores[:, 0] -= 10.0  # and nobody expert 0
    weights, ids = scores.softmax(-1).topk(top_k)
    return x, weights.to(device), ids.to(device), gate_up, down


def by_hand(x, weights, ids, gate_up, down):
    """Float64, token by token."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    for token, (row, choice) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(row, choice, strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weight * (down[expert] @ (gate * gate.sigmoid() * up))
    return out


def error(out, expected):
    return (out - expected).norm() / expected.norm()


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_all_ways_agree_with_the_formula(num_tokens, skew, top_k):
    arguments = problem(num_tokens, top_k=top_k, skew=skew)
    expected = by_hand(*arguments)
    for function in (experts_by_loop, *FAST.values()):
        assert error(function(*arguments), expected) < 1e-6, function.__name__


@pytest.mark.parametrize("function", FAST.values(), ids=FAST.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_and_keeps_its_dtype(function, dtype):
    arguments = problem(33, dtype=dtype)
    expected = by_hand(*arguments)
    out = function(*arguments)
    assert out.dtype == dtype
    assert error(out, expected) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("function", [experts_by_loop, *FAST.values()])
def test_no_tokens_give_no_rows(function):
    assert function(*problem(0)).shape == (0, 24)


@pytest.mark.parametrize("tile", [1, 3, 16, 64])
def test_the_size_of_a_tile_changes_nothing(tile):
    arguments = problem(40, skew=True)
    assert error(experts_in_tiles(*arguments, tile=tile), experts_by_loop(*arguments)) < 1e-6


def test_the_drawing_in_the_docstring():
    pairs, expert_of_tile = sort_into_tiles(torch.tensor([[2, 0], [0, 1], [2, 0]]), 3, tile=2)
    assert pairs.view(-1, 2).tolist() == [[1, 2], [5, 6], [3, 6], [0, 4]]
    assert expert_of_tile.tolist() == [0, 0, 1, 2]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 40), st.integers(1, 20), st.integers(0, 10**6))
def test_every_pair_lies_in_one_tile_of_its_expert_and_the_rest_is_padding(num_experts, top_k, num_tokens, tile, seed):
    top_k = min(top_k, num_experts)
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    ids = (scores**8).topk(top_k).indices
    num_pairs = ids.numel()
    pairs, expert_of_tile = sort_into_tiles(ids, num_experts, tile)
    assert pairs.shape == (len(expert_of_tile) * tile,)
    assert pairs[pairs < num_pairs].sort().values.tolist() == list(range(num_pairs))
    for row, expert in zip(pairs.view(-1, tile), expert_of_tile.tolist(), strict=True):
        present = row[row < num_pairs]
        if expert == -1:
            assert len(present) == 0
        else:
            assert len(present) > 0 and (ids.flatten()[present] == expert).all()
            assert present.tolist() == sorted(present.tolist())


def test_an_idle_expert_full_of_nan_does_no_harm():
    x, weights, ids, gate_up, down = problem(20, skew=True)
    assert not (ids == 0).any()
    expected = experts_by_loop(x, weights, ids, gate_up, down)
    gate_up[0] = down[0] = torch.nan
    for function in FAST.values():
        assert error(function(x, weights, ids, gate_up, down), expected) < 1e-6


def test_a_layer_is_its_routing_and_its_experts():
    torch.manual_seed(0)
    routing = Routing("noaux_tc", 2, 2, 1, renormalize=True, scaling=2.5)
    bias = torch.randn(8)
    experts = RoutedExperts("model.layers.1.mlp", routing, bias, 8, 24, 16)
    for name, slot in experts.slots("experts"):
        assert slot.shape == ((24, 16) if "down" in name else (16, 24))
        slot.normal_()
    x, logits = torch.randn(5, 24), torch.randn(5, 8)
    expected = experts_by_loop(x, *routing(logits, bias), experts.gate_up, experts.down)
    assert error(experts(x, logits), expected) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 33, 512])
def test_on_a_gpu_nothing_waits_for_the_device(dtype, num_tokens):
    arguments = problem(num_tokens, num_experts=16, top_k=4, hidden=128, width=64, dtype=dtype, device="cuda")
    routing = Routing("noaux_tc", 4, 4, 2, renormalize=True)
    logits, bias = torch.randn(num_tokens, 16, device="cuda"), torch.zeros(16, device="cuda")
    x, _, _, gate_up, down = arguments
    run_experts(*arguments)  # first calls may synchronise while they set things up
    torch.cuda.set_sync_debug_mode("error")
    try:
        weights, ids = routing(logits, bias)
        out = run_experts(x, weights, ids, gate_up, down)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = by_hand(*(tensor.cpu() for tensor in (x, weights, ids, gate_up, down)))
    assert error(out.cpu(), expected) < max(2 * torch.finfo(dtype).eps, 1e-6)
