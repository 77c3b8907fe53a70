"""FlashAttention backward: gradients without ever having stored the score matrix.

The forward pass keeps out and lse, O(S D) numbers, and throws the S x S matrix p away. The backward pass computes
it again, tile by tile, from q, k and lse: that is cheaper than reading it back from memory would be.

    p  = exp(scale q k^T - lse)                        recomputed; lse holds the denominator already
    dv = p^T do
    dp = do v^T
    ds = p (dp - delta),  delta = rowsum(do out)       the derivative of softmax, row by row
    dq = scale ds k
    dk = scale ds^T q

Two kernels share this. In one a program owns a tile of keys and walks over the queries that see it, for every query
head of its group (dk, dv); in the other it owns a tile of queries and walks over their keys (dq). Nothing is summed
by atomics, so gradients repeat bit by bit.

Shapes, all contiguous: q, out, do, dq [B, S_q, H, D]; k, v, dk, dv [B, S_k, Hkv, D]; lse, delta [H, B S_q] float32.
Method: FlashAttention-2 (Dao 2023).
"""

import torch
from torch import Tensor

from minivllm.attention.checks import (
    FLOATS,
    cdiv,
    check_group,
    check_head_dim,
    check_scale,
    check_tensor,
    fail,
    next_power_of_2,
)
from minivllm.attention.common import LOG2E, dot, key_range, round_to, seen
from minivllm.attention.flash import choose_tiles, launch
from minivllm.triton_env import INTERPRET, tl, triton

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _at(start, row, head, s, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets and mask of rows `row` of one head in [B, s, H, D]; start is the request's first row."""
    d = tl.arange(0, BLOCK_D)
    offset = ((start + row).to(tl.int64)[:, None] * H + head) * D + d[None, :]
    return offset, (row < s)[:, None] & (d < D)[None, :]


@triton.jit
def _gradients(q, k, v, do, lse, delta, mask, scale):
    """p and ds of one tile, by the formulas above: q, do [M, D], k, v [N, D], lse, delta [M] -> [M, N] each."""
    zeros = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    s = dot(q, k.T, zeros)
    # Where nothing is seen lse is -inf and the difference NaN: the mask throws it away.
    p = tl.where(mask, tl.exp2((s * scale - lse[:, None]) * _LOG2E), 0.0)
    dp = dot(do, v.T, zeros)
    return p, p * (dp - delta[:, None])


@triton.jit
def _delta_kernel(out, do, delta, total, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    offset, mask = _at(0, row, head, total, H, D, BLOCK_D)
    o = tl.load(out + offset, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(do + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * total + row, tl.sum(o * g, 1), row < total)


@triton.jit
def _dk_dv_kernel(
    q, k, v, do, lse, delta, dk, dv, S_Q, S_K, total, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    key = n + tl.arange(0, BLOCK_N)
    k_offset, k_mask = _at(b * S_K, key, kv_head, S_K, H // GROUP, D, BLOCK_D)
    k_tile = tl.load(k + k_offset, mask=k_mask, other=0.0)
    v_tile = tl.load(v + k_offset, mask=k_mask, other=0.0)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Query i sees this tile from i + S_K - S_Q >= n on.
    first = tl.maximum(n + S_Q - S_K, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
    for g in range(GROUP):
        head = kv_head * GROUP + g
        for m in tl.range(first, S_Q, BLOCK_M):
            row = m + tl.arange(0, BLOCK_M)
            q_offset, q_mask = _at(b * S_Q, row, head, S_Q, H, D, BLOCK_D)
            q_tile = tl.load(q + q_offset, mask=q_mask, other=0.0)
            do_tile = tl.load(do + q_offset, mask=q_mask, other=0.0)
            at = head.to(tl.int64) * total + b * S_Q + row
            row_lse = tl.load(lse + at, mask=row < S_Q, other=0.0)
            row_delta = tl.load(delta + at, mask=row < S_Q, other=0.0)
            mask = seen(row + S_K - S_Q, key, S_K, 0, 0, False, CAUSAL) & (row < S_Q)[:, None]
            p, ds = _gradients(q_tile, k_tile, v_tile, do_tile, row_lse, row_delta, mask, scale)
            dv_tile = dot(round_to(p, do_tile.dtype).T, do_tile, dv_tile)
            dk_tile = dot(round_to(ds, q_tile.dtype).T, q_tile, dk_tile)
    tl.store(dk + k_offset, round_to(dk_tile * scale, dk.dtype.element_ty), mask=k_mask)
    tl.store(dv + k_offset, round_to(dv_tile, dv.dtype.element_ty), mask=k_mask)


@triton.jit
def _dq_kernel(
    q, k, v, do, lse, delta, dq, S_Q, S_K, total, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    b = tl.program_id(2)
    row = m + tl.arange(0, BLOCK_M)
    q_offset, q_mask = _at(b * S_Q, row, head, S_Q, H, D, BLOCK_D)
    q_tile = tl.load(q + q_offset, mask=q_mask, other=0.0)
    do_tile = tl.load(do + q_offset, mask=q_mask, other=0.0)
    at = head.to(tl.int64) * total + b * S_Q + row
    row_lse = tl.load(lse + at, mask=row < S_Q, other=0.0)
    row_delta = tl.load(delta + at, mask=row < S_Q, other=0.0)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = m + S_K - S_Q
    lo, hi = key_range(first, first + BLOCK_M - 1, S_K, 0, 0, False, CAUSAL)
    for n in tl.range(lo, hi, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        k_offset, k_mask = _at(b * S_K, key, head // GROUP, S_K, H // GROUP, D, BLOCK_D)
        k_tile = tl.load(k + k_offset, mask=k_mask, other=0.0)
        v_tile = tl.load(v + k_offset, mask=k_mask, other=0.0)
        mask = seen(row + S_K - S_Q, key, S_K, 0, 0, False, CAUSAL)
        _, ds = _gradients(q_tile, k_tile, v_tile, do_tile, row_lse, row_delta, mask, scale)
        dq_tile = dot(round_to(ds, k_tile.dtype), k_tile, dq_tile)
    tl.store(dq + q_offset, round_to(dq_tile * scale, dq.dtype.element_ty), mask=q_mask)


def _choose_block(head_dim: int, element_size: int) -> int:
    """Rows and keys of a tile: both kernels hold four operands and up to two accumulators of them at a time."""
    if INTERPRET.value or element_size == 4 or head_dim > 128:
        return 32
    return 64


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        (batch, s_q, _, d), s_k = q.shape, k.shape[1]
        cu_q, cu_k = (torch.arange(batch + 1, dtype=torch.int32, device=q.device) * s for s in (s_q, s_k))
        packed = [x.contiguous().flatten(0, 1) for x in (q, k, v)]
        right = 0 if causal else -1
        tiles = choose_tiles(d, q.element_size())
        out, lse = launch(*packed, cu_q, cu_k, s_q, s_k, scale, -1, right, 0.0, tiles)
        ctx.save_for_backward(*packed, out, lse)
        ctx.scale, ctx.causal, ctx.shape = scale, causal, (batch, s_q, s_k)
        return out.unflatten(0, (batch, s_q))

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        batch, s_q, s_k = ctx.shape
        (total, num_heads, d), num_kv_heads = q.shape, k.shape[1]
        do = do.contiguous().flatten(0, 1)
        dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
        block, block_d = _choose_block(d, q.element_size()), next_power_of_2(d)
        if q.numel() and k.numel():
            _delta_kernel[(cdiv(total, block), num_heads)](
                out, do, delta, total, H=num_heads, D=d, BLOCK=block, BLOCK_D=block_d
            )
            sizes = (s_q, s_k, total, ctx.scale)
            options = {
                "H": num_heads, "GROUP": num_heads // num_kv_heads, "D": d, "CAUSAL": ctx.causal,
                "BLOCK_M": block, "BLOCK_N": block, "BLOCK_D": block_d, "num_warps": 4, "num_stages": 2,
            }  # fmt: skip
            grid = (cdiv(s_k, block), num_kv_heads, batch)
            _dk_dv_kernel[grid](q, k, v, do, lse, delta, dk, dv, *sizes, **options)
            grid = (cdiv(s_q, block), num_heads, batch)
            _dq_kernel[grid](q, k, v, do, lse, delta, dq, *sizes, **options)
        else:
            for x in (dq, dk, dv):
                x.zero_()
        shapes = ((batch, s_q), (batch, s_k), (batch, s_k))
        return *(x.unflatten(0, shape) for x, shape in zip((dq, dk, dv), shapes, strict=True)), None, None


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """Attention of a batch of equal lengths, with gradients: q [B, S_q, H, D], k and v [B, S_k, Hkv, D] -> like q.

    float32, float16 or bfloat16, D a multiple of 16 up to 256, causal aligned bottom-right.
    Raises ValueError for a wrong shape, dtype, device or stride.
    """
    check_tensor("q", q, 4, FLOATS, q.device)
    check_tensor("k", k, 4, (q.dtype,), q.device)
    check_tensor("v", v, 4, (q.dtype,), q.device)
    check_head_dim("q", q.shape[3])
    check_group("k", k.shape[2], q.shape[2])
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        fail("k", f"of batch {q.shape[0]} and head dim {q.shape[3]}, like q", tuple(k.shape))
    if v.shape != k.shape:
        fail("v", f"of shape {tuple(k.shape)}, like k", tuple(v.shape))
    return _FlashAttention.apply(q, k, v, check_scale(softmax_scale, q.shape[3]), causal)
