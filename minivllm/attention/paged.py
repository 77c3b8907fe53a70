"""PagedAttention: attention of a few new tokens over a long context that lies in pages all over the cache.

    token n of request b is at  cache[block_table[b, n // block_size], n % block_size]

One kernel serves decode (one query a request), chunked prefill (many) and the check of k drafts (k + 1): they differ
only in how many query rows a request has. Decode reads all of K and V for a handful of dot products, so bytes are
everything, and two things keep the memory busy:

- GQA packing: the query heads that share a K/V head are rows of one tile, so K and V are read once for all of them.
  Row r of a tile of request b and K/V head h is query token r // GROUP, head h GROUP + r % GROUP.
- Split-KV: with fewer (request, K/V head, tile) triples than the GPU has multiprocessors, each context is cut into
  num_splits parts. A part gives (out_i, lse_i) in float32, and a second small kernel merges them (common.py).

        |--- split 0 ---|--- split 1 ---|--- split 2 ---|      tokens of one request, whole tiles each
             out_0, lse_0    out_1, lse_1    out_2, lse_2  ->  out, lse

The number of splits follows from shapes alone and each split finds its share on the device, so a launch can be
captured in a CUDA graph and replayed for longer contexts. Tails of pages and tables are masked, never read. An FP8
cache (e4m3, one scale each for K and V) is converted on the way into the dot product; the scales join softmax_scale
and the output.

Shapes: q [total_q, H, D], caches [num_blocks, block_size, Hkv, D], out [total_q, H, Dv], lse [H, total_q].
Method: PagedAttention (Kwon et al. 2023), split-KV from Flash-Decoding (Dao et al. 2023).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.attention.checks import (
    CACHES,
    FLOATS,
    cdiv,
    check_block_size,
    check_group,
    check_head_dim,
    check_index,
    check_scale,
    check_tensor,
    check_window,
    fail,
    next_power_of_2,
    num_multiprocessors,
)
from minivllm.attention.common import (
    LOG2E,
    cap_scores,
    dot,
    finish,
    key_range,
    load_pages,
    merge_parts,
    online_softmax,
    round_to,
    seen,
)
from minivllm.triton_env import INTERPRET, tl, triton
from minivllm.triton_launch import launch_kernel


class Tiles(NamedTuple):
    """How one launch is cut: packed query rows, keys, warps a program, loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# What a sweep on an H200 kept for 16-bit inputs: by packed rows, then the larger head dim.
TILES = {
    16: {128: Tiles(16, 32, 2, 4), 256: Tiles(16, 32, 2, 3)},
    32: {128: Tiles(32, 64, 4, 3), 256: Tiles(32, 32, 4, 2)},
    64: {128: Tiles(64, 64, 4, 3), 256: Tiles(64, 32, 4, 2)},
}
# A few long contexts: fewer programs, so each needs more warps to keep its loads in flight.
SPLIT_TILES = {128: Tiles(16, 64, 4, 3), 256: Tiles(16, 32, 4, 3)}
_FLOAT32_TILES = Tiles(16, 32, 4, 2)
_PROGRAMS_PER_SM = 2
_LEAST_TILES = 4


def choose_tiles(rows: int, head_dim: int, element_size: int, split: bool) -> Tiles:
    """Tiles for requests of up to `rows` packed query rows, split or not, from what the host knows."""
    if INTERPRET.value:
        return Tiles(16 if rows <= 16 else 32, 32, 4, 1)
    if element_size == 4:
        return _FLOAT32_TILES
    width = 128 if head_dim <= 128 else 256
    return SPLIT_TILES[width] if split and rows <= 16 else TILES[min(max(16, next_power_of_2(rows)), 64)][width]


def choose_num_splits(programs: int, longest: int, where: torch.device) -> int:
    """Splits of each context, so that programs x splits fill the GPU and each has a few tiles of work."""
    wanted = _PROGRAMS_PER_SM * (num_multiprocessors(where.index) if where.type == "cuda" else 4)
    return max(1, min(wanted // max(programs, 1), cdiv(longest, 64 * _LEAST_TILES)))


@triton.jit
def _paged_kernel(
    q, k_cache, v_cache, out, lse, cu_seqlens_q, seq_lens, block_table,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head,
    out_split, out_token, out_head, lse_split, lse_head, table_row,
    scale, softcap, v_scale, left, right, num_splits,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SPLIT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0) % num_splits
    kv_head = tl.program_id(0) // num_splits
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    b = tl.program_id(2)

    q_start = tl.load(cu_seqlens_q + b)
    s_q = tl.load(cu_seqlens_q + b + 1) - q_start
    s_k = tl.load(seq_lens + b)
    if tile * BLOCK_M < s_q * GROUP:
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        token = (q_start + row // GROUP).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        live = row < s_q * GROUP
        q_at = q + token[:, None] * q_token + head[:, None] * q_head + d[None, :]
        q_tile = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)

        # Positions of the tile's first and last token among the keys bound what the tile sees; each split gets an
        # equal share of it, in whole tiles.
        position = row // GROUP + s_k - s_q
        first = tile * BLOCK_M // GROUP + s_k - s_q
        last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, s_q - 1) + s_k - s_q
        lo, hi = key_range(first, last, s_k, left, right, HAS_LEFT, HAS_RIGHT)
        lo = lo // BLOCK_N * BLOCK_N
        share = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N), num_splits) * BLOCK_N
        lo = lo + split * share
        hi = tl.minimum(lo + share, hi)

        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        table = block_table + b.to(tl.int64) * table_row
        k_at = k_cache + kv_head.to(tl.int64) * k_head
        v_at = v_cache + kv_head.to(tl.int64) * v_head
        page = load_pages(table, lo, hi, BLOCK_SIZE, BLOCK_N)
        for n in tl.range(lo, hi, BLOCK_N):
            key = n + tl.arange(0, BLOCK_N)
            inside = key < hi
            k_rows = page * k_block + key % BLOCK_SIZE * k_slot
            v_rows = page * v_block + key % BLOCK_SIZE * v_slot
            page = load_pages(table, n + BLOCK_N, hi, BLOCK_SIZE, BLOCK_N)
            k = tl.load(k_at + k_rows[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
            s = dot(q_tile, k.to(q_tile.dtype).T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if SOFTCAP:
                s = cap_scores(s, scale, softcap)
            s = tl.where(seen(position, key, hi, left, right, HAS_LEFT, HAS_RIGHT), s, float("-inf"))
            p, alpha, m, l = online_softmax(s, m, l, 1.0 if SOFTCAP else scale)
            v = tl.load(v_at + v_rows[:, None] + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
            acc = dot(round_to(p, q_tile.dtype), v.to(q_tile.dtype), acc * alpha[:, None])

        o, row_lse = finish(acc, m, l)
        if not SPLIT or lo < hi:
            o_at = (
                out
                + split.to(tl.int64) * out_split
                + token[:, None] * out_token
                + head[:, None] * out_head
                + dv[None, :]
            )
            tl.store(o_at, round_to(o * v_scale, out.dtype.element_ty), live[:, None] & (dv < DV)[None, :])
        if lse is not None:
            tl.store(lse + split.to(tl.int64) * lse_split + head.to(tl.int64) * lse_head + token, row_lse, live)


@triton.jit
def _merge_splits_kernel(
    parts, part_lse, out, lse,
    part_stride, part_token, part_head, lse_split, lse_head, out_token, out_head, num_splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV)
    o, row_lse = merge_parts(
        parts + token * part_token + head * part_head, part_lse + head * lse_head + token,
        0, num_splits, part_stride, lse_split, dv, dv < DV, BLOCK_P,
    )  # fmt: skip
    tl.store(out + token * out_token + head * out_head + dv, round_to(o, out.dtype.element_ty), dv < DV)
    if lse is not None:
        tl.store(lse + head * lse_head + token, row_lse)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int | None = None,
    return_softmax_lse: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_seqlen_k: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each request's last tokens over its paged context.

    q [total_q, H, D] in float32, float16 or bfloat16, rows cu_seqlens_q[b] : cu_seqlens_q[b + 1] of request b;
    k_cache [num_blocks, block_size, Hkv, D] and v_cache [num_blocks, block_size, Hkv, Dv] in q's dtype or
    float8_e4m3fn (holding k / k_scale and v / v_scale), block_size a power of two up to 256; seq_lens [B] int32,
    the new tokens included; block_table [B, width] int32. max_seqlen_q (and max_seqlen_k, by default all that the
    table can hold) are upper bounds; the work is cut by them. num_splits None chooses one.
    Returns out [total_q, H, Dv], and lse [H, total_q] float32 (natural log) if asked; rows of q that belong to no
    request are unspecified. Raises ValueError for a wrong shape, dtype, device or stride.
    """
    tiles, num_splits = plan_launch(
        q, k_cache, v_cache, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, num_splits, max_seqlen_k
    )
    total_q, num_heads, d = q.shape
    scale = check_scale(softmax_scale, d)
    left, right = check_window(window_size, causal, softcap)
    out = torch.empty(total_q, num_heads, v_cache.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(num_heads, total_q, dtype=torch.float32, device=q.device) if return_softmax_lse else None
    launch(
        q, k_cache, v_cache, out, lse, cu_seqlens_q, seq_lens, block_table, max_seqlen_q,
        scale * k_scale, v_scale, left, right, softcap, tiles, num_splits,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def plan_launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    num_splits: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tiles, int]:
    """The last two arguments of `launch`, after a check of all others: once a step, where all layers look alike."""
    (_, num_heads, d), (_, block_size, num_kv_heads, dv) = _check(
        q, k_cache, v_cache, cu_seqlens_q, seq_lens, block_table
    )
    if num_splits is not None and num_splits < 1:
        fail("num_splits", "None or at least 1", num_splits)
    rows = max_seqlen_q * (num_heads // num_kv_heads)
    if num_splits is None:
        longest = block_table.shape[1] * block_size if max_seqlen_k is None else max_seqlen_k
        programs = cdiv(rows, 64) * num_kv_heads * seq_lens.shape[0]
        num_splits = choose_num_splits(programs, longest, q.device)
    return choose_tiles(rows, max(d, dv), q.element_size(), num_splits > 1), num_splits


def launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None,
    cu_seqlens_q: Tensor, seq_lens: Tensor, block_table: Tensor, max_seqlen_q: int,
    scale: float, v_scale: float, left: int, right: int, softcap: float, tiles: Tiles, num_splits: int,
) -> None:  # fmt: skip
    """Fill out (and lse) with the given tiles and splits, for checked arguments; right = 0 stands for causal."""
    (total_q, num_heads, d), (_, block_size, num_kv_heads, dv) = q.shape, v_cache.shape
    parts, part_lse, part_strides, lse_split = out, lse, (0, *out.stride()[:2]), 0
    if num_splits > 1:
        parts = torch.empty(num_splits, total_q, num_heads, dv, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(num_splits, num_heads, total_q, dtype=torch.float32, device=q.device)
        part_strides, lse_split = parts.stride()[:3], part_lse.stride(0)
    group = num_heads // num_kv_heads
    block_dv = next_power_of_2(dv)
    grid = (num_kv_heads * num_splits, cdiv(max_seqlen_q * group, tiles.block_m), seq_lens.shape[0])
    if 0 in grid or total_q == 0:
        return
    launch_kernel(
        _paged_kernel, grid,
        (q, k_cache, v_cache, parts, part_lse, cu_seqlens_q, seq_lens, block_table),
        (
            *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            *part_strides, lse_split, total_q, block_table.stride(0),
            float(scale * (1.0 if softcap > 0 else LOG2E)), float(softcap), float(v_scale), left, right, num_splits,
        ),
        tiles.num_warps, tiles.num_stages,
        GROUP=group, BLOCK_SIZE=block_size, D=d, DV=dv, SPLIT=num_splits > 1,
        HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, SOFTCAP=softcap > 0,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=next_power_of_2(d), BLOCK_DV=block_dv,
    )  # fmt: skip
    if num_splits > 1:
        launch_kernel(
            _merge_splits_kernel, (total_q, num_heads, 1),
            (parts, part_lse, out, lse),
            (*part_strides, lse_split, total_q, *out.stride()[:2], num_splits),
            DV=dv, BLOCK_DV=block_dv, BLOCK_P=min(next_power_of_2(num_splits), 32),
        )  # fmt: skip


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, block_table: Tensor
) -> tuple[torch.Size, torch.Size]:
    check_tensor("q", q, 3, FLOATS, q.device)
    check_tensor("k_cache", k_cache, 4, (q.dtype, CACHES[-1]), q.device)
    check_tensor("v_cache", v_cache, 4, (k_cache.dtype,), q.device)
    check_head_dim("q", q.shape[2])
    check_head_dim("v_cache", v_cache.shape[3])
    check_block_size("k_cache", k_cache.shape[1], 1)
    check_group("k_cache", k_cache.shape[2], q.shape[1])
    if k_cache.shape[3] != q.shape[2]:
        fail("k_cache", f"of head dim {q.shape[2]}, like q", k_cache.shape[3])
    if v_cache.shape[:3] != k_cache.shape[:3]:
        fail("v_cache", f"of shape {(*k_cache.shape[:3], 'Dv')}, like k_cache", tuple(v_cache.shape))
    check_index("seq_lens", seq_lens, (None,), q.device)
    batch = seq_lens.shape[0]
    check_index("cu_seqlens_q", cu_seqlens_q, (batch + 1,), q.device)
    check_index("block_table", block_table, (batch, None), q.device)
    return q.shape, v_cache.shape
