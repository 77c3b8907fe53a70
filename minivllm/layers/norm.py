"""RMSNorm, alone or fused with the residual addition that always precedes it.

    [T, hidden_size] -> [T, hidden_size], same dtype

A pre-norm transformer alternates "add to the residual stream" and "normalise the residual stream". Keeping
the two apart until the norm, as (x, residual), lets one call do both (on a GPU one kernel, `fused.py`), and is
what travels between pipeline stages.
"""

import torch
from torch import nn

from minivllm.layers import Layer, use_fused_kernels


class RMSNorm(Layer):
    """Root-mean-square normalisation (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight.

    Statistics are taken in float32, and the result is rounded to the input's dtype before the weight is
    applied: the order of Hugging Face's Llama, on which checkpoints are evaluated.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> a new tensor of the same shape and dtype."""
        # vector_norm reduces without writing a float32 copy of x; the product with a float32 scale promotes.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(norm.square() / x.shape[-1] + self.eps)
        return (x * scale).to(x.dtype).mul_(self.weight)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm(x + residual), x + residual); with no residual yet, (norm(x), x).

        The sum is written into x, which is the fresh output of the layer before.
        """
        if use_fused_kernels(x):
            from minivllm.layers.fused import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.eps)
        residual = x if residual is None else x.add_(residual)
        return self.normalise(residual), residual
