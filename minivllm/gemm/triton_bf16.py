"""a b^T in 16-bit floats (and float32): the plain matrix product, persistent, through TMA.

    for each tile of C that is this program's:
        acc = 0                                   [BLOCK_M, BLOCK_N] float32, in registers
        for k in steps of BLOCK_K:
            acc += a[tile m, k] b[tile n, k]^T    loads run num_stages - 1 steps ahead of the products
        C[tile] = acc, rounded once

A tile of 128 x 256 with a step of 64 does 43 FLOP for each byte it loads, and its accumulator fills the registers of
two warpgroups. M, N and K are free: loads beyond a matrix give zeros, stores are masked. Results repeat bit by bit.

Method: Triton's persistent matrix product; grouped order as in its tutorials; tiles.py has what the kernels share.
"""

import torch
from torch import Tensor

from minivllm.attention.checks import FLOATS, check_tensor, fail
from minivllm.attention.common import dot
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

# By the largest M that a row serves, for 16-bit operands. Small M: reading b is all the work, so K is split.
SMALL_TILES = {
    16: Tiles(16, 64, 128, 4, 4),
    32: Tiles(32, 64, 128, 4, 4),
    64: Tiles(64, 64, 128, 4, 4),
    128: Tiles(128, 128, 128, 8, 3),
}
WIDE = Tiles(128, 256, 64, 8, 3)
SQUARE = Tiles(128, 128, 64, 4, 5)
FLOAT32_TILES = Tiles(32, 32, 32, 4, 2)
INTERPRETER_TILES = Tiles(32, 32, 64, 4, 1)


def choose_tiles(m: int, n: int, k: int, element_size: int, device: torch.device) -> Tiles:
    """Tiles for a product, from what the host knows."""
    if INTERPRET.value:
        return split_k(INTERPRETER_TILES, m, n, k, device)
    if element_size == 4:
        return split_k(FLOAT32_TILES, m, n, k, device)
    for most_rows, tiles in SMALL_TILES.items():
        if m <= most_rows:
            return split_k(tiles, m, n, k, device)
    if WIDE.count(m, n) >= num_programs(device):
        return WIDE
    return split_k(SQUARE, m, n, k, device)


@triton.jit
def _gemm_kernel(
    a, b, out, M, N, K, a_row, b_row, out_row, k_steps, num_programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
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
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        lo, hi = part_of_k(split, k_steps, tl.cdiv(K, BLOCK_K), SPLITS)
        for step in tl.range(lo, hi):
            x = load_tile(a, row, step * BLOCK_K, M, K, a_row, BLOCK_M, BLOCK_K, DESCRIPTOR)
            y = load_tile(b, column, step * BLOCK_K, N, K, b_row, BLOCK_N, BLOCK_K, DESCRIPTOR)
            acc = dot(x, y.T, acc)
        store_tile(out + split.to(tl.int64) * M * N, acc, row, column, M, N, out_row, BLOCK_M, BLOCK_N)


def gemm_bf16(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, tiles: Tiles | None = None) -> Tensor:
    """a [M, K], b [N, K], both bfloat16, float16 or float32, rows contiguous -> a b^T [M, N] in out_dtype (a's).

    Sums are float32; float32 operands are multiplied exactly, not as TF32. `tiles` overrides the table. Raises
    ValueError for a wrong shape, dtype, device or stride.
    """
    check_tensor("a", a, 2, FLOATS, a.device)
    check_tensor("b", b, 2, (a.dtype,), a.device)
    if b.shape[1] != a.shape[1]:
        fail("b", f"of K = {a.shape[1]}, like a", b.shape[1])
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=out_dtype or a.dtype, device=a.device)
    if m == 0 or n == 0 or k == 0:
        return out.zero_()

    def product(rows: slice, tiles: Tiles) -> None:
        launch(_gemm_kernel, a[rows], b, (), out[rows], tiles)

    if tiles is None:
        tiles = choose_tiles(m, n, k, a.element_size(), a.device)
        in_waves(product, tiles, SQUARE if tiles == WIDE else tiles, m, n, k, a.device)
    else:
        product(slice(0, m), tiles)
    return out
