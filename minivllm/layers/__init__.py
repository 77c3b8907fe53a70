"""The building blocks that every model is made of: norms, rotary embedding, linear and vocabulary layers.

Shapes, with T the tokens of all scheduled requests laid end to end (there is no batch dimension):

    hidden states  [T, hidden_size]
    positions      [T] int64, the index of each token in its own request
    heads          [T, num_heads, head_dim]

Invariants: parameters never require grad; a layer never looks at which request a token belongs to (only
attention does); the dtype and device of a layer are those in force when it is built.
"""

import importlib.util
from typing import Any

import torch
from torch import nn

_HAS_TRITON = importlib.util.find_spec("triton") is not None


class Layer(nn.Module):
    """A module whose call is its `forward`: no hooks are looked for, which would cost a small model's step dearly."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


def use_plain_attributes(model: nn.Module) -> None:
    """Lets Python find weights and submodules itself, once they are all in place.

    nn.Module keeps them in dictionaries of its own, where Python looks last; a decode step of a small model asks some
    hundred times, half a microsecond each.
    """
    for module in model.modules():
        vars(module).update(module._parameters)
        vars(module).update(module._modules)


def use_fused_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels of `fused.py` serve this tensor: on a GPU, where Triton is installed.

    Not in a graph that torch.compile traces: it fuses the readable twins itself.
    """
    return x.is_cuda and _HAS_TRITON and not torch.compiler.is_compiling()
