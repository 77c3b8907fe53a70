"""Which implementation serves a layer's attention.

| name | what it is | for |
|---|---|---|
| reference | the float64 oracle of `reference.py`, request by request | checking the others |
| torch | vectorised PyTorch (`torch_paged.py`): a gather and a fused call | CPUs |

A backend stores K and V of a step's rows in the paged cache and attends over it. It keeps no state of its own
between steps but scratch memory, so one object serves all layers.
"""

import os
from typing import Protocol

import torch

from minivllm.attention import reference
from minivllm.attention.metadata import AttentionMetadata, PagedRows
from minivllm.attention.torch_paged import TorchPagedAttention
from minivllm.config import ConfigError

ENVIRONMENT_VARIABLE = "MINIVLLM_ATTENTION_BACKEND"


class AttentionBackend(Protocol):
    """What an attention layer asks for."""

    name: str

    def store(self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write k and v [T, Hkv, D] to their slots in kv_cache [2, num_blocks, block_size, Hkv, D]."""
        ...

    def attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, D]; each row sees its request's cached tokens up to its own position."""
        ...


class _PagedBackend:
    """The frame that backends share: store by slot, then the decode rows, then the others."""

    def store(self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        for rows, cache in zip((k, v), kv_cache, strict=True):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, rows)

    def attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        parts, start = [], 0
        for rows, attend in ((metadata.decode, self._decode), (metadata.varlen, self._varlen)):
            if rows is not None:
                parts.append(attend(q[start : start + rows.num_rows], kv_cache, rows, scale))
                start += rows.num_rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class TorchBackend(_PagedBackend):
    name = "torch"

    def __init__(self) -> None:
        paged = TorchPagedAttention()
        self._decode, self._varlen = paged.decode, paged.varlen


class ReferenceBackend(_PagedBackend):
    name = "reference"

    def _varlen(self, q: torch.Tensor, kv_cache: torch.Tensor, rows: PagedRows, scale: float) -> torch.Tensor:
        return reference.paged_attention(
            q, *kv_cache, rows.cu_seqlens_q, rows.seq_lens, rows.block_table, rows.max_seqlen_q, scale
        )

    _decode = _varlen


_BACKENDS = {backend.name: backend for backend in (ReferenceBackend, TorchBackend)}


def choose_backend(requested: str) -> AttentionBackend:
    """The backend that a config's `attention_backend` stands for; the environment decides where it says "auto".

    Raises:
        ConfigError: the environment variable names a backend that does not exist.
    """
    name = requested if requested != "auto" else os.environ.get(ENVIRONMENT_VARIABLE, "torch")
    if name not in _BACKENDS:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} must be one of {', '.join(_BACKENDS)}, not {name!r}")
    return _BACKENDS[name]()
