"""Who works on what in MLA decode: the cut of a batch of unequal contexts into equal parts, one a multiprocessor.

Lay the requests end to end on a line. Request b takes OVERHEAD units for its start (loading q, filling the
pipeline, writing out) and one unit for each BLOCK tokens. Cut the line into pieces of `payload` units; piece p is
what part p works on:

     request 0            request 1      request 2
     |oo|--------------|oo|------|oo|-----------------|         o = overhead, - = blocks
     |____ part 0 ____|____ part 1 ____|____ part 2 ____|

A request that a cut goes through is split, and its pieces are merged by LSE; one that lies inside a part is not.
Everything is a prefix sum and a search, in a few tensor operations on the device: the host learns nothing, so a CUDA
graph can capture it. This is the older form of FlashMLA's get_mla_metadata (DeepSeek, 2025), which walks the line in
one thread.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.attention.checks import cdiv, check_index, fail, next_power_of_2, num_multiprocessors
from minivllm.triton_env import INTERPRET

BLOCK = 64
_OVERHEAD = 5


class Tiles(NamedTuple):
    """How one launch is cut: query rows, keys, warps a program, loads in flight, programs a multiprocessor; and
    whether whole tiles come through TMA where pages allow it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int
    tma: bool


# What a sweep on an H200 kept for 16-bit queries, by query rows a request, for plain and for FP8 caches. An FP8 tile
# is widened in registers, so it has to be smaller; per_sm is the same for both, so that one plan serves either.
TILES = {
    False: {16: Tiles(16, 32, 4, 3, 2, False), 32: Tiles(32, 32, 4, 3, 2, False), 64: Tiles(64, 64, 8, 2, 1, True)},
    True: {16: Tiles(16, 32, 4, 2, 2, False), 32: Tiles(32, 32, 4, 2, 2, False), 64: Tiles(64, 32, 8, 2, 1, False)},
}
_FLOAT32_TILES = Tiles(16, 16, 4, 2, 1, False)
_INTERPRETER_PARTS = 3


def choose_tiles(rows: int, element_size: int, fp8: bool = False) -> Tiles:
    """Tiles for `rows` query rows a request (tokens x heads)."""
    if INTERPRET.value:
        return Tiles(16, 32, 4, 1, 1, False) if rows <= 16 else Tiles(32, 32, 4, 1, 1, True)
    return _FLOAT32_TILES if element_size == 4 else TILES[fp8][min(max(16, next_power_of_2(rows)), 64)]


def get_mla_metadata(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Plan a step: cache_seqlens [B] int32 and the query rows of a request, s_q x num_q_heads, for one K/V head.

    Returns tile_scheduler_metadata [parts, 8] int32, rows of (first request, its first block, last request, the
    block after its last, number of the first piece among its request's splits, 0, 0, 0), with first > last for a
    part that has no work; and num_splits [B + 1] int32, the running sum of the requests' numbers of splits.
    Made once a step, it serves every layer. For sparse attention give num_heads_q and topk: each of the B s_q
    queries is then a request of topk keys. Raises ValueError for a wrong shape, dtype or number of heads.
    """
    check_index("cache_seqlens", cache_seqlens, (None,), cache_seqlens.device)
    if num_heads_k != 1:
        fail("num_heads_k", "1: all heads share the latent", num_heads_k)
    if num_q_tokens_per_head_k < 1:
        fail("num_q_tokens_per_head_k", "at least 1", num_q_tokens_per_head_k)
    rows, lengths = num_q_tokens_per_head_k, cache_seqlens
    if topk is not None:
        if num_heads_q is None or rows % num_heads_q:
            fail("num_heads_q", f"given with topk, and a divisor of {rows}", num_heads_q)
        lengths = cache_seqlens.new_full((cache_seqlens.shape[0] * (rows // num_heads_q),), topk)
        rows = num_heads_q
    return schedule(lengths, num_parts(rows, cache_seqlens.device))


def num_parts(rows: int, where: torch.device) -> int:
    """Parts that fill the device when each is worked on by one program for every tile of query rows."""
    if where.type != "cuda":
        return _INTERPRETER_PARTS
    tiles = choose_tiles(rows, 2)
    return max(num_multiprocessors(where.index) * tiles.per_sm // cdiv(rows, tiles.block_m), 1)


def schedule(lengths: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """The cut itself: lengths [B] int32 -> metadata [parts, 8], num_splits [B + 1], as get_mla_metadata returns."""
    device = lengths.device
    num_splits = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=device)
    metadata = torch.zeros(parts, 8, dtype=torch.int32, device=device)
    if lengths.shape[0] == 0:
        metadata[:, 0] = 1
        return metadata, num_splits
    # An empty request counts as one block, so that some part writes its zeros.
    blocks = ((lengths + BLOCK - 1) // BLOCK).clamp(min=1)
    ends = torch.cumsum(blocks + _OVERHEAD, 0)
    starts = ends - blocks
    payload = (ends[-1] + parts - 1) // parts
    first_part, last_part = starts // payload, (ends - 1) // payload
    num_splits[1:] = torch.cumsum(last_part - first_part + 1, 0)

    part = torch.arange(parts, device=device)
    first = torch.searchsorted(last_part, part)
    last = torch.searchsorted(first_part, part, right=True) - 1
    # Parts behind the end of the line find no request; any row stands in for it, since first > last says so.
    here = first.clamp(max=lengths.shape[0] - 1)
    metadata[:, 0] = first
    metadata[:, 1] = (part * payload - starts[here]).clamp(min=0)
    metadata[:, 2] = last
    metadata[:, 3] = torch.minimum((part + 1) * payload - starts[last], blocks[last])
    metadata[:, 4] = part - first_part[here]
    return metadata, num_splits
