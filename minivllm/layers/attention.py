"""The attention layer of a model: stores K and V in the paged cache, then attends over it."""

import torch

from minivllm.forward_context import get_forward_context
from minivllm.layers import Layer
from minivllm.moe.ops import Registered, register


class Attention(Registered, Layer):
    """Causal attention of one layer over the paged KV cache (MHA, GQA and MQA alike).

    Args:
        layer_name: key of this layer's cache in the forward context.
        num_heads: query heads H.
        num_kv_heads: key and value heads Hkv; H is a multiple of it.
        head_dim: D.
        scale: factor on q k^T before the softmax, usually 1 / sqrt(D).
    """

    def __init__(self, layer_name: str, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.op_name = register(self, layer_name)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], k and v [T, Hkv, D], one row a scheduled token -> [T, H, D]."""
        if torch.compiler.is_compiling():
            return torch.ops.minivllm.attention(q, k, v, self.op_name)
        return self.attend(q, k, v)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`forward`, outside of any graph.

        Every row is stored before any row attends: rows of one step may share blocks.
        """
        context = get_forward_context()
        kv_cache = context.kv_caches[self.layer_name]
        backend, metadata = context.attention_backend, context.attention_metadata
        backend.store(k, v, kv_cache, metadata.slot_mapping)
        return backend.attend(q, k, v, kv_cache, metadata, self.scale)
