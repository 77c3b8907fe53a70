"""Numbers in 8 bits: x is kept as q and a float32 scale, x ~ q * scale.

The scale of a region of x is its largest magnitude over the largest number of the format, so that nothing overflows.
How large a region is decides how far one outlier is felt:

| function | region | scale of x [M, K] | used for |
|---|---|---|---|
| quantize_per_tensor | all of x | [] | both sides of cuBLAS' fp8 product |
| quantize_per_token | a row | [M, 1] | activations |
| quantize_per_channel | a row of a weight [N, K], one output channel | [N, 1] | weights |
| quantize_1x128 | 128 neighbours in a row | [M, ceil(K / 128)] | activations (DeepSeek-V3) |
| quantize_128x128 | a square | [ceil(N / 128), ceil(K / 128)] | weights (DeepSeek-V3) |

Formats: float8_e4m3fn (4 bits of exponent, 3 of mantissa, up to 448, relative steps of 1/8 to 1/16) and int8
(symmetric: -127 .. 127, equal steps). A magnitude below 1e-4 counts as 1e-4, so that a region of zeros has a scale. A
scale that is rounded up to a power of two costs up to one bit, and makes scaling exact (the UE8M0 form of newer GPUs).

A NaN stays what it was in e4m3, along with its region; int8 has none, and takes 0 for it.

Sources: DeepSeek-V3 (2024, section 3.3) and its DeepGEMM; OCP 8-bit floating point (2023).
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
BLOCK = 128
LARGEST = {FP8: 448.0, torch.int8: 127.0}
_SMALLEST_AMAX = 1e-4


def quantize_per_tensor(x: Tensor, dtype: torch.dtype = FP8, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """x [..., K], floating point -> q of the same shape in `dtype`, scale [] float32. ValueError: unknown dtype."""
    scale = _scale(x.abs().amax() if x.numel() else x.new_zeros(()), dtype, power_of_two)
    return _round(x / scale, dtype), scale


def quantize_per_token(x: Tensor, dtype: torch.dtype = FP8, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """x [..., M, K], floating point -> q of the same shape in `dtype`, scale [..., M, 1] float32."""
    scale = _scale(x.abs().amax(dim=-1, keepdim=True), dtype, power_of_two)
    return _round(x / scale, dtype), scale


def quantize_per_channel(x: Tensor, dtype: torch.dtype = FP8, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """A weight x [..., N, K] -> q of the same shape in `dtype`, scale [..., N, 1] float32: a scale an output."""
    return quantize_per_token(x, dtype, power_of_two)


def quantize_1x128(x: Tensor, dtype: torch.dtype = FP8, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """x [..., M, K], floating point -> q of the same shape in `dtype`, scale [..., M, ceil(K / 128)] float32."""
    return _quantize_blocks(x, 1, dtype, power_of_two)


def quantize_128x128(x: Tensor, dtype: torch.dtype = FP8, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """A weight x [..., N, K] -> q of the same shape in `dtype`, scale [..., ceil(N / 128), ceil(K / 128)] float32."""
    return _quantize_blocks(x, BLOCK, dtype, power_of_two)


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """q [..., M, K] times its scale, as any function above gave them -> [..., M, K] in `dtype`.

    Raises ValueError where the scale has no shape that fits q.
    """
    if scale.dim() < 2:
        if scale.numel() != 1:
            raise ValueError(f"scale should be one number, or a matrix, got shape {tuple(scale.shape)}")
        return (q.to(torch.promote_types(dtype, torch.float32)) * scale).to(dtype)
    rows, columns = q.shape[-2:]
    blocks = -(-columns // BLOCK)
    if scale.shape[-1] not in (1, blocks) or scale.shape[-2] not in (rows, -(-rows // BLOCK)):
        raise ValueError(
            f"scale should be [{rows}, 1], [{rows}, {blocks}] or [{-(-rows // BLOCK)}, {blocks}] for numbers of shape "
            f"{tuple(q.shape)}, got {tuple(scale.shape)}"
        )
    if scale.shape[-2] != rows:
        scale = scale.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    if scale.shape[-1] != 1:
        scale = scale.repeat_interleave(BLOCK, dim=-1)[..., :columns]
    return (q.to(torch.promote_types(dtype, torch.float32)) * scale).to(dtype)


def _quantize_blocks(x: Tensor, rows: int, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = x.shape[-2:]
    # Zeros fill up the last blocks: they change no maximum.
    padded = torch.nn.functional.pad(x, (0, -num_columns % BLOCK, 0, -num_rows % rows))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, rows))  # [..., M / rows, rows, K / 128, 128]
    scale = _scale(blocks.abs().amax(dim=(-3, -1)), dtype, power_of_two)
    q = _round(blocks / scale[..., :, None, :, None], dtype)
    return q.flatten(-4, -3).flatten(-2)[..., :num_rows, :num_columns].contiguous(), scale


def _scale(amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    if dtype not in LARGEST:
        known = ", ".join(str(name) for name in LARGEST)
        raise ValueError(f"dtype should be one of {known} to quantize to, got {dtype}")
    scale = amax.float().clamp(min=_SMALLEST_AMAX) / LARGEST[dtype]
    return torch.exp2(torch.ceil(torch.log2(scale))) if power_of_two else scale


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, scaled, to the nearest number of the format, ties to even."""
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return x.round().nan_to_num(0.0).to(dtype) if dtype == torch.int8 else x.to(dtype)
