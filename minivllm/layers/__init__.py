"""The building blocks that every model is made of: norms, rotary embedding, linear and vocabulary layers.

Shapes, with T the tokens of all scheduled requests laid end to end (there is no batch dimension):

    hidden states  [T, hidden_size]
    positions      [T] int64, the index of each token in its own request
    heads          [T, num_heads, head_dim]

Invariants: parameters never require grad; a layer never looks at which request a token belongs to (only
attention does); the dtype and device of a layer are those in force when it is built.
"""

import importlib.util

import torch

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def use_fused_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels of `fused.py` serve this tensor: on a GPU, where Triton is installed."""
    return x.is_cuda and _HAS_TRITON
