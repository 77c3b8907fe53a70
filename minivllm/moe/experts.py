"""What the experts compute: gated MLPs, each on the tokens that were routed to it, in four ways with one result.

    x [T, H], weights and ids [T, top_k], gate_up [E, 2 I, H] (gate rows, then up rows), down [E, H, I] -> [T, H]

| function | how | for |
|---|---|---|
| experts_by_loop | an expert at a time, in the words of the formula | reading, and judging the others |
| experts_in_tiles | pairs sorted by expert, experts padded to whole tiles, a product a tile | any device and dtype |
| experts_grouped | pairs sorted by expert, one grouped product over all | CPUs, and bfloat16 on a GPU without Triton |
| fused_experts (fused.py) | the same in Triton, four kernels | GPUs |

A pair is (token, one of its experts); pair p belongs to token p // top_k. Sorting puts the pairs of an expert side by
side, so that an expert's weights are read once for all of them:

    ids             [2 0] [0 1] [2 0]                      3 tokens, top_k = 2
    pairs           0:2  1:0  2:0  3:1  4:2  5:0
    sorted          1:0  2:0  5:0 | 3:1 | 0:2  4:2
    tiles of 2      1 2 | 5 * | 3 * | 0 4                  * = padding, pair id 6 = number of pairs
    tile's expert    0     0     1     2

The number of tiles is bounded by what the host knows (T, top_k, E), never by what the router says: nothing waits for
the device. Tiles past the last are padding from end to end and carry expert -1.

Where experts are divided between ranks, an id outside of 0 .. E - 1 names an expert of another rank: its pairs are in
no tile, and it adds nothing to the sum.
"""

import torch
import torch.nn.functional as F

from minivllm.gemm.quantize import dequantize, quantize_1x128
from minivllm.layers import use_fused_kernels


def experts_by_loop(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The formula, expert by expert. Sums are float32, the result has x's dtype."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(gate_up)):
        tokens, places = torch.where(ids == expert)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, y * weights[tokens, places, None])
    return out.to(x.dtype)


def experts_in_tiles(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    tile: int = 16,
) -> torch.Tensor:
    """Sorted, padded, grouped: one batched product over tiles of `tile` rows, each with its expert's weights.

    Pairs of other ranks' experts count as zeros.
    """
    (num_tokens, hidden_size), top_k = x.shape, ids.shape[1]
    if num_tokens == 0:
        return torch.zeros_like(x)
    pairs, expert_of_tile = sort_into_tiles(ids, len(gate_up), tile)
    # Padding reads some token, and its result is dropped with the last row of `out`.
    rows = x[(pairs // top_k).clamp(max=num_tokens - 1)].view(-1, tile, hidden_size)
    expert_of_tile = expert_of_tile.clamp(min=0)
    y = torch.bmm(_activate(torch.bmm(rows, gate_up[expert_of_tile].mT)), down[expert_of_tile].mT)
    out = y.new_zeros(num_tokens * top_k + 1, hidden_size)
    out[pairs] = y.flatten(0, 1)
    return _combine(out[:-1], weights, x.dtype)


def sort_into_tiles(ids: torch.Tensor, num_experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, top_k] -> (pairs [num_tiles * tile] int64, expert_of_tile [num_tiles] int64), as drawn above."""
    flat = ids.flatten()
    num_pairs = flat.numel()
    num_tiles = min(num_pairs, (num_pairs + num_experts * (tile - 1)) // tile)
    sorted_ids, order = flat.where(_is_here(flat, num_experts), num_experts).sort(stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True)
    starts = torch.searchsorted(sorted_ids, experts)
    tiles_of_expert = (ends - starts + tile - 1) // tile
    last_tiles = tiles_of_expert.cumsum(0)
    expert_of_tile = torch.searchsorted(last_tiles, torch.arange(num_tiles, device=ids.device), right=True)
    # A pair's row: its expert's first tile, and its place among the expert's pairs. Other ranks' go behind them all.
    at = sorted_ids.clamp(max=num_experts - 1)
    place = torch.arange(num_pairs, device=ids.device) - starts[at]
    row = ((last_tiles - tiles_of_expert)[at] * tile + place).where(sorted_ids < num_experts, num_tiles * tile)
    pairs = torch.full((num_tiles * tile + 1,), num_pairs, device=ids.device).scatter_(0, row, order)[:-1]
    return pairs, expert_of_tile.masked_fill(expert_of_tile == num_experts, -1)


def experts_grouped(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_in_all: int = 0,
) -> torch.Tensor:
    """Sorted and grouped by PyTorch's own grouped product, which takes the borders between experts as a tensor."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return torch.zeros_like(x)
    if num_in_all:
        # Other ranks' pairs go behind the last border, where rows of the product are not computed.
        is_here = _is_here(ids, len(gate_up))
        ids = ids.where(is_here, len(gate_up))
    sorted_ids, order = ids.flatten().sort(stable=True)
    experts = torch.arange(len(gate_up), device=ids.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    activated = _activate(F.grouped_mm(x[order // top_k], gate_up.mT, offs=ends))
    y = F.grouped_mm(activated, down.mT, offs=ends)
    y = torch.empty_like(y).index_copy_(0, order, y)
    if num_in_all:
        y.masked_fill_(~is_here.view(-1, 1), 0.0)
    return _combine(y, weights, x.dtype)


def experts_in_block_fp8(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
) -> torch.Tensor:
    """`experts_by_loop` with weights in e4m3, a scale for each 128 x 128, and inputs quantised 1 x 128 on the way."""
    out = torch.zeros_like(x, dtype=torch.float32)
    x = dequantize(*quantize_1x128(x))
    for expert in range(len(gate_up)):
        tokens, places = torch.where(ids == expert)
        if len(tokens):
            gate, up = F.linear(x[tokens], dequantize(gate_up[expert], gate_up_scale[expert])).chunk(2, dim=-1)
            h = dequantize(*quantize_1x128(F.silu(gate) * up))
            y = F.linear(h, dequantize(down[expert], down_scale[expert]))
            out.index_add_(0, tokens, y * weights[tokens, places, None])
    return out


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    num_in_all: int = 0,
) -> torch.Tensor:
    """The fastest that serves the tensors; scales come with weights in fp8.

    num_in_all: of how many experts the E given ones are a part; 0 where they are all, and every id is below E.
    """
    if use_fused_kernels(x):
        from minivllm.moe.fused import fused_experts

        return fused_experts(x, weights, ids, gate_up, down, gate_up_scale, down_scale, num_in_all=num_in_all)
    if gate_up_scale is not None:
        return experts_in_block_fp8(x, weights, ids, gate_up, down, gate_up_scale, down_scale).to(x.dtype)
    # On a GPU other dtypes would go through a loop that waits for the device, and rows must start at 16 bytes.
    fits_gpu = x.dtype == torch.bfloat16 and gate_up.shape[2] % 8 == 0 and down.shape[2] % 8 == 0
    if hasattr(F, "grouped_mm") and (x.device.type == "cpu" or (x.is_cuda and fits_gpu)):
        return experts_grouped(x, weights, ids, gate_up, down, num_in_all)
    return experts_in_tiles(x, weights, ids, gate_up, down)


def _is_here(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return (ids >= 0) & (ids < num_experts)


def _activate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [..., 2 I] -> [..., I]."""
    if use_fused_kernels(gate_up):
        from minivllm.layers.fused import silu_and_mul

        return silu_and_mul(gate_up.view(-1, gate_up.shape[-1])).view(*gate_up.shape[:-1], -1)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _combine(y: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y [T * top_k, H] in the order of the pairs, weights [T, top_k] float32 -> [T, H], summed in float32."""
    return (y.view(*weights.shape, -1) * weights[..., None]).sum(dim=1).to(dtype)
