"""What the weights of a loaded model take, in bytes, by kind: scales are counted with the numbers that they scale."""

import torch
from torch import nn

from minivllm.layers.embedding import LMHead, VocabEmbedding
from minivllm.layers.linear import Linear
from minivllm.layers.mla import MLAttention
from minivllm.moe.layer import RoutedExperts

LINEAR, EXPERTS, ENDS, ABSORBED, REST = (
    "linear layers",
    "experts",
    "embedding and head",
    "kv_b_proj for absorption",
    "router and norms",
)
"""Absorption reads plain W_UK and W_UV: a model in 8 bits holds kv_b_proj twice."""


def weight_bytes(model: nn.Module) -> dict[str, int]:
    """kind -> bytes, of the kinds that the model has. Copies that a CPU makes of plain weights do not count."""
    total = dict.fromkeys((LINEAR, EXPERTS, ENDS, ABSORBED, REST), 0)
    for module in model.modules():
        if isinstance(module, LMHead):
            total[ENDS] += 0 if module.tied else _linear_bytes(module)
        elif isinstance(module, Linear):
            total[LINEAR] += _linear_bytes(module)
        elif isinstance(module, VocabEmbedding):
            total[ENDS] += module.weight.nbytes
        elif isinstance(module, RoutedExperts):
            total[EXPERTS] += _sum(module.gate_up, module.down, module.gate_up_scale, module.down_scale)
        else:
            if isinstance(module, MLAttention) and module.kv_b_proj.scaled is not None:
                total[ABSORBED] += _sum(module.w_uk, module.w_uv)
            total[REST] += _sum(*module.parameters(recurse=False))
    return {kind: num_bytes for kind, num_bytes in total.items() if num_bytes}


def _linear_bytes(layer: Linear) -> int:
    if layer.scaled is not None:
        return _sum(layer.scaled.weight, layer.scaled.scale, layer.bias)
    return _sum(layer.weight if layer._packed is None else layer._packed, layer.bias)


def _sum(*tensors: torch.Tensor | None) -> int:
    """A packed tensor knows how many numbers it holds, but has no `nbytes`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
