"""Weights in 8 bits inside of a model: what `LLM(..., quantization=...)` makes of linear layers and experts.

| quantization | weights | activations, quantised at run time | who |
|---|---|---|---|
| fp8 | e4m3, a scale an output channel | a scale a token | linear layers |
| fp8_block | e4m3, a scale for each 128 x 128 | a scale for each 1 x 128 | linear layers, experts |
| int8 | int8, a scale an output channel | a scale a token | linear layers |

A checkpoint is loaded as it is and quantised when it is there ("online"). What a scheme does not serve keeps its dtype:
layers whose number of inputs is no multiple of 128 under fp8_block, experts under the other two, and always the
embedding, the head, the router and the norms. `quantize_model` returns the names of those linear layers and experts,
and logs them.

With tensor parallelism each rank quantises its own part. Scales of 128 x 128 are those of the whole weight where parts
begin at multiples of 128, and inputs have to; a row-parallel layer's other scales are a rank's own, never coarser.

`gemm_backend` prefers a backend of gemm/dispatch.py; linear layers that stay in floating point follow it as well.
"""

import logging
import os

import torch
from torch import nn

from minivllm.gemm.dispatch import BACKEND_VARIABLE, check_backend, gemm
from minivllm.gemm.quantize import BLOCK, FP8, quantize_128x128, quantize_per_channel, quantize_per_token
from minivllm.moe import ops

FORMATS = {"fp8": "fp8_token", "fp8_block": "fp8_block", "int8": "int8"}
logger = logging.getLogger("minivllm")


class ScaledWeight:
    """A weight [out, in] of a linear layer in 8 bits, and how it is multiplied."""

    def __init__(self, weight: torch.Tensor, quantization: str, backend: str) -> None:
        self.format, self.backend = FORMATS[quantization], backend
        if quantization == "fp8_block":
            self.weight, self.scale = quantize_128x128(weight.detach())
        else:
            self.weight, self.scale = quantize_per_channel(
                weight.detach(), FP8 if quantization == "fp8" else torch.int8
            )

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> [T, out] in x's dtype."""
        arguments = (x, self.weight, self.scale, self.format, self.backend)
        # A graph takes the product as one node: choosing and launching kernels is nothing to trace.
        y = torch.ops.minivllm.scaled_linear(*arguments) if torch.compiler.is_compiling() else scaled_linear(*arguments)
        return y if bias is None else y.add_(bias)


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, format: str, backend: str
) -> torch.Tensor:
    """x [T, in] floating point, quantised for `format`, times weight [out, in] -> [T, out] in x's dtype."""
    return gemm(*_quantize(x, format, weight, scale), x.dtype, preferred=backend)


def scaled_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, format: str, backend: str
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


ops.define(scaled_linear, scaled_linear_fake)


def _quantize(x: torch.Tensor, format: str, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if x.is_cuda:
        from minivllm.gemm.quantize_kernel import quantize_activations

        q, x_scale = quantize_activations(x, format)
    elif format == "fp8_block":
        from minivllm.gemm.quantize import quantize_1x128

        q, x_scale = quantize_1x128(x)
    else:
        q, x_scale = quantize_per_token(x, torch.int8 if format == "int8" else FP8)
    return q, weight, x_scale, scale


def quantize_model(model: nn.Module, quantization: str | None, gemm_backend: str) -> list[str]:
    """Tells linear layers and experts what to become when they are finalized; returns the names of those that stay.

    MTP layers are models of their own (models/deepseek_mtp.py), and absorbed projections come from the whole weights:
    both stay in floating point and are not in the list.

    quantization: a key of FORMATS, or None. Raises ValueError for another one, for an unknown backend, and for
    fp8_block where it serves a layer but not a rank's part of it.
    """
    from minivllm.layers.embedding import LMHead
    from minivllm.layers.linear import Linear
    from minivllm.moe.layer import RoutedExperts

    if quantization is not None and quantization not in FORMATS:
        raise ValueError(f"quantization should be one of {', '.join(FORMATS)} or None, not {quantization!r}")
    backend = check_backend(gemm_backend if gemm_backend != "auto" else os.environ.get(BACKEND_VARIABLE, "auto"))
    kept = []
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not isinstance(module, LMHead):
            inputs = module.weight.shape[1]
            if quantization == "fp8_block" and inputs % BLOCK and module.inputs.whole % BLOCK == 0:
                raise ValueError(
                    f"tensor_parallel_size={module.inputs.whole // inputs} leaves {inputs} of the "
                    f"{module.inputs.whole} inputs of {name} to a rank: quantization='fp8_block' needs a multiple of "
                    f"{BLOCK}; use fewer ranks, or another quantization"
                )
            if quantization == "fp8_block" and inputs % BLOCK:
                kept.append(f"{name} ({inputs} inputs)")
                module.plan(None, backend)
            else:
                module.plan(quantization, backend)
        elif isinstance(module, RoutedExperts) and quantization is not None:
            inputs = module.gate_up.shape[2], module.down.shape[2]
            if quantization == "fp8_block" and not any(size % BLOCK for size in inputs):
                module.plan(quantization)
            else:
                kept.append(f"{name} ({inputs[0]} and {inputs[1]} inputs)")
    if kept:
        logger.warning(
            "quantization=%r: not quantized, since the scheme does not serve them: %s", quantization, ", ".join(kept)
        )
    return kept
