"""Which backend serves a model of latent attention, and what its cache looks like; as `backend.py` for K and V.

| rows | reference | torch | triton |
|---|---|---|---|
| decode, absorbed | oracle of mla.py | a gather and a fused call | flash_mla_with_kvcache |
| varlen, decompressed | oracle of flash.py | a gather and a fused call a request | flash_attn_varlen_func |
"""

import importlib.util
from typing import TYPE_CHECKING

import torch

from minivllm.attention.backend import resolve_backend_name
from minivllm.attention.latent_backend import LatentBackend
from minivllm.attention.latent_torch import LatentReferenceBackend, LatentTorchBackend
from minivllm.attention.latent_triton import LatentTritonBackend
from minivllm.config import ConfigError

if TYPE_CHECKING:
    from minivllm.layers.mla import MLAttention

_BACKENDS = {backend.name: backend for backend in (LatentReferenceBackend, LatentTorchBackend, LatentTritonBackend)}


def choose_latent_backend(requested: str, device: torch.device, layer: "MLAttention", block_size: int) -> LatentBackend:
    """As `backend.choose_backend`, for a model of such layers."""
    return _BACKENDS[resolve_backend_name(requested, device, _triton_obstacle(layer, block_size))]()


def _triton_obstacle(layer: "MLAttention", block_size: int) -> str | None:
    """Why the Triton kernels cannot serve, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed here: use 'torch'"
    limits = {
        "kv_lora_rank": (layer.d_c, 512),
        "qk_rope_head_dim": (layer.d_rope, 64),
        "qk_nope_head_dim + qk_rope_head_dim": (layer.d_nope + layer.d_rope, 256),
        "v_head_dim": (layer.d_v, 256),
    }
    for name, (size, largest) in limits.items():
        if size % 16 or size > largest:
            return f"needs a {name} that is a multiple of 16 up to {largest}, not {size}: use 'torch'"
    if not 16 <= block_size <= 256 or block_size & (block_size - 1):
        return (
            f"needs a block_size that is a power of two from 16 to 256 for latent attention, not {block_size}: "
            "change it, or use 'torch'"
        )
    return None


def resolve_latent_cache(
    kv_cache_dtype: str, dtype: torch.dtype, backend: str, layer: "MLAttention"
) -> tuple[torch.dtype, int]:
    """The cache's dtype and the numbers of it that a token takes in one layer: d_c + d_r, or bytes for "fp8".

    Raises:
        ConfigError: "fp8" where the backend or the model cannot have it.
    """
    if kv_cache_dtype == "auto":
        return dtype, layer.d_c + layer.d_rope
    if backend != "triton":
        raise ConfigError(
            f"kv_cache_dtype='fp8' needs attention_backend='triton', not {backend!r}: the other backends read only a "
            "cache of the model's own dtype"
        )
    if dtype != torch.bfloat16:
        raise ConfigError(f"kv_cache_dtype='fp8' of latents needs dtype='bfloat16', not {dtype}")
    if layer.d_c % 128:
        raise ConfigError(f"kv_cache_dtype='fp8' needs a kv_lora_rank that is a multiple of 128, not {layer.d_c}")
    from minivllm.attention.store import latent_row_bytes

    return torch.uint8, latent_row_bytes(layer.d_c, layer.d_rope)
