"""The small steps between two matrix products, each as one kernel: for GPUs.

On a GPU a decode step of a small model is a long list of tiny operations, and each launch costs the host more time
than the device spends on it. What PyTorch does in eight launches (square, mean, rsqrt, scale, …) is one here:

    add_rms_norm             x + residual, and its RMSNorm                       norm.py holds the readable twin
    head_norm_and_rotary     RMSNorm of each query and key head, and rotation    rotary.py
    silu_and_mul             silu(gate) * up                                     models/llama.py

Values are rounded to the tensor's dtype where the twins round, so that both give the same numbers up to the last bit
of a sum. Rows are tokens; one program works on one token.
"""

import torch

from minivllm.attention.checks import cdiv, next_power_of_2
from minivllm.attention.common import round_to
from minivllm.triton_env import tl, triton
from minivllm.triton_launch import launch_kernel

_BLOCK = 1024


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, out, x_token, residual_token, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    value = tl.load(x + token * x_token + column, mask=live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + token * residual_token + column, mask=live, other=0.0).to(tl.float32)
        total = round_to(value, x.dtype.element_ty)
        tl.store(x + token * x_token + column, total, mask=live)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    scaled = round_to(value * scale, out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, round_to(scaled * w, out.dtype.element_ty), mask=live)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual) for x and residual [T, size]; the sum is written into x."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_tokens, size = x.shape
    if num_tokens:
        launch_kernel(
            _add_rms_norm_kernel, (num_tokens, 1, 1),
            (x, residual, weight, out),
            (x.stride(0), 0 if residual is None else residual.stride(0), eps),
            num_warps=4 if size <= 4096 else 8,
            SIZE=size, BLOCK=next_power_of_2(size), HAS_RESIDUAL=residual is not None,
        )  # fmt: skip
    return out, x


@triton.jit
def _head_norm_and_rotary_kernel(
    x, q_weight, k_weight, cos, sin, x_token, x_head, cos_token, sin_token, eps,
    HEADS: tl.constexpr, Q_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = (head < HEADS) & (column < HALF)
    in_head = column < HALF
    at = x + token * x_token + head * x_head + column
    a = tl.load(at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = round_to(a * scale, x.dtype.element_ty).to(tl.float32)
        b = round_to(b * scale, x.dtype.element_ty).to(tl.float32)
        of_q = head < Q_HEADS
        w_a = tl.where(of_q, tl.load(q_weight + column, in_head, 0.0), tl.load(k_weight + column, in_head, 0.0))
        column_b = column + HALF
        w_b = tl.where(of_q, tl.load(q_weight + column_b, in_head, 0.0), tl.load(k_weight + column_b, in_head, 0.0))
        a = round_to(a * w_a.to(tl.float32), x.dtype.element_ty).to(tl.float32)
        b = round_to(b * w_b.to(tl.float32), x.dtype.element_ty).to(tl.float32)
    cos_at, sin_at = cos + token * cos_token + column, sin + token * sin_token + column
    cos_a = tl.load(cos_at, mask=in_head, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_at + HALF, mask=in_head, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_at, mask=in_head, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_at + HALF, mask=in_head, other=0.0).to(tl.float32)
    tl.store(at, round_to(a * cos_a + b * sin_a, x.dtype.element_ty), mask=live)
    tl.store(at + HALF, round_to(b * cos_b + a * sin_b, x.dtype.element_ty), mask=live)


def head_norm_and_rotary(
    heads: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Normalise (if there are weights for q and k, [head_dim] each) and rotate the q and k heads in place.

    heads [T, q heads + k heads + any others, head_dim]; cos and signed sin [T, 1, head_dim], as RotaryEmbedding gives
    them.
    """
    q_weight, k_weight = weights or (None, None)
    num_tokens, _, head_dim = heads.shape
    num_heads = num_q_heads + num_k_heads
    if num_tokens:
        launch_kernel(
            _head_norm_and_rotary_kernel, (num_tokens, 1, 1),
            (heads, q_weight, k_weight, cos, sin),
            (*heads.stride()[:2], cos.stride(0), sin.stride(0), eps),
            HEADS=num_heads, Q_HEADS=num_q_heads, HALF=head_dim // 2, BLOCK_H=next_power_of_2(num_heads),
            BLOCK=next_power_of_2(head_dim // 2), HAS_NORM=weights is not None,
        )  # fmt: skip
    return heads


@triton.jit
def _silu_and_mul_kernel(gate_up, out, gate_up_token, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < SIZE
    gate = tl.load(gate_up + token * gate_up_token + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * gate_up_token + SIZE + column, mask=live, other=0.0).to(tl.float32)
    activated = round_to(gate / (1.0 + tl.exp(-gate)), out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * SIZE + column, round_to(activated * up, out.dtype.element_ty), mask=live)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate and up side by side: [T, 2 * size] -> [T, size]."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    if num_tokens:
        grid = (num_tokens, cdiv(size, _BLOCK), 1)
        launch_kernel(_silu_and_mul_kernel, grid, (gate_up, out), (gate_up.stride(0),), SIZE=size, BLOCK=_BLOCK)
    return out
