"""FlashMLA: decode for multi-head latent attention, where all heads read one latent row a token, and read it twice.

DeepSeek's cache holds, for each token, a latent c [d_c] from which every head's key and value could be computed, and
one rotary key [d_r] for all heads. Absorbing the up-projections into q and into the output projection leaves

    s = q_c c^T + q_r rope^T        the key is the whole row, d_c + d_r wide
    out = softmax(s) c              the value is the first d_c numbers of the very same row

so a tile of the cache is loaded once and used for both products, and all heads' queries are rows of one tile:
row r is token r // H, head r % H. With 16 heads memory is the limit, with 128 the arithmetic is.

Work is spread by a plan made once a step (mla_schedule.py): program (i, p) handles query rows i BLOCK_M .. for every
request, or piece of one, in part p. Pieces of a split request go to float32 buffers and are merged by LSE; a request
in one piece is written at once. Whole tiles come through tensor descriptors (TMA) where pages allow it; the last,
masked ones row by row, so that nothing past a request's end is read.

Three ways to store a row: plain [d_c + d_r] in q's dtype; FP8 (store.py has the layout); and either of them addressed
by `indices` instead of pages (sparse attention of DeepSeek-V3.2).

Shapes: q [B, s_q, H, d_c + d_r], cache [num_blocks, block_size, 1, row], out [B, s_q, H, d_c], lse [B, H, s_q].
Method: FlashMLA (DeepSeek, 2025); absorption from DeepSeek-V2 (2024).
"""

import torch
from torch import Tensor

from minivllm.attention.checks import (
    FLOATS,
    cdiv,
    check_block_size,
    check_head_dim,
    check_index,
    check_scale,
    check_tensor,
    fail,
    next_power_of_2,
)
from minivllm.attention.common import LOG2E, dot, finish, merge_parts, online_softmax, round_to
from minivllm.attention.mla_cache import load_rows, look_up, place
from minivllm.attention.mla_schedule import BLOCK, Tiles, choose_tiles, get_mla_metadata
from minivllm.attention.store import latent_row_bytes
from minivllm.triton_env import TensorDescriptor, tl, triton
from minivllm.triton_launch import launch_kernel

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _fold(acc, m, l, q_c, q_r, c, rope, mask, scale, MASKED: tl.constexpr):
    """Fold one tile of keys, c [N, BLOCK_C] and rope [N, BLOCK_R], into (acc, m, l)."""
    s = dot(q_r, rope.T, tl.zeros([q_c.shape[0], c.shape[0]], tl.float32))
    s = dot(q_c, c.T, s)
    if MASKED:
        s = tl.where(mask, s, float("-inf"))
    p, alpha, m, l = online_softmax(s, m, l, scale)
    acc = dot(round_to(p, q_c.dtype), c, acc * alpha[:, None])
    return acc, m, l


@triton.jit
def _attend(
    acc, m, l, q_c, q_r, cache, c_desc, rope_desc, table, cache_block, cache_slot, lo, hi, visible, scale,
    SPARSE: tl.constexpr, FP8: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Fold the keys lo .. hi into (acc, m, l); row i sees the keys below visible[i]. Addresses come a tile ahead."""
    entry = look_up(table, lo, hi, SPARSE, BLOCK_SIZE, BLOCK_N)
    if FP8:
        # An FP8 tile passes through registers on its way to the dot product, so the compiler does not pipeline its
        # load: the next tile is fetched by hand while this one is at work.
        offset, inside = place(entry, lo, hi, cache_block, cache_slot, SPARSE, BLOCK_SIZE, BLOCK_N)
        raw, rope, row_scale = load_rows(cache, offset, inside, FP8, DC, DR, BLOCK_C, BLOCK_R)
        entry = look_up(table, lo + BLOCK_N, hi, SPARSE, BLOCK_SIZE, BLOCK_N)
        for n in tl.range(lo, hi, BLOCK_N):
            next_n = n + BLOCK_N
            offset, next_inside = place(entry, next_n, hi, cache_block, cache_slot, SPARSE, BLOCK_SIZE, BLOCK_N)
            next_raw, next_rope, next_scale = load_rows(cache, offset, next_inside, FP8, DC, DR, BLOCK_C, BLOCK_R)
            entry = look_up(table, next_n + BLOCK_N, hi, SPARSE, BLOCK_SIZE, BLOCK_N)
            c = raw.to(tl.float32).reshape(BLOCK_N, BLOCK_C // 128, 128) * row_scale[:, :, None]
            c = round_to(c.reshape(BLOCK_N, BLOCK_C), q_c.dtype)
            mask = inside[None, :] & ((n + tl.arange(0, BLOCK_N))[None, :] < visible[:, None])
            acc, m, l = _fold(acc, m, l, q_c, q_r, c, rope, mask, scale, SPARSE or MASKED)
            raw, rope, row_scale, inside = next_raw, next_rope, next_scale, next_inside
    else:
        for n in tl.range(lo, hi, BLOCK_N):
            offset, inside = place(entry, n, hi, cache_block, cache_slot, SPARSE, BLOCK_SIZE, BLOCK_N)
            if TMA and not MASKED:
                cache_row = entry.to(tl.int32) * BLOCK_SIZE + n % BLOCK_SIZE
                c = c_desc.load([cache_row, 0])
                rope = rope_desc.load([cache_row, 0])
            else:
                c, rope, _ = load_rows(cache, offset, inside, FP8, DC, DR, BLOCK_C, BLOCK_R)
            entry = look_up(table, n + BLOCK_N, hi, SPARSE, BLOCK_SIZE, BLOCK_N)
            mask = inside[None, :] & ((n + tl.arange(0, BLOCK_N))[None, :] < visible[:, None])
            acc, m, l = _fold(acc, m, l, q_c, q_r, c, rope, mask, scale, SPARSE or MASKED)
    return acc, m, l


@triton.jit
def _mla_kernel(
    q, cache, c_desc, rope_desc, out, lse, parts, part_lse, table, cache_seqlens, metadata, num_splits,
    q_batch, q_token, q_head, cache_block, cache_slot, table_row, scale, S_Q, TOPK,
    H: tl.constexpr, BLOCK_SIZE: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr,
    CAUSAL: tl.constexpr, SPARSE: tl.constexpr, FP8: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    plan = metadata + tl.program_id(1) * 8
    first = tl.load(plan)
    first_block = tl.load(plan + 1)
    last = tl.load(plan + 2)
    end_block = tl.load(plan + 3)
    first_split = tl.load(plan + 4)

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < S_Q * H
    column = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    c_live = live[:, None] & (column < DC)[None, :]
    for i in range(0, last + 1 - first):
        b = first + i
        q_at = q + b.to(tl.int64) * q_batch + (row // H * q_token + row % H * q_head)[:, None]
        q_c = tl.load(q_at + column[None, :], mask=c_live, other=0.0)
        q_r = tl.load(q_at + DC + r[None, :], mask=live[:, None] & (r < DR)[None, :], other=0.0)

        s_k = TOPK if SPARSE else tl.load(cache_seqlens + b)
        visible = row // H + s_k - S_Q + 1 if CAUSAL else row * 0 + s_k
        lo = first_block * _BLOCK if b == first else 0
        hi = tl.minimum(end_block * _BLOCK, s_k) if b == last else s_k
        # Tiles that every row sees whole need no mask: up to the first row's last key.
        full_hi = tl.minimum(hi, s_k - S_Q + 1) if CAUSAL else hi
        full_hi = tl.maximum(full_hi // BLOCK_N * BLOCK_N, lo)

        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        row_table = table + b.to(tl.int64) * table_row
        acc, m, l = _attend(
            acc, m, l, q_c, q_r, cache, c_desc, rope_desc, row_table, cache_block, cache_slot, lo, full_hi, visible,
            scale, SPARSE, FP8, TMA, False, BLOCK_SIZE, DC, DR, BLOCK_N, BLOCK_C, BLOCK_R,
        )  # fmt: skip
        acc, m, l = _attend(
            acc, m, l, q_c, q_r, cache, c_desc, rope_desc, row_table, cache_block, cache_slot, full_hi, hi, visible,
            scale, SPARSE, FP8, TMA, True, BLOCK_SIZE, DC, DR, BLOCK_N, BLOCK_C, BLOCK_R,
        )  # fmt: skip

        o, row_lse = finish(acc, m, l)
        split_base = tl.load(num_splits + b)
        if tl.load(num_splits + b + 1) - split_base == 1:
            o_row = b.to(tl.int64) * S_Q * H + row
            tl.store(out + o_row[:, None] * DC + column[None, :], round_to(o, out.dtype.element_ty), c_live)
            tl.store(lse + (b.to(tl.int64) * H + row % H) * S_Q + row // H, row_lse, live)
        else:
            part = split_base + (first_split if b == first else 0)
            o_row = part.to(tl.int64) * S_Q * H + row
            tl.store(parts + o_row[:, None] * DC + column[None, :], o, c_live)
            tl.store(part_lse + o_row, row_lse, live)


@triton.jit
def _merge_kernel(
    parts, part_lse, out, lse, num_splits, S_Q,
    H: tl.constexpr, DC: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    base = tl.load(num_splits + b)
    count = tl.load(num_splits + b + 1) - base
    if count > 1:
        rows = S_Q * H
        row = tl.program_id(1)
        column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
        o, row_lse = merge_parts(
            parts + row * DC, part_lse + row, base, count, rows * DC, rows, column, column < DC, BLOCK_P
        )
        tl.store(out + (b * rows + row) * DC + column, round_to(o, out.dtype.element_ty), column < DC)
        tl.store(lse + (b * H + row % H) * S_Q + row // H, row_lse)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed latent attention of s_q new tokens a request over its paged latents.

    q [B, s_q, H, d_c + d_r] in float32, float16 or bfloat16, d_c = head_dim_v a multiple of 16 up to 512, d_r one up
    to 64; k_cache [num_blocks, block_size, 1, d_c + d_r] in q's dtype, or uint8 in store.py's FP8 layout; block_size
    a power of two from 16 to 256; block_table [B, width] and cache_seqlens [B] int32, the new tokens included;
    tile_scheduler_metadata and num_splits from get_mla_metadata with the same lengths, s_q and H. softmax_scale is
    that of the model's decompressed head dim (None: 1 / sqrt(d_c + d_r)). causal: token i sees the keys up to
    cache_seqlens - s_q + i. indices [B, s_q, topk] int32 name the slots that each token sees instead (-1 = none).
    Returns out [B, s_q, H, d_c] and lse [B, H, s_q] float32 (natural log).
    Raises ValueError for a wrong shape, dtype, device or stride.
    """
    batch, s_q, num_heads, d = _check(q, k_cache, block_table, cache_seqlens, head_dim_v, is_fp8_kvcache, indices)
    scale = check_scale(softmax_scale, d)
    table, topk = block_table, 0
    if indices is not None:
        if causal:
            fail("causal", "False with indices, which say already what a token sees", causal)
        # Each token becomes a request of its own: its keys are its own.
        q, table, topk = q.reshape(-1, 1, *q.shape[2:]), indices.reshape(-1, indices.shape[2]), indices.shape[2]
    check_index("tile_scheduler_metadata", tile_scheduler_metadata, (None, 8), q.device)
    check_index("num_splits", num_splits, (q.shape[0] + 1,), q.device)
    tiles = choose_tiles(q.shape[1] * num_heads, q.element_size(), is_fp8_kvcache)
    out, lse = launch(
        q, k_cache, table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, scale, causal, topk, tiles
    )
    return (out, lse) if indices is None else (out.view(batch, s_q, *out.shape[2:]), lse.view(batch, s_q, -1).mT)


def launch(
    q: Tensor, k_cache: Tensor, table: Tensor, cache_seqlens: Tensor, d_c: int, metadata: Tensor, num_splits: Tensor,
    scale: float, causal: bool, topk: int, tiles: Tiles,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One launch with the given tiles, for checked arguments; topk > 0: table holds slots, not pages."""
    (batch, s_q, num_heads, d), (num_blocks, block_size, _, _) = q.shape, k_cache.shape
    rows, d_r, fp8 = s_q * num_heads, d - d_c, k_cache.dtype == torch.uint8
    out = torch.empty(batch, s_q, num_heads, d_c, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, s_q, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    most_splits = batch + metadata.shape[0]
    parts = torch.empty(most_splits, rows, d_c, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(most_splits, rows, dtype=torch.float32, device=q.device)
    block_c, block_r = next_power_of_2(d_c), next_power_of_2(d_r)
    cache_block, cache_slot = k_cache.stride(0), k_cache.stride(1)
    tma = (
        not fp8 and topk == 0 and tiles.tma and block_size % tiles.block_n == 0
        and cache_block == block_size * cache_slot and k_cache.data_ptr() % 16 == 0
        and cache_slot * k_cache.element_size() % 16 == 0
    )  # fmt: skip
    c_desc = rope_desc = None
    if tma:
        c_desc, rope_desc = (
            TensorDescriptor(base, [num_blocks * block_size, width], [cache_slot, 1], [tiles.block_n, block])
            for base, width, block in ((k_cache, d_c, block_c), (k_cache[..., d_c:], d_r, block_r))
        )
    _mla_kernel[(cdiv(rows, tiles.block_m), metadata.shape[0])](
        q, k_cache, c_desc, rope_desc, out, lse, parts, part_lse, table, cache_seqlens, metadata, num_splits,
        *q.stride()[:3], cache_block, cache_slot, table.stride(0), scale * LOG2E, s_q, topk,
        H=num_heads, BLOCK_SIZE=block_size, DC=d_c, DR=d_r, CAUSAL=causal, SPARSE=topk > 0, FP8=fp8, TMA=tma,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_C=block_c, BLOCK_R=block_r,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    # A few requests are cut into many pieces each: spread a row over programs. Many are cut into two or three.
    block_c, block_p = (min(block_c, 128), 64) if batch <= 8 else (block_c, 4)
    launch_kernel(
        _merge_kernel, (batch, rows, cdiv(d_c, block_c)),
        (parts, part_lse, out, lse, num_splits), (s_q,),
        H=num_heads, DC=d_c, BLOCK_C=block_c, BLOCK_P=block_p,
    )  # fmt: skip
    return out, lse


def _check(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor,
    d_c: int, is_fp8: bool, indices: Tensor | None,
) -> torch.Size:  # fmt: skip
    check_tensor("q", q, 4, FLOATS, q.device)
    check_head_dim("head_dim_v", d_c, 512)
    d_r = q.shape[3] - d_c
    if d_r % 16 or not 16 <= d_r <= 64:
        fail("q", f"of head dim head_dim_v + d_r, d_r a multiple of 16 up to 64 (head_dim_v = {d_c})", q.shape[3])
    check_tensor("k_cache", k_cache, 4, (torch.uint8,) if is_fp8 else (q.dtype,), q.device)
    check_block_size("k_cache", k_cache.shape[1], 16)
    if is_fp8 and (d_c % 128 or q.dtype != torch.bfloat16):
        fail("q", "bfloat16 with head_dim_v a multiple of 128 for an FP8 cache", f"{q.dtype}, head_dim_v = {d_c}")
    row = latent_row_bytes(d_c, d_r) if is_fp8 else d_c + d_r
    if k_cache.shape[2:] != (1, row):
        fail("k_cache", f"of shape [num_blocks, block_size, 1, {row}]", tuple(k_cache.shape))
    check_index("cache_seqlens", cache_seqlens, (q.shape[0],), q.device)
    if indices is not None:
        check_index("indices", indices, (q.shape[0], q.shape[1], None), q.device)
    elif block_table is None:
        fail("block_table", f"of shape ({q.shape[0]}, width) unless indices are given", None)
    else:
        check_index("block_table", block_table, (q.shape[0], None), q.device)
    return q.shape
