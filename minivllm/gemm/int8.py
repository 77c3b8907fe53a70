"""a b^T in int8 with one scale a token and one an output channel. Both leave the sum over K, so they come last:

    C[m, n] = sa[m] sb[n] sum_k a[m, k] b[n, k]      the sum is int32, and exact up to K = 133,000

Where K is split over programs, each part is exact, scaled, and added in float32 (tiles.py). Where one program sums all
of K, the integer is exact until it is scaled.

The same kernel serves fp8 with such scales (sums in float32), for GPUs whose libraries do not.

Shapes: a [M, K], b [N, K] int8 or float8_e4m3fn, sa [M, 1], sb [N, 1] float32. M, N and K are free.

Method: the W8A8 scheme of SmoothQuant (Xiao et al. 2022) and LLM.int8() (Dettmers et al. 2022), without their outliers.
"""

import torch
from torch import Tensor

from minivllm.attention.checks import check_tensor, fail
from minivllm.attention.common import dot
from minivllm.gemm.quantize import FP8
from minivllm.gemm.tiles import (
    Tiles,
    in_waves,
    launch,
    load_tile,
    num_programs,
    part_of_k,
    split_k,
    store_tile,
    tile_of,
)
from minivllm.triton_env import INTERPRET, tl, triton

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# By the largest M that a row serves.
SMALL_TILES = {
    16: Tiles(16, 64, 128, 4, 4),
    32: Tiles(32, 64, 128, 4, 4),
    64: Tiles(64, 64, 256, 4, 3),
    128: Tiles(128, 128, 128, 8, 4),
}
WIDE = Tiles(128, 256, 128, 8, 3)
SQUARE = Tiles(128, 128, 128, 4, 4)
INTERPRETER_TILES = Tiles(32, 32, 64, 4, 1)


def choose_tiles(m: int, n: int, k: int, device: torch.device) -> Tiles:
    """Tiles for a product, from what the host knows."""
    if INTERPRET.value:
        return split_k(INTERPRETER_TILES, m, n, k, device)
    for most_rows, tiles in SMALL_TILES.items():
        if m <= most_rows:
            return split_k(tiles, m, n, k, device)
    if WIDE.count(m, n) >= num_programs(device):
        return WIDE
    return split_k(SQUARE, m, n, k, device)


@triton.jit
def _row_scaled_kernel(
    a, b, a_scale, b_scale, out, M, N, K, a_row, b_row, out_row, k_steps, num_programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, IS_INT8: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = num_m * num_n
    for index in tl.range(tl.program_id(0), num_tiles * SPLITS, num_programs, flatten=DESCRIPTOR):
        split = index // num_tiles
        tile_m, tile_n = tile_of(index % num_tiles, num_m, num_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if IS_INT8 else tl.float32)
        lo, hi = part_of_k(split, k_steps, tl.cdiv(K, BLOCK_K), SPLITS)
        for step in tl.range(lo, hi):
            x = load_tile(a, row, step * BLOCK_K, M, K, a_row, BLOCK_M, BLOCK_K, DESCRIPTOR)
            y = load_tile(b, column, step * BLOCK_K, N, K, b_row, BLOCK_N, BLOCK_K, DESCRIPTOR)
            acc = tl.dot(x, y.T, acc, out_dtype=tl.int32) if IS_INT8 else dot(x, y.T, acc)
        rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)
        sa = tl.load(a_scale + rows, mask=rows < M, other=0.0)
        sb = tl.load(b_scale + columns, mask=columns < N, other=0.0)
        scaled = acc.to(tl.float32) * sa[:, None] * sb[None, :]
        store_tile(out + split.to(tl.int64) * M * N, scaled, row, column, M, N, out_row, BLOCK_M, BLOCK_N)


def gemm_row_scaled(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    tiles: Tiles | None = None,
) -> Tensor:
    """The product above -> [M, N] in out_dtype. ValueError: a wrong shape, dtype, device or stride."""
    check_tensor("a", a, 2, (torch.int8, FP8), a.device)
    check_tensor("b", b, 2, (a.dtype,), a.device)
    (m, k), n = a.shape, b.shape[0]
    if b.shape[1] != k:
        fail("b", f"of K = {k}, like a", b.shape[1])
    for name, scale, rows in (("a_scale", a_scale, m), ("b_scale", b_scale, n)):
        is_right = scale.shape == (rows, 1) and scale.dtype == torch.float32 and scale.device == a.device
        if not is_right or (rows > 1 and scale.stride(0) != 1):
            got = f"{scale.dtype} {tuple(scale.shape)} {scale.device}, strides {scale.stride()}"
            fail(name, f"contiguous float32 of shape {(rows, 1)} on {a.device}", got)
    if out_dtype not in OUT_DTYPES:
        fail("out_dtype", "one of " + ", ".join(map(str, OUT_DTYPES)), out_dtype)
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    if m == 0 or n == 0 or k == 0:
        return out.zero_()

    def product(rows: slice, tiles: Tiles) -> None:
        is_int8 = a.dtype == torch.int8
        launch(_row_scaled_kernel, a[rows], b, (a_scale[rows], b_scale), out[rows], tiles, IS_INT8=is_int8)

    if tiles is None:
        tiles = choose_tiles(m, n, k, a.device)
        in_waves(product, tiles, SQUARE if tiles == WIDE else tiles, m, n, k, a.device)
    else:
        product(slice(0, m), tiles)
    return out
