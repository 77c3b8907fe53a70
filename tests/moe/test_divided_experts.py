"""Experts divided between ranks: every way through them leaves out the others', and the parts add up."""

import itertools

import pytest
import torch

from minivllm.gemm.quantize import quantize_128x128
from minivllm.models.llama import GatedMLP
from minivllm.moe.align import align_and_sort
from minivllm.moe.experts import (
    experts_by_loop,
    experts_grouped,
    experts_in_block_fp8,
    experts_in_tiles,
    run_experts,
    sort_into_tiles,
)
from minivllm.moe.fused import fused_experts
from minivllm.moe.layer import MoE
from minivllm.moe.routing import Routing
from minivllm.worker.tensor_parallel import ThreadGroup, building_for, run_ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, WIDTH, EXPERTS, TOP_K = 24, 16, 6, 3
WAYS = {
    "loop": lambda *arguments: experts_by_loop(*arguments),
    "tiles": lambda *arguments: experts_in_tiles(*arguments),
    "grouped": lambda *arguments: experts_grouped(*arguments, EXPERTS),
    "fused": lambda *arguments: fused_experts(*arguments, num_in_all=EXPERTS),
    "chosen": lambda *arguments: run_experts(*arguments, num_in_all=EXPERTS),
}


def problem(num_tokens, hidden=HIDDEN, width=WIDTH):
    generator = torch.Generator().manual_seed(num_tokens)
    x, gate_up, down = (
        torch.randn(shape, generator=generator).to(DEVICE)
        for shape in [(num_tokens, hidden), (EXPERTS, 2 * width, hidden), (EXPERTS, hidden, width)]
    )
    weights, ids = torch.randn(num_tokens, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return x, weights.to(DEVICE), ids.to(DEVICE), gate_up, down


def error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


class Guarded:
    """The experts first .. last of a weight inside of a larger tensor of NaN: who reads outside of them shows it."""

    def __init__(self, weight, first, last):
        self.all = weight.new_full((3 * len(weight), *weight.shape[1:]), torch.nan)
        self.part = self.all[len(weight) : len(weight) + last - first]
        self.part.copy_(weight[first:last])


@pytest.mark.parametrize("bounds", [(0, 2, 6), (0, 3, 6), (0, 1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 50])
@pytest.mark.parametrize("way", WAYS)
def test_the_parts_of_all_ranks_add_up(way, num_tokens, bounds):
    x, weights, ids, gate_up, down = problem(num_tokens)
    wanted = experts_by_loop(x, weights, ids, gate_up, down)
    total = torch.zeros_like(wanted)
    for first, last in itertools.pairwise(bounds):
        mine = Guarded(gate_up, first, last).part, Guarded(down, first, last).part
        part = WAYS[way](x, weights, ids - first, *mine)
        expected = experts_by_loop(x, weights, ids - first, gate_up[first:last], down[first:last])
        assert torch.isfinite(part).all()
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-4)
        total += part
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("foreign", [-1, -7, EXPERTS, EXPERTS + 1, 1 << 20])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_whose_experts_are_all_elsewhere_get_zeros(way, foreign):
    x, weights, ids, gate_up, down = problem(9)
    ids[::2] = foreign
    got = WAYS[way](x, weights, ids, gate_up, down)
    assert not got[::2].any() and got[1::2].any(dim=1).all()


@pytest.mark.parametrize(("num_tokens", "tile"), [(1, 16), (40, 4), (100, 16), (300, 32)])
def test_both_sorts_leave_out_the_same_pairs(num_tokens, tile):
    _, _, ids, _, _ = problem(num_tokens)
    ids = ids - 2
    pairs, experts = align_and_sort(ids, 3, tile)
    wanted_pairs, wanted_experts = sort_into_tiles(ids, 3, tile)
    assert torch.equal(pairs.long(), wanted_pairs) and torch.equal(experts.long(), wanted_experts)
    here = ((ids >= 0) & (ids < 3)).flatten().nonzero().flatten()
    assert torch.equal(wanted_pairs[wanted_pairs < ids.numel()].sort().values, here)


def test_block_scaled_experts_in_fp8_leave_out_the_others_too():
    x, weights, ids, gate_up, down = problem(20, hidden=128, width=128)
    (q_gate_up, gate_up_scale), (q_down, down_scale) = (
        [torch.stack(part) for part in zip(*map(quantize_128x128, weight), strict=True)] for weight in (gate_up, down)
    )
    scaled = q_gate_up, q_down, gate_up_scale, down_scale
    wanted = experts_in_block_fp8(x, weights, ids, *scaled)
    for way in (experts_in_block_fp8, run_experts, fused_experts):
        more = {} if way is experts_in_block_fp8 else {"num_in_all": EXPERTS}
        parts = [
            way(x, weights, ids - first, *(tensor[first : first + 3] for tensor in scaled), **more) for first in (0, 3)
        ]
        assert error(sum(parts), wanted) < 1e-2


@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_sums_routed_and_shared_experts_of_all_ranks_at_once(shared):
    def make(group=None):
        torch.manual_seed(0)
        mlp = GatedMLP(HIDDEN, WIDTH, bias=False, reduce=False) if shared else None
        moe = MoE("divided", Routing("noaux_tc", TOP_K), EXPERTS, HIDDEN, WIDTH, mlp)
        for slot in dict(moe.slots("mlp")).values() if group is None else ():
            slot.normal_()
        return moe

    whole, groups, ranks = make(), ThreadGroup.create(2), []
    tensors = dict(whole.slots("mlp"))
    for group in groups:
        with building_for(group):
            moe = make(group)
        for name, slot in moe.slots("mlp"):
            if isinstance(slot, torch.Tensor):
                slot.copy_(tensors[name])
            elif slot is not None:
                slot.tensor.copy_(tensors[name][tuple(share.stored for share in slot.shares)])
        ranks.append(moe)
    x = torch.randn(9, HIDDEN)
    wanted = whole(x)
    for got in run_ranks(lambda _, moe: moe(x), groups, ranks):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
    assert groups[0].traffic["all_reduce"].calls == 1
    # The operator itself gives this rank's part.
    logits = whole.gate(x)
    parts = [torch.ops.minivllm.moe_forward(x, logits, moe.experts.op_name) for moe in ranks]
    torch.testing.assert_close(sum(parts), whole.experts(x, logits), rtol=1e-5, atol=1e-4)
