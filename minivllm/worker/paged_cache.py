"""The paged cache of one model's attention layers: which backend reads it, what it looks like, its tensors.

A target and a drafter share block ids. Each has tensors of its own, and a block's bytes are those of both.
"""

from typing import Any

import torch

from minivllm.attention.backend import choose_backend
from minivllm.attention.latent import choose_latent_backend, resolve_latent_cache
from minivllm.attention.metadata import AttentionMetadata
from minivllm.config import ConfigError, EngineConfig
from minivllm.forward_context import ForwardContext
from minivllm.layers.mla import MLAttention
from minivllm.worker.kv_memory import KVCacheSpec, LatentCacheSpec


class PagedCache:
    """Cache of some attention layers, all of one kind.

    Args:
        layers: `Attention` or `MLAttention` layers.
        dtype: the model's.
        block_size: tokens in a block.

    Attributes:
        spec: shape and bytes.
        tensors: for each layer [2, num_blocks, block_size, num_kv_heads, head_dim], or the latents of MLA
            [num_blocks, block_size, 1, d_c + d_r]; empty before `allocate`.
    """

    def __init__(
        self, layers: list[Any], config: EngineConfig, device: torch.device, dtype: torch.dtype, block_size: int
    ) -> None:
        first = layers[0]
        self.layers, self.device = layers, device
        self.is_mla = isinstance(first, MLAttention)
        self.spec: KVCacheSpec | LatentCacheSpec
        asked = config.attention_backend, device
        if self.is_mla:
            self.backend = choose_latent_backend(*asked, first, block_size)
            self.dtype, row_size = resolve_latent_cache(config.kv_cache_dtype, dtype, self.backend.name, first)
            self.spec = LatentCacheSpec(len(layers), block_size, row_size, self.dtype.itemsize)
        else:
            self.backend = choose_backend(*asked, first.head_dim, block_size)
            self.dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, dtype, self.backend.name)
            self.spec = KVCacheSpec(
                num_layers=len(layers),
                block_size=block_size,
                num_kv_heads=first.num_kv_heads,
                head_dim=first.head_dim,
                bytes_per_element=self.dtype.itemsize,
            )
        self.tensors: dict[str, torch.Tensor] = {}
        self._by_layer: dict[str, Any] = {}

    def allocate(self, num_blocks: int) -> None:
        """Not zeroed: nothing may ever read a slot that was not written, and tests poison them to prove it."""
        for layer in self.layers:
            cache = torch.empty(self.spec.layer_shape(num_blocks), dtype=self.dtype, device=self.device)
            self.tensors[layer.layer_name] = cache
            self._by_layer[layer.layer_name] = cache if self.is_mla else tuple(cache)

    def context(self, attention: AttentionMetadata) -> ForwardContext:
        """For one forward pass over this cache."""
        return ForwardContext(attention, self.backend, self._by_layer)


def resolve_kv_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype, backend: str) -> torch.dtype:
    """The model's own dtype, or float8_e4m3fn for "fp8"; raises ConfigError where the backend cannot read that."""
    if kv_cache_dtype == "auto":
        return dtype
    if backend != "triton":
        raise ConfigError(
            f"kv_cache_dtype='fp8' needs attention_backend='triton', not {backend!r}: the other backends read only a "
            "cache of the model's own dtype"
        )
    return torch.float8_e4m3fn
