"""Oracles of the attention kernels in plain PyTorch, one request at a time: slow, short, obviously right.

Each has the signature of the kernel that it judges. They compute in the dtype of their inputs' float64
copies, so a kernel's error can be told apart from rounding. What they fix for the whole package:

- causal is aligned bottom-right: query i of s_q sees the keys up to s_k - s_q + i;
- a window (left, right) is inclusive and counted from that aligned position, -1 is unlimited;
- a row that sees no key gives out = 0 and lse = -inf; lse [H, total_q] is float32, a natural log;
- memory that belongs to no token (tails of pages and of block tables) is never read.

Shapes: q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv], caches [num_blocks, block_size, Hkv, D].
"""

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of one request: q [s_q, H, D], k and v [s_k, Hkv, D] -> out [s_q, H, Dv], lse [H, s_q].

    out = softmax(softmax_scale q k^T + mask) v in float64, with an optional cap softcap * tanh(s / softcap)
    on the scores (Gemma 2). Heads of q share heads of k and v in groups of H / Hkv (grouped-query
    attention).
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    s = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    s_q, s_k = s.shape[1:]
    position = torch.arange(s_q, device=q.device)[:, None] + s_k - s_q
    key = torch.arange(s_k, device=q.device)[None, :]
    left, right = window_size
    right = 0 if causal else right
    seen = torch.ones(s_q, s_k, dtype=torch.bool, device=q.device)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("hqk,khd->qhd", p, v), lse


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
    """Attention over packed requests: rows cu_seqlens_q[b] : cu_seqlens_q[b + 1] of q belong to request b."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        out[rows], lse[:, rows] = attend(q[rows], k[keys], v[keys], scale, causal, window_size, softcap)
    return (out, lse) if return_softmax_lse else out


def gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """One request out of a paged cache: [num_blocks, block_size, ...] -> [seq_len, ...]."""
    block_size = cache.shape[1]
    token = torch.arange(seq_len, device=cache.device)
    return cache[block_table[token // block_size].long(), token % block_size]


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
    """Attention over a paged cache (PagedAttention, Kwon et al. 2023); queries are a request's last tokens.

    An FP8 cache holds k / k_scale and v / v_scale. num_splits and max_seqlen_k change how a kernel works,
    never what it returns.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    cu_q, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for b, s_k in enumerate(lengths):
        rows = slice(cu_q[b], cu_q[b + 1])
        k = gather(k_cache, block_table[b], s_k).double() * k_scale
        v = gather(v_cache, block_table[b], s_k).double() * v_scale
        out[rows], lse[:, rows] = attend(q[rows], k, v, scale, causal, window_size, softcap)
    return (out, lse) if return_softmax_lse else out


def unpack_latent(rows: Tensor, head_dim_v: int) -> Tensor:
    """FP8 latent rows [..., d_c + 4 d_c / 128 + 2 d_r] uint8 -> [..., d_c + d_r] float32."""
    d_c, num_scales = head_dim_v, head_dim_v // 128
    c, scales, rope = rows.split([d_c, 4 * num_scales, rows.shape[-1] - d_c - 4 * num_scales], dim=-1)
    c = c.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (num_scales, 128))
    scales = scales.contiguous().view(torch.float32)
    return torch.cat([(c * scales[..., None]).flatten(-2), rope.contiguous().view(torch.bfloat16).float()], dim=-1)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor | None = None,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed multi-head latent attention (DeepSeek-V2): every head reads one latent row a token, twice.

    The key is the whole row [d_c + d_r], the value its first d_c = head_dim_v numbers. q [B, s_q, H, d_c +
    d_r] -> out [B, s_q, H, d_c], lse [B, H, s_q]. indices [B, s_q, topk] name the slots that a query sees,
    -1 is none.
    """
    batch, s_q, num_heads, d = q.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = q.new_zeros(batch, s_q, num_heads, head_dim_v)
    lse = q.new_full((batch, num_heads, s_q), -math.inf, dtype=torch.float32)
    for b in range(batch):
        if indices is None:
            row_groups = [(slice(0, s_q), gather(k_cache, block_table[b], int(cache_seqlens[b])))]
        else:
            slots = [row[row >= 0].long() for row in indices[b]]
            row_groups = [(slice(i, i + 1), k_cache.flatten(0, 1)[slots[i]]) for i in range(s_q)]
        for rows, k in row_groups:
            k = unpack_latent(k, head_dim_v) if is_fp8_kvcache else k
            out[b, rows], lse[b, :, rows] = attend(q[b, rows], k, k[..., :head_dim_v], scale, causal)
    return out, lse


def merge_lse(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint key sets from that over each: outs [rows, H, D], lses [H, rows].

    lse = log sum_i exp(lse_i) and out = sum_i exp(lse_i - lse) out_i: what joins the splits of one request and
    the chunks of a context that is read piece by piece. A row that no part has seen stays 0 with lse = -inf.
    """
    stacked = torch.stack([lse.double() for lse in lses])
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - lse.masked_fill(lse == -math.inf, 0.0))
    terms = [w.T[..., None] * o.double() for w, o in zip(weights, outs, strict=True)]
    return torch.stack(terms).sum(0).to(outs[0].dtype), lse.float()
