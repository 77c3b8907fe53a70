"""Pairs sorted by expert and padded to whole tiles, on the device: `sort_into_tiles` of experts.py as kernels.

    expert ids [T, top_k]  ->  pairs [num_tiles * tile], expert_of_tile [num_tiles]       int32, drawn in experts.py

A counting sort. A chunk of CHUNK pairs counts its experts; a prefix sum over the chunks says how many pairs of an
expert come before each; and a pair's place follows from

    first row of its expert + the expert's pairs in chunks before + its pairs before it in this chunk

    few chunks (a decode step):   _place_kernel alone, which counts all of them itself
    many:                         _count_kernel, _prefix_kernel, _place_kernel

No kernel waits for another but by being launched after it, none adds atomically, and the host learns nothing: the
order is that of the reference, and repeats. Padding rows hold the sentinel T * top_k, tiles past the last expert -1.
Ids outside of 0 .. E - 1 are other ranks' experts: their pairs are in no tile.
"""

import torch
from torch import Tensor

from minivllm.attention.checks import cdiv, next_power_of_2
from minivllm.triton_env import tl, triton
from minivllm.triton_launch import launch_kernel

_CHUNK = 128
_FEW_CHUNKS = 8
_EXPERTS_A_PROGRAM = 16


@triton.jit
def _load_chunk(ids, chunk, num_pairs, NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """The chunk's pairs and their experts; -1 past the end and for experts that are not here."""
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    return pair, tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, -1)


@triton.jit
def _count_kernel(ids, counts, num_pairs, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    _, expert = _load_chunk(ids, tl.program_id(0), num_pairs, NUM_EXPERTS, CHUNK)
    column = tl.arange(0, BLOCK_E)
    count = tl.sum((expert[:, None] == column[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * NUM_EXPERTS + column, count, mask=column < NUM_EXPERTS)


@triton.jit
def _prefix_kernel(counts, totals, num_chunks, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
    """counts [num_chunks, E], in place: pairs of an expert in a chunk -> in all chunks before; totals [E]: in all."""
    column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_E], tl.int32)
    for first in tl.range(0, num_chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)
        at = counts + chunk[:, None] * NUM_EXPERTS + column[None, :]
        live = (chunk < num_chunks)[:, None] & (column < NUM_EXPERTS)[None, :]
        count = tl.load(at, mask=live, other=0)
        tl.store(at, before[None, :] + tl.cumsum(count, 0) - count, mask=live)
        before += tl.sum(count, 0)
    tl.store(totals + column, before, mask=column < NUM_EXPERTS)


@triton.jit
def _place_kernel(
    ids, counts, totals, pairs, expert_of_tile, num_pairs, num_tiles, tiles_a_program,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    this = tl.program_id(0)
    pair, expert = _load_chunk(ids, this, num_pairs, NUM_EXPERTS, CHUNK)
    column = tl.arange(0, BLOCK_E)
    is_mine = expert[:, None] == column[None, :]
    if counts is None:
        total = tl.zeros([BLOCK_E], tl.int32)
        before = tl.zeros([BLOCK_E], tl.int32)
        for chunk in tl.range(0, tl.num_programs(0)):
            _, other = _load_chunk(ids, chunk, num_pairs, NUM_EXPERTS, CHUNK)
            count = tl.sum((other[:, None] == column[None, :]).to(tl.int32), 0)
            total += count
            before += tl.where(chunk < this, count, 0)
    else:
        total = tl.load(totals + column, mask=column < NUM_EXPERTS, other=0)
        at = counts + this * NUM_EXPERTS + column
        before = tl.load(at, mask=column < NUM_EXPERTS, other=0)
    tiles = (total + TILE - 1) // TILE
    end = tl.cumsum(tiles, 0)
    first = end - tiles

    place = tl.arange(0, CHUNK)
    is_earlier = (expert[:, None] == expert[None, :]) & (place[None, :] < place[:, None])
    rank = tl.sum(is_earlier.to(tl.int32), 1)
    start = tl.sum(tl.where(is_mine, (first * TILE + before)[None, :], 0), 1)
    tl.store(pairs + start + rank, pair, mask=expert >= 0)

    # This program's share of the tiles: whose they are, and what pads them.
    own = tl.arange(0, TILES)
    tile = this * tiles_a_program + own
    is_live = (own < tiles_a_program) & (tile < num_tiles)
    owner = tl.sum(((end[None, :] <= tile[:, None]) & (column < NUM_EXPERTS)[None, :]).to(tl.int32), 1)
    tl.store(expert_of_tile + tile, tl.where(owner == NUM_EXPERTS, -1, owner), mask=is_live)
    is_owner = owner[:, None] == column[None, :]
    pairs_left = tl.sum(tl.where(is_owner, (total - (tile[:, None] - first[None, :]) * TILE), 0), 1)
    row = tl.arange(0, TILE)
    is_padding = is_live[:, None] & (row[None, :] >= pairs_left[:, None])
    sentinel = tl.zeros([TILES, TILE], tl.int32) + num_pairs
    tl.store(pairs + tile[:, None] * TILE + row[None, :], sentinel, mask=is_padding)


def count_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """The most tiles that so many pairs can need: what the host knows."""
    return min(num_pairs, (num_pairs + num_experts * (tile - 1)) // tile)


def align_and_sort(ids: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """ids [T, top_k], integers; tile a power of two -> the two above."""
    num_pairs = ids.numel()
    num_tiles = count_tiles(num_pairs, num_experts, tile)
    pairs = torch.empty(num_tiles * tile, dtype=torch.int32, device=ids.device)
    expert_of_tile = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    if num_pairs == 0:
        return pairs, expert_of_tile
    ids = ids.contiguous()
    num_chunks, block_e = cdiv(num_pairs, _CHUNK), next_power_of_2(num_experts)
    counts = totals = None
    if num_chunks > _FEW_CHUNKS:
        counts = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=ids.device)
        totals = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
        launch_kernel(
            _count_kernel, (num_chunks, 1, 1), (ids, counts), (num_pairs,),
            NUM_EXPERTS=num_experts, BLOCK_E=block_e, CHUNK=_CHUNK,
        )  # fmt: skip
        launch_kernel(
            _prefix_kernel, (cdiv(num_experts, _EXPERTS_A_PROGRAM), 1, 1), (counts, totals), (num_chunks,),
            NUM_EXPERTS=num_experts, BLOCK_E=_EXPERTS_A_PROGRAM, ROWS=min(next_power_of_2(num_chunks), 256),
        )  # fmt: skip
    tiles_a_program = cdiv(num_tiles, num_chunks)
    launch_kernel(
        _place_kernel, (num_chunks, 1, 1), (ids, counts, totals, pairs, expert_of_tile),
        (num_pairs, num_tiles, tiles_a_program), NUM_EXPERTS=num_experts, BLOCK_E=block_e, CHUNK=_CHUNK, TILE=tile,
        TILES=next_power_of_2(tiles_a_program),
    )  # fmt: skip
    return pairs, expert_of_tile
