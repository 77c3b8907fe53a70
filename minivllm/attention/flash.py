"""FlashAttention forward: attention over packed rows without ever writing the score matrix to memory.

One program owns BLOCK_M query rows of one head of one request and walks over the keys that they see,
BLOCK_N at a time, carrying m, l and acc (common.py has the formulas). Which keys need a mask is known
before the loop starts:

        lo            full_lo                full_hi            hi
        |-- masked ---|------- no mask ------|---- masked ------|
         left window    every row sees every    diagonal, right
         cuts through   key of the tile         window, last tile

so most tiles pay nothing for masking. Shapes: q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv],
packed by cu_seqlens [B + 1]; out [total_q, H, Dv], lse [H, total_q] float32. D and Dv are multiples of 16
up to 256.

Invariants:

- q, k and v arrive through tensor descriptors (TMA on Hopper), which fill zeros beyond a tensor but not
  beyond a
  request: rows of a neighbour are masked in the scores, and zeroed in v, because 0 * NaN would spread.
- out is written with masks, for the same reason.
- The grid depends on max_seqlen_q, H and B only, all known to the host. Heaviest tiles (the last rows of a
  causal
  request) start first, so that the short ones fill the gaps at the end; and heads go through in sections
  whose K and V fit in the L2 cache together.
- Every output has one owner and a fixed order of summation: results repeat bit by bit.

Method: FlashAttention-2 (Dao 2023); tiles through TMA and heavy-first order as in FlashAttention-3 (Shah et
al. 2024).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.attention.checks import (
    FLOATS,
    cdiv,
    check_group,
    check_head_dim,
    check_index,
    check_scale,
    check_tensor,
    check_window,
    fail,
    next_power_of_2,
)
from minivllm.attention.common import LOG2E, cap_scores, dot, finish, key_range, online_softmax, round_to, seen
from minivllm.triton_env import INTERPRET, TensorDescriptor, tl, triton

_SECTION_BYTES = 36 * 2**20


class Tiles(NamedTuple):
    """How one launch is cut: the tile of queries, the tile of keys, warps a program, loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# What a sweep on an H200 kept, by the larger head dim, for 16-bit inputs; the first serves unless noted.
TILES = {
    64: [Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 3)],
    128: [Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 3)],
    256: [Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)],
}
_FLOAT32_TILES = Tiles(32, 32, 4, 2)
_INTERPRETER_TILES = Tiles(32, 32, 4, 1)


def choose_tiles(head_dim: int, element_size: int) -> Tiles:
    """Tiles for a launch, from what the host knows."""
    if INTERPRET.value:
        return _INTERPRETER_TILES
    if element_size == 4:
        return _FLOAT32_TILES
    return TILES[max(64, next_power_of_2(head_dim))][0]


@triton.jit
def _attend(
    acc, m, l, q, k_desc, v_desc, lo, hi, k_start, kv_head, position, s_k, scale, softcap, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Fold the keys lo .. hi, in tiles of BLOCK_N, into (acc, m, l) of the rows in q."""
    for n in tl.range(lo, hi, BLOCK_N):
        k = k_desc.load([k_start + n, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
        s = dot(q, k.T, tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if SOFTCAP:
            s = cap_scores(s, scale, softcap)
        if MASKED:
            key = n + tl.arange(0, BLOCK_N)
            s = tl.where(seen(position, key, s_k, left, right, HAS_LEFT, HAS_RIGHT), s, float("-inf"))
        p, alpha, m, l = online_softmax(s, m, l, 1.0 if SOFTCAP else scale)
        v = v_desc.load([k_start + n, kv_head, 0]).reshape(BLOCK_N, BLOCK_DV)
        if MASKED:
            v = tl.where((n + tl.arange(0, BLOCK_N) < s_k)[:, None], v, tl.zeros_like(v))
        acc = dot(round_to(p, v.dtype), v, acc * alpha[:, None])
    return acc, m, l


@triton.jit
def _flash_kernel(
    q_desc, k_desc, v_desc, out, lse, cu_seqlens_q, cu_seqlens_k, out_token, out_head, lse_head,
    scale, softcap, left, right, num_tiles, num_pairs, section,
    H: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    # A section is a run of (request, head) pairs; inside it the tile index varies slowest, last tile first.
    first_pair = tl.program_id(0) // (section * num_tiles) * section
    in_section = tl.program_id(0) - first_pair * num_tiles
    pairs = tl.minimum(section, num_pairs - first_pair)
    tile = num_tiles - 1 - in_section // pairs
    pair = first_pair + in_section % pairs
    b = pair // H
    head = pair % H

    q_start = tl.load(cu_seqlens_q + b)
    s_q = tl.load(cu_seqlens_q + b + 1) - q_start
    k_start = tl.load(cu_seqlens_k + b)
    s_k = tl.load(cu_seqlens_k + b + 1) - k_start
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if tile * BLOCK_M < s_q:
        q = q_desc.load([q_start + tile * BLOCK_M, head, 0]).reshape(BLOCK_M, BLOCK_D)
        position = row + s_k - s_q
        first = tile * BLOCK_M + s_k - s_q
        last = first + BLOCK_M - 1
        lo, hi = key_range(first, last, s_k, left, right, HAS_LEFT, HAS_RIGHT)
        # The first row's last key bounds the tiles without a mask on the right, the last row's first key on the left.
        full_lo = tl.maximum(last - left, 0) if HAS_LEFT else 0
        full_hi = tl.minimum(first + right + 1, s_k) if HAS_RIGHT else s_k
        lo = lo // BLOCK_N * BLOCK_N
        full_lo = tl.minimum(tl.cdiv(full_lo, BLOCK_N) * BLOCK_N, tl.maximum(hi, lo))
        full_hi = tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo)

        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if HAS_LEFT:
            acc, m, l = _attend(
                acc, m, l, q, k_desc, v_desc, lo, full_lo, k_start, head // GROUP, position, s_k,
                scale, softcap, left, right, HAS_LEFT, HAS_RIGHT, SOFTCAP, True, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        acc, m, l = _attend(
            acc, m, l, q, k_desc, v_desc, full_lo, full_hi, k_start, head // GROUP, position, s_k,
            scale, softcap, left, right, HAS_LEFT, HAS_RIGHT, SOFTCAP, False, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        acc, m, l = _attend(
            acc, m, l, q, k_desc, v_desc, full_hi, hi, k_start, head // GROUP, position, s_k,
            scale, softcap, left, right, HAS_LEFT, HAS_RIGHT, SOFTCAP, True, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

        o, row_lse = finish(acc, m, l)
        token = (q_start + row).to(tl.int64)
        column = tl.arange(0, BLOCK_DV)
        live = (row < s_q)[:, None] & (column < DV)[None, :]
        tl.store(
            out + token[:, None] * out_token + head * out_head + column[None, :],
            round_to(o, out.dtype.element_ty),
            live,
        )
        tl.store(lse + head.to(tl.int64) * lse_head + token, row_lse, row < s_q)


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of [tokens, heads, d] that loads [rows, 1, columns]; columns past d read as zeros.

    TMA wants a base and strides that are multiples of 16 bytes: other views are copied.
    """
    aligned = x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 and s > 0 for s in x.stride()[:-1])
    if not aligned:
        x = x.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 1, columns])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed requests: rows cu_seqlens_q[b] : cu_seqlens_q[b + 1] of q belong to request b.

    q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv] in float32, float16 or bfloat16, contiguous
    in the last dimension; cu_seqlens [B + 1] int32 on the same device, max_seqlen at least the longest
    request. causal is aligned bottom-right, window_size (left, right) is inclusive, -1 = unlimited. Returns
    out [total_q, H, Dv], and lse [H, total_q] float32 (natural log) if asked. Rows of q past
    cu_seqlens_q[-1] are left unwritten. Raises ValueError for a wrong shape, dtype, device or stride.
    """
    scale, (left, right) = _check(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, softcap)
    tiles = choose_tiles(max(q.shape[2], v.shape[2]), q.element_size())
    out, lse = launch(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, left, right, softcap, tiles
    )
    return (out, lse) if return_softmax_lse else out


def launch(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    scale: float, left: int, right: int, softcap: float, tiles: Tiles,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One launch with the given tiles, for checked arguments; right = 0 stands for causal."""
    (total_q, num_heads, d), dv = q.shape, v.shape[2]
    out = torch.empty(total_q, num_heads, dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_heads, total_q, dtype=torch.float32, device=q.device)
    num_tiles = cdiv(max_seqlen_q, tiles.block_m)
    num_pairs = (cu_seqlens_q.shape[0] - 1) * num_heads
    if num_tiles * num_pairs * total_q == 0:
        return out, lse
    if k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    group = num_heads // k.shape[1]
    section = max(_SECTION_BYTES // (max(max_seqlen_k, 1) * (d + dv) * k.element_size()), 1) * group
    block_d, block_dv = next_power_of_2(d), next_power_of_2(dv)
    _flash_kernel[(num_tiles * num_pairs,)](
        describe(q, tiles.block_m, block_d), describe(k, tiles.block_n, block_d), describe(v, tiles.block_n, block_dv),
        out, lse, cu_seqlens_q, cu_seqlens_k, out.stride(0), out.stride(1), lse.stride(0),
        scale * (1.0 if softcap > 0 else LOG2E), softcap, left, right, num_tiles, num_pairs, section,
        H=num_heads, GROUP=group, DV=dv, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, SOFTCAP=softcap > 0,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=block_d, BLOCK_DV=block_dv,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out, lse


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float,
) -> tuple[float, tuple[int, int]]:  # fmt: skip
    check_tensor("q", q, 3, FLOATS, q.device)
    check_tensor("k", k, 3, (q.dtype,), q.device)
    check_tensor("v", v, 3, (q.dtype,), q.device)
    check_head_dim("q", q.shape[2])
    check_head_dim("v", v.shape[2])
    if k.shape[2] != q.shape[2]:
        fail("k", f"of head dim {q.shape[2]}, like q", k.shape[2])
    if v.shape[:2] != k.shape[:2]:
        fail("v", f"of {k.shape[0]} rows and {k.shape[1]} heads, like k", tuple(v.shape))
    check_group("k", k.shape[1], q.shape[1])
    check_index("cu_seqlens_q", cu_seqlens_q, (None,), q.device)
    check_index("cu_seqlens_k", cu_seqlens_k, (cu_seqlens_q.shape[0],), q.device)
    return check_scale(softmax_scale, q.shape[2]), check_window(window_size, causal, softcap)
