"""The products that libraries serve, and the reference, behind one signature.

    f(a [M, K], b [N, K], a_scale, b_scale, out_dtype) -> a b^T, scaled, [M, N]

| name | what it calls | formats |
|---|---|---|
| reference | dequantise in float32 and multiply | all; what the others are held against |
| cublas | torch.mm | float32, float16, bfloat16 |
| cublas_fp8 | torch._scaled_mm with one scale a matrix | fp8_tensor |
| cutlass | torch._scaled_mm with a scale a row, which PyTorch builds on CUTLASS | fp8_token |
| deep_gemm | DeepSeek's DeepGEMM, where it is installed | fp8_block |
| cublas_int8 | torch._int_mm, then the scales | int8 |
"""

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from minivllm.gemm.quantize import dequantize

Scale = Tensor | None


def reference(a: Tensor, b: Tensor, a_scale: Scale, b_scale: Scale, out_dtype: torch.dtype) -> Tensor:
    if a_scale is None:
        return (a @ b.T).to(out_dtype)
    return (dequantize(a, a_scale) @ dequantize(b, b_scale).T).to(out_dtype)


def cublas(a: Tensor, b: Tensor, a_scale: Scale, b_scale: Scale, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(a, b.T).to(out_dtype)


def cublas_fp8(a: Tensor, b: Tensor, a_scale: Scale, b_scale: Scale, out_dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(a, b.T, scale_a=a_scale.view(1), scale_b=b_scale.view(1), out_dtype=out_dtype)


def cutlass(a: Tensor, b: Tensor, a_scale: Scale, b_scale: Scale, out_dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale.T, out_dtype=out_dtype)


def cublas_int8(a: Tensor, b: Tensor, a_scale: Scale, b_scale: Scale, out_dtype: torch.dtype) -> Tensor:
    return (torch._int_mm(a, b.T) * a_scale * b_scale.T).to(out_dtype)


def deep_gemm(a: Tensor, b: Tensor, a_scale: Scale, b_scale: Scale, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    find_deep_gemm().fp8_gemm_nt((a, a_scale), (b, b_scale), out, disable_ue8m0_cast=True)
    return out


@lru_cache
def find_deep_gemm() -> ModuleType | None:
    """DeepGEMM, by itself or as a part of vLLM; None where neither is installed."""
    for package, module in (("deep_gemm", "deep_gemm"), ("vllm", "vllm.third_party.deep_gemm")):
        if importlib.util.find_spec(package) is not None:
            try:
                found = importlib.import_module(module)
            except (ImportError, OSError, RuntimeError):
                continue
            if hasattr(found, "fp8_gemm_nt"):
                return found
    return None
