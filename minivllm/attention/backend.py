"""Which implementation serves a layer's attention.

| name | what it is | for |
|---|---|---|
| reference | the float64 oracle of `reference.py`, request by request | checking the others |
| torch | vectorised PyTorch (`torch_paged.py`): a gather and a fused call | CPUs |
| triton | the kernels of `paged.py` and `flash.py` | GPUs; on a CPU in Triton's interpreter, for study |

A backend stores K and V of a step's rows in the paged cache and attends over it. It keeps no state of its own
between steps but scratch memory, so one object serves all layers. In the Triton backend the two kernels meet:

    decode rows          few queries, long context, bound by memory      paged_attention
    whole prompts        K and V are at hand, nothing to look up         flash_attn_varlen_func
    chunks, prefix hits  many queries, part of the context in pages      paged_attention

Latent attention (MLA) has backends of its own under the same names: `latent.py`.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Protocol

import torch

from minivllm.attention import reference
from minivllm.attention.metadata import AttentionMetadata, KVCache, PagedRows
from minivllm.attention.torch_paged import TorchPagedAttention, write_rows
from minivllm.config import ConfigError

ENVIRONMENT_VARIABLE = "MINIVLLM_ATTENTION_BACKEND"


class AttentionBackend(Protocol):
    """What an attention layer asks for."""

    name: str

    def store(self, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, slot_mapping: torch.Tensor) -> None:
        """Write k and v [T, Hkv, D] to their slots in the caches of K and V, [num_blocks, block_size, Hkv, D] each."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, D]; each row sees its request's cached tokens up to its own position.

        k and v [T, Hkv, D] are the step's own rows, which the cache holds already: where a request has no other
        context, a backend may read them here.
        """
        ...


class TorchBackend:
    name = "torch"

    def __init__(self) -> None:
        self._paged = TorchPagedAttention()

    def store(self, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, slot_mapping: torch.Tensor) -> None:
        for rows, cache in zip((k, v), kv_cache, strict=True):
            write_rows(cache.view(-1, *cache.shape[2:]), slot_mapping, rows)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        return _in_two_parts(
            metadata,
            lambda part, rows: self._paged.decode(q[part], kv_cache, rows, scale),
            lambda part, rows: self._paged.varlen(q[part], kv_cache, rows, scale),
        )


class ReferenceBackend(TorchBackend):
    name = "reference"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        def attend(part: slice, rows: PagedRows) -> torch.Tensor:
            return reference.paged_attention(
                q[part], *kv_cache, rows.cu_seqlens_q, rows.seq_lens, rows.block_table, rows.max_seqlen_q, scale
            )

        return _in_two_parts(metadata, attend, attend)


class TritonBackend:
    name = "triton"

    def __init__(self) -> None:
        # Imported here, because importing Triton settles whether kernels are compiled or interpreted.
        from minivllm.attention import paged, store
        from minivllm.attention.flash import flash_attn_varlen_func

        self._flash, self._paged, self._store = flash_attn_varlen_func, paged, store
        self._checked: torch.Tensor | None = None

    def store(self, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, slot_mapping: torch.Tensor) -> None:
        k_cache, v_cache = kv_cache
        # The layers of a step share one slot mapping and look alike, so the first one's check is good for all.
        if slot_mapping is not self._checked:
            self._store.check_kv(k, v, k_cache, v_cache, slot_mapping)
            self._checked = slot_mapping
        self._store.launch_store_kv(k, v, k_cache, v_cache, slot_mapping, 1.0, 1.0)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        if metadata.varlen is None:
            return self._attend_paged(q, kv_cache, metadata.decode, scale)

        def paged(part: slice, rows: PagedRows) -> torch.Tensor:
            return self._attend_paged(q[part], kv_cache, rows, scale)

        def varlen(part: slice, rows: PagedRows) -> torch.Tensor:
            if not rows.are_whole_prompts:
                return paged(part, rows)
            cu, longest = rows.cu_seqlens_q, rows.max_seqlen_q
            return self._flash(q[part], k[part], v[part], cu, cu, longest, longest, scale, causal=True)

        return _in_two_parts(metadata, paged, varlen)

    def _attend_paged(self, q: torch.Tensor, kv_cache: KVCache, rows: PagedRows, scale: float) -> torch.Tensor:
        """`paged_attention`, checked and cut once a step: a decode step of a small model waits for its host."""
        k_cache, v_cache = kv_cache
        where = rows.cu_seqlens_q, rows.seq_lens, rows.block_table, rows.max_seqlen_q
        looks = (q.shape, k_cache.shape)
        plan = rows.plans.get(looks)
        if plan is None:
            plan = self._paged.plan_launch(q, k_cache, v_cache, *where, max_seqlen_k=rows.max_seqlen_k)
            rows.plans[looks] = plan
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._paged.launch(q, k_cache, v_cache, out, None, *where, scale, 1.0, -1, 0, 0.0, *plan)
        return out


def _in_two_parts(
    metadata: AttentionMetadata,
    decode: Callable[[slice, PagedRows], torch.Tensor],
    varlen: Callable[[slice, PagedRows], torch.Tensor],
) -> torch.Tensor:
    """The decode rows through one function, the rows after them through the other."""
    outputs, start = [], 0
    for rows, attend in ((metadata.decode, decode), (metadata.varlen, varlen)):
        if rows is not None:
            outputs.append(attend(slice(start, start + rows.num_rows), rows))
            start += rows.num_rows
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


_BACKENDS = {backend.name: backend for backend in (ReferenceBackend, TorchBackend, TritonBackend)}


def choose_backend(requested: str, device: torch.device, head_dim: int, block_size: int) -> AttentionBackend:
    """The backend that a config's `attention_backend` stands for; the environment decides where it says "auto".

    Without either, a GPU gets the Triton kernels where they can serve the model, and everything else PyTorch.

    Raises:
        ConfigError: the environment variable names a backend that does not exist, or the one that was asked for
            cannot serve the model.
    """
    return _BACKENDS[resolve_backend_name(requested, device, _triton_obstacle(head_dim, block_size))]()


def resolve_backend_name(requested: str, device: torch.device, triton_obstacle: str | None) -> str:
    """The name of the backend; `triton_obstacle` says why Triton cannot serve the model, or is None if it can."""
    name = requested if requested != "auto" else os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if name == "auto":
        name = "triton" if device.type == "cuda" and triton_obstacle is None else "torch"
    if name not in _BACKENDS:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} must be one of auto, {', '.join(_BACKENDS)}, not {name!r}")
    if name == "triton" and triton_obstacle is not None:
        raise ConfigError(f"attention_backend='triton' {triton_obstacle}")
    return name


def _triton_obstacle(head_dim: int, block_size: int) -> str | None:
    """Why the Triton kernels cannot serve, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed here: use 'torch'"
    if head_dim % 16 or head_dim > 256:
        return f"needs a head_dim that is a multiple of 16 up to 256, not {head_dim}: use 'torch'"
    if block_size > 256 or block_size & (block_size - 1):
        return f"needs a block_size that is a power of two up to 256, not {block_size}: change it, or use 'torch'"
    return None
