"""a b^T in fp8 with a scale for each 1 x 128 of a and each 128 x 128 of b: DeepSeek-V3's product.

    acc = 0
    for each 128 of K:
        partial = a[:, k] b[:, k]^T                  a fresh accumulator: 4 tensor core steps of 32
        acc    += partial * (sa[:, k] * sb[n, k])    float32, in the ordinary cores ("promotion")

A step along K is as long as a scale's region, so a scale is applied to 128 sums at once. That also repairs what Hopper
does to fp8: its tensor cores keep about 14 bits of a running sum, and the error would grow with K; here a sum of 128
is carried over into float32 before it can.

The loop takes two steps at once, which costs registers (two partial sums) and gains time twice. The compiler waits for
a partial sum before it promotes it, and what stands between two waits overlaps: the first promotion runs under the
second product. And the threads meet half as often. Scales come by plain loads, which nothing but the loop runs ahead:
those of the next two steps are read before the products of these, or each product would wait for them.

Shapes: a [M, K] and b [N, K] float8_e4m3fn, sa [M, K / 128] and sb [ceil(N / 128), ceil(K / 128)] float32 of any
strides; best are scales that lie column by column (sa.t() contiguous), which a tile reads in one piece. K is a
multiple of 128; M and N are free.

Method: DeepSeek-V3 (2024, section 3.3) and DeepGEMM, here in Triton.
"""

import torch
from torch import Tensor

from minivllm.attention.checks import cdiv, check_tensor, fail
from minivllm.attention.common import dot
from minivllm.gemm.quantize import BLOCK, FP8
from minivllm.gemm.tiles import (
    Tiles,
    in_waves,
    launch,
    load_tile,
    part_of_k,
    split_k,
    store_tile,
    tile_of,
)
from minivllm.triton_env import INTERPRET, tl, triton

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# By the largest M that a row serves. A load in flight is two steps: 2 (BLOCK_M + BLOCK_N) 128 bytes.
SMALL_TILES = {
    16: Tiles(16, 64, 128, 4, 4),
    32: Tiles(32, 64, 128, 4, 4),
    64: Tiles(64, 128, 128, 8, 3),
    128: Tiles(128, 128, 128, 8, 3),
}
SQUARE = Tiles(128, 128, 128, 8, 3)
INTERPRETER_TILES = Tiles(32, 64, 128, 4, 1)


def choose_tiles(m: int, n: int, k: int, device: torch.device) -> Tiles:
    """Tiles for a product, from what the host knows."""
    if INTERPRET.value:
        return split_k(INTERPRETER_TILES, m, n, k, device)
    for most_rows, tiles in SMALL_TILES.items():
        if m <= most_rows:
            return split_k(tiles, m, n, k, device)
    return split_k(SQUARE, m, n, k, device)


@triton.jit
def scaled_dot(acc, x, y, sa, sb):
    """acc + (x y^T) * sa sb for one step along K: x [M, 128], y [N, 128], sa [M], sb a number or [N]."""
    partial = dot(x, y.T, tl.zeros([x.shape[0], y.shape[0]], tl.float32))
    return acc + partial * (sa[:, None] * sb)


@triton.jit
def _load_scales(sa_at, sb_at, step, end, sa_step, sb_step):
    """sa [M] and the number sb of one step; past the end, the last step's."""
    step = tl.minimum(step, end - 1)
    return tl.load(sa_at + step * sa_step), tl.load(sb_at + step * sb_step)


@triton.jit
def _fp8_block_kernel(
    a, b, a_scale, b_scale, out, M, N, K, a_row, b_row, sa_row, sa_step, sb_row, sb_step, out_row, k_steps,
    num_programs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = num_m * num_n
    for index in tl.range(tl.program_id(0), num_tiles * SPLITS, num_programs):
        split = index // num_tiles
        tile_m, tile_n = tile_of(index % num_tiles, num_m, num_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        rows = tl.minimum(row + tl.arange(0, BLOCK_M), M - 1)
        sa_at = a_scale + rows.to(tl.int64) * sa_row
        sb_at = b_scale + column // BLOCK_K * sb_row
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        lo, hi = part_of_k(split, k_steps, tl.cdiv(K, BLOCK_K), SPLITS)
        sa0, sb0 = _load_scales(sa_at, sb_at, lo, hi, sa_step, sb_step)
        sa1, sb1 = _load_scales(sa_at, sb_at, lo + 1, hi, sa_step, sb_step)
        for step in tl.range(lo, hi, 2):
            sa2, sb2 = _load_scales(sa_at, sb_at, step + 2, hi, sa_step, sb_step)
            sa3, sb3 = _load_scales(sa_at, sb_at, step + 3, hi, sa_step, sb_step)
            k = step * BLOCK_K
            x0 = load_tile(a, row, k, M, K, a_row, BLOCK_M, BLOCK_K, DESCRIPTOR)
            y0 = load_tile(b, column, k, N, K, b_row, BLOCK_N, BLOCK_K, DESCRIPTOR)
            x1 = load_tile(a, row, k + BLOCK_K, M, K, a_row, BLOCK_M, BLOCK_K, DESCRIPTOR)
            y1 = load_tile(b, column, k + BLOCK_K, N, K, b_row, BLOCK_N, BLOCK_K, DESCRIPTOR)
            acc = scaled_dot(acc, x0, y0, sa0, sb0)
            acc = scaled_dot(acc, x1, y1, sa1, sb1)  # past the end of K these are zeros
            sa0, sb0, sa1, sb1 = sa2, sb2, sa3, sb3
        store_tile(out + split.to(tl.int64) * M * N, acc, row, column, M, N, out_row, BLOCK_M, BLOCK_N)


def check_block_scaled_k(k: int) -> None:
    """Raises ValueError for a K that the block-scaled product has no whole number of scales for."""
    if k % BLOCK:
        raise ValueError(
            f"K should be a multiple of {BLOCK} for a block-scaled fp8 product (one scale for each {BLOCK} along K), "
            f"got {k}: keep such a layer in bfloat16, or use one scale a token"
        )


def gemm_fp8_block(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    tiles: Tiles | None = None,
) -> Tensor:
    """The product above -> [M, N] in out_dtype. ValueError: a wrong shape, dtype or device, or K % 128."""
    check_tensor("a", a, 2, (FP8,), a.device)
    check_tensor("b", b, 2, (FP8,), a.device)
    (m, k), n = a.shape, b.shape[0]
    if b.shape[1] != k:
        fail("b", f"of K = {k}, like a", b.shape[1])
    check_block_scaled_k(k)
    for name, scale, shape in (
        ("a_scale", a_scale, (m, k // BLOCK)),
        ("b_scale", b_scale, (cdiv(n, BLOCK), k // BLOCK)),
    ):
        if scale.shape != shape or scale.dtype != torch.float32 or scale.device != a.device:
            fail(name, f"float32 of shape {shape} on {a.device}", f"{scale.dtype} {tuple(scale.shape)} {scale.device}")
    if out_dtype not in OUT_DTYPES:
        fail("out_dtype", "one of " + ", ".join(map(str, OUT_DTYPES)), out_dtype)
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    if m == 0 or n == 0 or k == 0:
        return out.zero_()
    if tiles and (tiles.block_k != BLOCK or BLOCK % tiles.block_n):
        fail("tiles", f"of block_k {BLOCK} and a block_n that divides it", tiles)

    def product(rows: slice, tiles: Tiles) -> None:
        strides = (*a_scale.stride(), *b_scale.stride())
        launch(_fp8_block_kernel, a[rows], b, (a_scale[rows], b_scale), out[rows], tiles, strides, steps_at_once=2)

    if tiles is None:
        tiles = choose_tiles(m, n, k, a.device)
        in_waves(product, tiles, tiles, m, n, k, a.device)
    else:
        product(slice(0, m), tiles)
    return out
