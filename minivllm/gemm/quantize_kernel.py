"""Activations to 8 bits in one kernel: quantize.py is its readable twin, and what serves a CPU.

Activations are quantised in front of every product of a quantised model, so a step pays for it a few hundred times.
One program takes one token: its row is read once (a per-token scale), or 128 numbers at a time (1 x 128).

Scales of 1 x 128 are written column by column: fp8_block.py reads the scales of a tile's rows, not of a row. Triton's
interpreter loses carries where it rounds to e4m3, so there this module calls the twin for fp8, as on any CPU.
"""

import torch
from torch import Tensor

from minivllm.attention.checks import next_power_of_2
from minivllm.gemm.quantize import BLOCK, FP8, LARGEST, quantize_1x128, quantize_per_token
from minivllm.triton_env import tl, triton
from minivllm.triton_launch import launch_kernel

_SMALLEST_AMAX = tl.constexpr(1e-4)
# Adding and taking away 1.5 * 2^23 rounds a float32 to a whole number, ties to even.
_TO_WHOLE = tl.constexpr(12582912.0)
_LARGEST_ROW = 16_384


@triton.jit
def _quantize_kernel(
    x, q, scale, x_row, scale_step, num_columns,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, IS_INT8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_row + column, mask=column < num_columns, other=0.0).to(tl.float32)
    value = value.reshape(BLOCK // GROUP, GROUP)
    s = tl.maximum(tl.max(tl.abs(value), 1), _SMALLEST_AMAX) / LARGEST
    value = tl.minimum(tl.maximum(value / s[:, None], -LARGEST), LARGEST).reshape(BLOCK)
    if IS_INT8:
        value = (value + _TO_WHOLE) - _TO_WHOLE
    tl.store(q + row * num_columns + column, value.to(q.dtype.element_ty), mask=column < num_columns)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(scale + row + group * scale_step, s, mask=group * GROUP < num_columns)


def quantize_activations(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """x [M, K], floating point -> q [M, K] and its scale, for a product of that format (fp8_token, fp8_block, int8)."""
    dtype = torch.int8 if format == "int8" else FP8
    if not x.is_cuda or (format != "fp8_block" and x.shape[1] > _LARGEST_ROW):
        return quantize_1x128(x) if format == "fp8_block" else quantize_per_token(x, dtype)
    return launch_quantize(x, format)


def launch_quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The kernel itself, wherever it runs."""
    dtype, (m, k) = torch.int8 if format == "int8" else FP8, x.shape
    by_block = format == "fp8_block"
    x = x if x.stride(1) == 1 else x.contiguous()
    q = torch.empty(m, k, dtype=dtype, device=x.device)
    num_scales = -(-k // BLOCK) if by_block else 1
    scale = torch.empty(num_scales, m, dtype=torch.float32, device=x.device)
    if m and k:
        block = 1024 if by_block else max(next_power_of_2(k), 16)
        launch_kernel(
            _quantize_kernel, (m, -(-k // block) if by_block else 1, 1), (x, q, scale), (x.stride(0), m, k),
            LARGEST=LARGEST[dtype], BLOCK=block, GROUP=BLOCK if by_block else block, IS_INT8=dtype == torch.int8,
        )  # fmt: skip
    return q, scale.T
