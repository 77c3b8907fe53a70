"""How the work of one product is cut, and what our kernels share: the order of tiles, loads, split sums.

C [M, N] is cut into tiles of BLOCK_M x BLOCK_N. As many programs as the GPU has multiprocessors stay on it
("persistent") and take tiles in turn, so that the loads of the next tile start under the last sums of this one. Tiles
that run at the same time should share rows of a and b while these are in the L2 cache; hence the order, GROUP tiles
down before one to the right:

    0 4  8         M down, N to the right, GROUP = 4
    1 5  9
    2 6 10
    3 7 11

Where C has fewer tiles than the GPU has multiprocessors, K is split: SPLITS programs sum a part of K each into a
float32 tile of their own, and `reduce_splits` adds these in order. So every result repeats bit by bit.

Tiles come from a table of few rows by what the host knows (M, N, K), never by trial at run time. Each row of each
table is verified by the tests.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.attention.checks import cdiv, num_multiprocessors
from minivllm.attention.common import round_to
from minivllm.triton_env import INTERPRET, TensorDescriptor, tl, triton
from minivllm.triton_launch import launch_kernel

GROUP = 8
# In the interpreter there is nothing to fill: two programs show that tiles are shared out.
_INTERPRETER_PROGRAMS = 2
_REDUCE_BLOCK = 1024
_DESCRIPTOR_ROWS = 64
_DESCRIPTOR_WORK = 2**31


class Tiles(NamedTuple):
    """One launch: the tile of C, the step along K, warps a program, loads in flight, parts of K."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1

    def count(self, m: int, n: int) -> int:
        """Tiles of C."""
        return cdiv(m, self.block_m) * cdiv(n, self.block_n)


def split_k(tiles: Tiles, m: int, n: int, k: int, device: torch.device, most: int = 8) -> Tiles:
    """The same tiles with K in as many parts as fill the GPU, at least 4 steps each."""
    programs = num_programs(device)
    splits = min(programs // max(tiles.count(m, n), 1), most, cdiv(k, 4 * tiles.block_k))
    return tiles._replace(splits=max(splits, 1))


def in_waves(product: Callable[[slice, Tiles], None], tiles: Tiles, rest: Tiles, m: int, n: int, k: int,
             device: torch.device) -> None:  # fmt: skip
    """Call product(rows of C, tiles) for all of C, in one piece or two.

    As many tiles as there are multiprocessors make a wave, and a last wave that is nearly empty lasts as long as a full
    one: 4096 x 2112 in tiles of 128 x 256 are 288, on 132 multiprocessors two waves and 24. The rows of tiles that fill
    no whole wave are then a product of their own: in tiles like `rest`, with K split.
    """
    whole = rows_of_whole_waves(tiles, m, n, num_programs(device))
    if whole < m:
        product(slice(whole, m), split_k(rest, m - whole, n, k, device))
    product(slice(0, whole), tiles)


def rows_of_whole_waves(tiles: Tiles, m: int, n: int, programs: int) -> int:
    """Rows of C whose tiles fill whole waves; m where the last wave is more than half full, or the only one."""
    if tiles.count(m, n) % programs > programs // 2:
        return m
    waves = tiles.count(m, n) // programs
    return min(waves * programs // cdiv(n, tiles.block_n) * tiles.block_m, m) or m


def num_programs(device: torch.device) -> int:
    """Programs that a persistent kernel is launched with."""
    return _INTERPRETER_PROGRAMS if device.type == "cpu" else num_multiprocessors(device.index)


@triton.jit
def tile_of(index, num_m, num_n, GROUP: tl.constexpr):
    """The tile's place (m, n) in C, by the order above."""
    per_group = GROUP * num_n
    first = index // per_group * GROUP
    height = tl.minimum(num_m - first, GROUP)
    return first + index % per_group % height, index % per_group // height


@triton.jit
def part_of_k(split, k_steps, num_steps, SPLITS: tl.constexpr):
    """First and last step along K of a split; two loops become one (flatten) only if this depends on no split."""
    lo = 0
    hi = num_steps
    if SPLITS > 1:
        lo = split * k_steps
        hi = tl.minimum(lo + k_steps, num_steps)
    return lo, hi


@triton.jit
def load_tile(x, row, column, num_rows, num_columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              DESCRIPTOR: tl.constexpr):  # fmt: skip
    """[ROWS, COLUMNS] of x [num_rows, num_columns] from (row, column) on; zeros beyond x."""
    if DESCRIPTOR:
        tile = x.load([row, column])
    else:
        r = row + tl.arange(0, ROWS)
        c = column + tl.arange(0, COLUMNS)
        live = (r < num_rows)[:, None] & (c < num_columns)[None, :]
        tile = tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :], mask=live, other=0.0)
    return tile


@triton.jit
def store_tile(out, tile, row, column, num_rows, num_columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """tile [ROWS, COLUMNS], rounded, into out [num_rows, num_columns] at (row, column); nothing beyond out."""
    r = row + tl.arange(0, ROWS)
    c = column + tl.arange(0, COLUMNS)
    live = (r < num_rows)[:, None] & (c < num_columns)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * stride + c[None, :], round_to(tile, out.dtype.element_ty), mask=live)


@triton.jit
def _reduce_kernel(parts, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    total = tl.zeros([BLOCK], tl.float32)
    part = at
    for _ in tl.static_range(SPLITS):
        total += tl.load(parts + part, mask=live, other=0.0)
        part += size
    tl.store(out + at, round_to(total, out.dtype.element_ty), mask=live)


def reduce_splits(parts: Tensor, out: Tensor) -> Tensor:
    """parts [splits, M, N] float32, summed over splits into out [M, N], both contiguous; nothing if they are one."""
    if parts is out:
        return out
    size = out.numel()
    launch_kernel(
        _reduce_kernel, (cdiv(size, _REDUCE_BLOCK), 1, 1), (parts, out), (size,), SPLITS=len(parts), BLOCK=_REDUCE_BLOCK
    )
    return out


def workspace(out: Tensor, splits: int) -> Tensor:
    """Where programs write: out itself, or a float32 tile for each part of K."""
    return out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)


def fits_descriptor(*tensors: Tensor) -> bool:
    """Whether TMA can read the matrices as they lie: rows that start at multiples of 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(0) > 0 for x in tensors)


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of x [R, C] that loads [rows, columns]; what lies beyond x reads as zeros."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def use_descriptors(tiles: Tiles, a: Tensor, b: Tensor) -> bool:
    """Whether a launch goes through TMA: large tiles do where the tensors allow it.

    Small products read through plain pointers: making descriptors takes the host longer than such a kernel runs.
    """
    is_large = INTERPRET.value or len(a) * len(b) * a.shape[1] >= _DESCRIPTOR_WORK
    return is_large and tiles.block_m >= _DESCRIPTOR_ROWS and fits_descriptor(a, b)


def launch(
    kernel: "triton.JITFunction",
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, ...],
    out: Tensor,
    tiles: Tiles,
    scale_strides: tuple[int, ...] = (),
    steps_at_once: int = 1,
    **constexprs: object,
) -> None:
    """out [M, N] = kernel's product of a [M, K] and b [N, K], and the sum over its parts if K is split.

    The kernel has the parameters (a, b, *scales, out, M, N, K, a_row, b_row, *scale_strides, out_row, k_steps,
    num_programs, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, GROUP, *constexprs, DESCRIPTOR); k_steps, the steps along K of one
    split, is a multiple of `steps_at_once`.
    """
    (m, n), k = out.shape, a.shape[1]
    parts = workspace(out, tiles.splits)
    k_steps = steps_at_once * cdiv(cdiv(k, tiles.block_k), steps_at_once * tiles.splits)
    programs = min(num_programs(a.device), tiles.count(m, n) * tiles.splits)
    numbers = (m, n, k, a.stride(0), b.stride(0), *scale_strides, out.stride(0), k_steps, programs)
    cut = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "SPLITS": tiles.splits}
    constexprs = {**cut, "GROUP": GROUP, **constexprs}
    if use_descriptors(tiles, a, b):
        a_desc, b_desc = describe(a, tiles.block_m, tiles.block_k), describe(b, tiles.block_n, tiles.block_k)
        options = {"num_warps": tiles.num_warps, "num_stages": 1 if INTERPRET.value else tiles.num_stages}
        kernel[(programs,)](a_desc, b_desc, *scales, parts, *numbers, **constexprs, DESCRIPTOR=True, **options)
    else:
        launch_kernel(
            kernel, (programs, 1, 1), (a, b, *scales, parts), numbers, tiles.num_warps, tiles.num_stages,
            **constexprs, DESCRIPTOR=False,
        )  # fmt: skip
    reduce_splits(parts, out)
