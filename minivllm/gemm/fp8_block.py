"""a b^T in fp8 with a scale for each 1 x 128 of a and each 128 x 128 of b: DeepSeek-V3's product.

    acc = 0
    for each 128 of K:
        partial = a[:, k] b[:, k]^T                  a fresh accumulator: 4 tensor core steps of 32
        acc    += partial * (sa[:, k] * sb[n, k])    float32, in the ordinary cores

A step along K is as long as a scale's region, so a scale is applied to 128 sums at once. That also repairs what Hopper
does to fp8: its tensor cores keep about 14 bits of a running sum, and the error would grow with K; here a sum of 128
is carried over into float32 before it can.

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
    GROUP,
    Tiles,
    launch,
    load_tile,
    num_programs,
    part_of_k,
    reduce_splits,
    split_k,
    store_tile,
    tile_of,
    workspace,
)
from minivllm.triton_env import INTERPRET, tl, triton

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# By the largest M that a row serves. Wider than 128 would need two accumulators of 256 columns: too many registers.
SMALL_TILES = {
    16: Tiles(16, 64, 128, 4, 4),
    32: Tiles(32, 64, 128, 4, 4),
    64: Tiles(64, 128, 128, 8, 4),
    128: Tiles(128, 128, 128, 8, 4),
}
SQUARE = Tiles(256, 64, 128, 8, 4)
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
def _fp8_block_kernel(
    a, b, a_scale, b_scale, out, M, N, K, a_row, b_row, sa_row, sa_step, sb_row, sb_step, out_row, k_steps,
    num_programs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = num_m * num_n
    for index in tl.range(tl.program_id(0), num_tiles * SPLITS, num_programs, flatten=DESCRIPTOR):
        split = index // num_tiles
        tile_m, tile_n = tile_of(index % num_tiles, num_m, num_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        sa_at = a_scale + rows.to(tl.int64) * sa_row
        sb_at = b_scale + column // BLOCK_K * sb_row
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        lo, hi = part_of_k(split, k_steps, tl.cdiv(K, BLOCK_K), SPLITS)
        for step in tl.range(lo, hi):
            sa = tl.load(sa_at + step * sa_step, mask=rows < M, other=0.0)
            sb = tl.load(sb_at + step * sb_step)
            x = load_tile(a, row, step * BLOCK_K, M, K, a_row, BLOCK_M, BLOCK_K, DESCRIPTOR)
            y = load_tile(b, column, step * BLOCK_K, N, K, b_row, BLOCK_N, BLOCK_K, DESCRIPTOR)
            acc = scaled_dot(acc, x, y, sa, sb)
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
    tiles = tiles or choose_tiles(m, n, k, a.device)
    if tiles.block_k != BLOCK or BLOCK % tiles.block_n:
        fail("tiles", f"of block_k {BLOCK} and a block_n that divides it", tiles)
    parts = workspace(out, tiles.splits)
    k_steps = cdiv(k // BLOCK, tiles.splits)
    programs = min(num_programs(a.device), tiles.count(m, n) * tiles.splits)
    strides = (a.stride(0), b.stride(0), *a_scale.stride(), *b_scale.stride(), n)
    launch(
        _fp8_block_kernel, programs, a, b, (a_scale, b_scale, parts), (m, n, k, *strides, k_steps, programs), tiles,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, SPLITS=tiles.splits, GROUP=GROUP,
    )  # fmt: skip
    return out if parts is out else reduce_splits(parts, out)
