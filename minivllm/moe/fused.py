"""The experts of a layer in four kernels: sort, gated product, product, sum. For GPUs; interpreted on a CPU.

    ids [T, top_k]   --align_and_sort-->   pairs in tiles, an expert a tile
    x [T, H]         --grouped_gemm, gated-->      silu(x gate^T) * (x up^T)       [T * top_k, I]
                     --grouped_gemm, weighted-->   weight * (… down^T)             [T * top_k, H]
                     --sum of a token's pairs-->   [T, H]

With block-scaled fp8 weights both inputs are quantised on the way (1 x 128). The host waits for nothing, and all grids
follow from T, top_k and E: a decode step can be captured in a graph.
"""

import torch
from torch import Tensor

from minivllm.attention.checks import cdiv, fail
from minivllm.attention.common import round_to
from minivllm.gemm.grouped import choose_block_m, grouped_gemm
from minivllm.gemm.quantize import FP8
from minivllm.gemm.quantize_kernel import quantize_activations
from minivllm.moe.align import align_and_sort
from minivllm.triton_env import tl, triton
from minivllm.triton_launch import launch_kernel

_BLOCK = 1024


@triton.jit
def _sum_kernel(y, ids, out, size, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ALL_HERE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    total = tl.zeros([BLOCK], tl.float32)
    at = y + token * TOP_K * size + column
    for place in tl.static_range(TOP_K):
        if ALL_HERE:
            mine = live
        else:
            expert = tl.load(ids + token * TOP_K + place)
            mine = live & (expert >= 0) & (expert < num_experts)  # rows of other ranks' pairs were never written
        total += tl.load(at, mask=mine, other=0.0).to(tl.float32)
        at += size
    tl.store(out + token * size + column, round_to(total, out.dtype.element_ty), mask=live)


def fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    block_m: int | None = None,
    num_in_all: int = 0,
) -> Tensor:
    """x [T, H], weights [T, top_k] float32, ids [T, top_k], gate_up [E, 2 I, H], down [E, H, I] -> [T, H].

    gate_up and down have x's dtype, or are float8_e4m3fn with scales [E, ceil(2 I / 128), H / 128] and [E, ceil(H /
    128), I / 128]. block_m: rows of a tile, 16, 32, 64 or 128; None: by the load. num_in_all: of how many experts the E
    given ones are a part, so that ids may be outside of 0 .. E - 1 and add nothing; 0: they are all. Raises ValueError
    for what the kernels cannot serve.
    """
    (num_tokens, hidden), top_k = x.shape, ids.shape[1]
    if ids.shape != weights.shape or ids.shape[0] != num_tokens:
        fail("ids", f"of the shape of weights, {num_tokens} rows", tuple(ids.shape))
    if down.shape != (len(gate_up), hidden, gate_up.shape[1] // 2):
        fail("down", f"of shape {(len(gate_up), hidden, gate_up.shape[1] // 2)}, after gate_up", tuple(down.shape))
    out = torch.empty(num_tokens, hidden, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    num_pairs, num_experts = ids.numel(), len(gate_up)
    if num_in_all:
        ids = ids.contiguous()
    if num_tokens == 1 and block_m is None:
        sorted_pairs = (
            None,
            ids.flatten(),
        )  # its experts are distinct: each pair is a tile, and there is nothing to sort
    else:
        block_m = block_m or choose_block_m(num_pairs, num_in_all or num_experts)
        sorted_pairs = align_and_sort(ids, num_experts, block_m)
    x, x_scale = quantize_activations(x, "fp8_block") if gate_up.dtype == FP8 else (x, None)
    h = grouped_gemm(
        x, gate_up, *sorted_pairs, num_pairs, rows_a_token=top_k, gated=True, a_scale=x_scale, b_scale=gate_up_scale,
        out_dtype=out.dtype,
    )  # fmt: skip
    h, h_scale = quantize_activations(h, "fp8_block") if down.dtype == FP8 else (h, None)
    flat = weights.float().contiguous().view(-1)
    y = grouped_gemm(
        h, down, *sorted_pairs, num_pairs, weights=flat, a_scale=h_scale, b_scale=down_scale, out_dtype=out.dtype
    )
    grid = (num_tokens, cdiv(hidden, _BLOCK), 1)
    launch_kernel(
        _sum_kernel, grid, (y, ids if num_in_all else None, out), (hidden, num_experts),
        TOP_K=top_k, BLOCK=_BLOCK, ALL_HERE=not num_in_all,
    )  # fmt: skip
    return out
