"""Many products in one launch, each row of a with the matrix of its own expert.

    a [R, K], b [E, N, K]; pairs and expert_of_tile say which rows of a make up a tile and whose they are (moe/align.py)

    for tile m, columns n:      e = expert_of_tile[m]                          -1: the program returns
        rows  = pairs[tile m]                                                  sentinel: masked
        out[rows] = (a[rows // rows_a_token] b[e, n]^T) * weight[rows]         weight: optional, the router's

A token is read by each of its pairs (rows_a_token = top_k) and no copy of a in sorted order is made. With `gated`, b[e]
holds gate rows, then up rows: a program multiplies its rows by both and writes silu(gate) * up, half as wide, so that
the raw products never reach memory.

b may be bfloat16, float16, float32, or fp8 with a scale for each 128 x 128 (a: for each 1 x 128), as in fp8_block.py.
Every output row has one owner: results repeat bit by bit. Offsets are 64 bits: E * N * K passes 2^31.

Method: the fused mixture-of-experts kernel of vLLM (Kwon et al. 2023), gating moved into the first product.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.attention.checks import FLOATS, cdiv, check_tensor, fail, next_power_of_2
from minivllm.attention.common import dot, round_to
from minivllm.gemm.fp8_block import check_block_scaled_k, scaled_dot
from minivllm.gemm.quantize import BLOCK, FP8
from minivllm.gemm.tiles import GROUP, describe, fits_descriptor, tile_of
from minivllm.triton_env import INTERPRET, tl, triton
from minivllm.triton_launch import launch_kernel


class GroupedTiles(NamedTuple):
    """One launch: rows and columns of a tile (columns of each half, if gated), the step along K, warps, loads."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By rows of a tile, for the gated and the plain product of 16-bit floats, and of block-scaled fp8.
TILES = {
    16: (GroupedTiles(16, 32, 128, 4, 5), GroupedTiles(16, 64, 128, 4, 3)),
    32: (GroupedTiles(32, 64, 128, 4, 3), GroupedTiles(32, 128, 128, 4, 3)),
    64: (GroupedTiles(64, 64, 64, 4, 3), GroupedTiles(64, 128, 64, 4, 3)),
    128: (GroupedTiles(128, 128, 64, 8, 4), GroupedTiles(128, 256, 64, 8, 3)),
}
FP8_TILES = {
    16: (GroupedTiles(16, 32, 128, 4, 4), GroupedTiles(16, 64, 128, 4, 3)),
    32: (GroupedTiles(32, 64, 128, 4, 3), GroupedTiles(32, 128, 128, 4, 3)),
    64: (GroupedTiles(64, 64, 128, 4, 3), GroupedTiles(64, 128, 128, 4, 4)),
    128: (GroupedTiles(128, 64, 128, 8, 3), GroupedTiles(128, 128, 128, 8, 4)),
}
_FLOAT32_TILES = GroupedTiles(0, 32, 32, 4, 2)
_DESCRIPTOR_ROWS = 64


def choose_block_m(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile: about twice an expert's even share of the pairs.

    Then nearly every expert has one tile, and its weights, which are most of what is read, are read once. Up to 128:
    an expert with more has full tiles.
    """
    if INTERPRET.value:
        return 16
    return min(max(next_power_of_2(cdiv(2 * num_pairs, num_experts)), 16), 128)


def choose_tiles(block_m: int, dtype: torch.dtype, gated: bool) -> GroupedTiles:
    if dtype == torch.float32:
        return _FLOAT32_TILES._replace(block_m=block_m)
    return (FP8_TILES if dtype == FP8 else TILES)[block_m][0 if gated else 1]


@triton.jit
def _load_weights(b, expert, column, step, N, K, b_expert, b_row, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  DESCRIPTOR: tl.constexpr):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of b[expert] from (column, step) on. Through a descriptor, rows past N are a neighbour's:
    their columns are never stored."""
    if DESCRIPTOR:
        tile = b.load([expert * N + column, step])
    else:
        n = column + tl.arange(0, BLOCK_N)
        k = step + tl.arange(0, BLOCK_K)
        at = b + expert.to(tl.int64) * b_expert + n.to(tl.int64)[:, None] * b_row + k[None, :]
        tile = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    return tile


@triton.jit
def _load_scales(sa_at, sb_at, sb_up_at, step, sa_step, sb_step, GATED: tl.constexpr):
    """sa [BLOCK_M], sb a number, and for the up columns [BLOCK_N] of one step."""
    sa = tl.load(sa_at + step * sa_step)
    sb = tl.load(sb_at + step * sb_step)
    sb_up = tl.load(sb_up_at + step * sb_step) if GATED else sb
    return sa, sb, sb_up


@triton.jit
def _grouped_kernel(
    a, b, out, weights, a_scale, b_scale, pairs, expert_of_tile,
    num_pairs, num_experts, N, K, half, a_row, b_expert, b_row, out_row, sa_row, sa_step, sb_expert, sb_row, sb_step,
    ROWS_A_TOKEN: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    # Programs that follow each other have the same columns in GROUP tiles (tiles.py), which often are one expert's: its
    # weights are then read from memory once and come from the L2 cache after that.
    width = half if GATED else N
    num_n = tl.cdiv(width, BLOCK_N)
    tile, column = tile_of(tl.program_id(0), tl.num_programs(0) // num_n, num_n, GROUP)
    column *= BLOCK_N
    expert = tl.load(expert_of_tile + tile).to(tl.int32)
    if (expert >= 0) & (expert < num_experts):
        if pairs is None:  # a pair is a tile
            pair = tl.where(tl.arange(0, BLOCK_M) == 0, tile, num_pairs)
        else:
            pair = tl.load(pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        is_live = pair < num_pairs
        row = (pair // ROWS_A_TOKEN).to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        num_steps = tl.cdiv(K, BLOCK_K)
        if SCALED:
            # Rows of padding read the first token's scales. Where the border of gate and up lies inside of a block,
            # columns of one tile have different scales.
            sa_at = a_scale + tl.where(is_live, row, 0) * sa_row
            sb_at = b_scale + expert.to(tl.int64) * sb_expert
            up_row = tl.minimum(half + column + tl.arange(0, BLOCK_N), N - 1) // BLOCK_K
            sb_up_at = sb_at + up_row * sb_row
            sb_at += column // BLOCK_K * sb_row
            sa, sb, sb_up = _load_scales(sa_at, sb_at, sb_up_at, 0, sa_step, sb_step, GATED)
        for step in tl.range(0, num_steps):
            if SCALED:  # a step ahead, as in fp8_block.py
                after = tl.minimum(step + 1, num_steps - 1)
                sa_next, sb_next, sb_up_next = _load_scales(sa_at, sb_at, sb_up_at, after, sa_step, sb_step, GATED)
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            live = is_live[:, None] & (k < K)[None, :]
            x = tl.load(a + row[:, None] * a_row + k[None, :], mask=live, other=0.0)
            y = _load_weights(b, expert, column, step * BLOCK_K, N, K, b_expert, b_row, BLOCK_N, BLOCK_K, DESCRIPTOR)
            acc = scaled_dot(acc, x, y, sa, sb) if SCALED else dot(x, y.T, acc)
            if GATED:
                up = half + column
                y = _load_weights(b, expert, up, step * BLOCK_K, N, K, b_expert, b_row, BLOCK_N, BLOCK_K, DESCRIPTOR)
                acc_up = scaled_dot(acc_up, x, y, sa, sb_up[None, :]) if SCALED else dot(x, y.T, acc_up)
            if SCALED:
                sa, sb, sb_up = sa_next, sb_next, sb_up_next
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        if WEIGHTED:
            acc *= tl.load(weights + pair, mask=is_live, other=0.0)[:, None]
        n = column + tl.arange(0, BLOCK_N)
        live = is_live[:, None] & (n < width)[None, :]
        at = out + pair.to(tl.int64)[:, None] * out_row + n[None, :]
        tl.store(at, round_to(acc, out.dtype.element_ty), mask=live)


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    pairs: Tensor | None,
    expert_of_tile: Tensor,
    num_pairs: int,
    rows_a_token: int = 1,
    gated: bool = False,
    weights: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tiles: GroupedTiles | None = None,
) -> Tensor:
    """a [R, K], b [E, N, K] -> out [num_pairs, N], or [num_pairs, N / 2] if gated, in the order of the pairs.

    pairs [tiles * block_m] and expert_of_tile [tiles] as `align_and_sort` gives them, or None and the expert of each
    pair, which then is a tile of its own; R at least num_pairs / rows_a_token; weights [num_pairs] float32. For fp8:
    a_scale [R, K / 128], b_scale [E, ceil(N / 128), K / 128], float32. Pairs that are in no tile are left unwritten.
    Raises ValueError for a wrong shape, dtype, device or stride.
    """
    scaled = a.dtype == FP8
    check_tensor("a", a, 2, (*FLOATS, FP8), a.device)
    check_tensor("b", b, 3, (a.dtype,), a.device)
    num_experts, n, k = b.shape
    if a.shape[1] != k:
        fail("a", f"of K = {k}, like b", a.shape[1])
    if gated and n % 2:
        fail("b", "of an even number of rows an expert: gate, then up", n)
    if weights is not None and (weights.dtype != torch.float32 or weights.numel() != num_pairs):
        fail("weights", f"{num_pairs} float32 numbers, one a pair", f"{weights.numel()} of {weights.dtype}")
    if scaled:
        check_block_scaled_k(k)
        shapes = (
            ("a_scale", a_scale, (a.shape[0], k // BLOCK)),
            ("b_scale", b_scale, (num_experts, cdiv(n, BLOCK), k // BLOCK)),
        )
        for name, scale, shape in shapes:
            if scale is None or scale.shape != shape or scale.dtype != torch.float32:
                fail(
                    name, f"float32 of shape {shape}", None if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
                )
    half = n // 2 if gated else n
    out = torch.empty(num_pairs, half, dtype=out_dtype or (torch.bfloat16 if scaled else a.dtype), device=a.device)
    num_tiles = expert_of_tile.numel()
    if num_tiles == 0 or half == 0:
        return out
    block_m = min(TILES) if pairs is None else pairs.numel() // num_tiles
    tiles = tiles or choose_tiles(block_m, a.dtype, gated)
    if pairs is not None and tiles.block_m * num_tiles != pairs.numel():
        fail("pairs", f"{num_tiles} tiles of {tiles.block_m} rows", pairs.numel())
    grid = (num_tiles * cdiv(half, tiles.block_n), 1, 1)
    scales = (*(a_scale.stride() if scaled else (0, 0)), *(b_scale.stride() if scaled else (0, 0, 0)))
    numbers = (num_pairs, num_experts, n, k, half, a.stride(0), b.stride(0), b.stride(1), half, *scales)
    others = (out, weights, a_scale, b_scale, pairs, expert_of_tile)
    constexprs = {
        "ROWS_A_TOKEN": rows_a_token, "GATED": gated, "WEIGHTED": weights is not None, "SCALED": scaled,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
        "GROUP": GROUP,
    }  # fmt: skip
    # As in tiles.py: large tiles read b through TMA. Experts then have to lie one behind the other.
    if tiles.block_m >= _DESCRIPTOR_ROWS and b.is_contiguous() and fits_descriptor(b.flatten(0, 1)):
        b_desc = describe(b.flatten(0, 1), tiles.block_n, tiles.block_k)
        _grouped_kernel[grid](
            a, b_desc, *others, *numbers, **constexprs, DESCRIPTOR=True,
            num_warps=tiles.num_warps, num_stages=1 if INTERPRET.value else tiles.num_stages,
        )  # fmt: skip
    else:
        launch_kernel(
            _grouped_kernel, grid, (a, b, *others), numbers, tiles.num_warps, tiles.num_stages,
            **constexprs, DESCRIPTOR=False,
        )  # fmt: skip
    return out
