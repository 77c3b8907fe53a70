"""Latent attention in vectorised PyTorch, the backend for CPUs; and the oracles as a backend.

A batch of decodes is one gather and one fused attention call. Chunks of prompts are decompressed in one product and
then served one by one, as in `torch_paged.py`.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from minivllm.attention import reference
from minivllm.attention.latent_backend import LatentBackend
from minivllm.attention.metadata import PagedRows
from minivllm.attention.torch_paged import write_rows

if TYPE_CHECKING:
    from minivllm.layers.mla import MLAttention


class LatentTorchBackend(LatentBackend):
    """Vectorised PyTorch, for CPUs."""

    name = "torch"

    def __init__(self) -> None:
        self._workspace = torch.empty(0)

    def store(self, c: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        write_rows(cache.view(-1, cache.shape[3]), slot_mapping, torch.cat((c, k_rope), dim=1))

    def decode(self, layer: "MLAttention", q: torch.Tensor, cache: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        slots = rows.slots()
        context = self._gather(cache, slots.reshape(-1)).view(*slots.shape, -1)[:, None]
        # Keys are values here: the rotary part of the result is what nobody asked for.
        heads_as_queries = q.view(len(slots), rows.max_seqlen_q, *q.shape[1:])
        context = context.expand(-1, rows.max_seqlen_q, -1, -1)
        out = F.scaled_dot_product_attention(
            heads_as_queries, context, context, attn_mask=rows.mask().transpose(1, 2), scale=layer.scale
        )
        return out.flatten(0, 1)[..., : layer.d_c]

    def varlen(
        self,
        layer: "MLAttention",
        q: torch.Tensor,
        c: torch.Tensor,
        k_rope: torch.Tensor,
        cache: torch.Tensor,
        rows: PagedRows,
    ) -> torch.Tensor:
        if not rows.are_whole_prompts:
            slots = torch.cat([row[:length] for row, length in zip(rows.slots(), rows.context_lens, strict=True)])
            c, k_rope = self._gather(cache, slots).split([layer.d_c, layer.d_rope], dim=1)
        k, v = layer.decompress(c, k_rope)
        outputs = []
        for query, key, value in zip(
            q.split(rows.query_lens), k.split(rows.context_lens), v.split(rows.context_lens), strict=True
        ):
            outputs.append(_causal(query, key, value, layer.scale))
        return torch.cat(outputs)

    def _gather(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows of the cache in a workspace that only grows: fresh memory for each layer would cost page faults."""
        width = cache.shape[3]
        size = len(slots) * width
        if self._workspace.numel() < size or self._workspace.dtype != cache.dtype:
            self._workspace = cache.new_empty(size)
        out = self._workspace[:size].view(-1, width)
        return torch.index_select(cache.view(-1, width), 0, slots, out=out)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One request: q [n, H, D], k [s, H, D], v [s, H, Dv] -> [n, H, Dv], causal, aligned bottom-right."""
    num_queries, context_len, d_v = len(q), len(k), v.shape[2]
    is_whole = num_queries == context_len
    mask = None if is_whole else torch.ones(num_queries, context_len, dtype=torch.bool, device=q.device)
    # PyTorch's fused CPU kernel wants one head dim for all three: zeros cost less than doing without it.
    v = F.pad(v, (0, q.shape[2] - d_v)) if d_v < q.shape[2] else v
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=None if is_whole else mask.tril(context_len - num_queries),
        is_causal=is_whole,
        scale=scale,
    )
    return out[0, ..., :d_v].transpose(0, 1)


class LatentReferenceBackend(LatentTorchBackend):
    """The float64 oracles, request by request."""

    name = "reference"

    def decode(self, layer: "MLAttention", q: torch.Tensor, cache: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        out, _ = reference.flash_mla_with_kvcache(
            q.view(-1, rows.max_seqlen_q, *q.shape[1:]), cache, rows.block_table, rows.seq_lens, layer.d_c,
            softmax_scale=layer.scale, causal=True,
        )  # fmt: skip
        return out.flatten(0, 1)

    def varlen(
        self,
        layer: "MLAttention",
        q: torch.Tensor,
        c: torch.Tensor,
        k_rope: torch.Tensor,
        cache: torch.Tensor,
        rows: PagedRows,
    ) -> torch.Tensor:
        outputs, start = [], 0
        for table, num_queries, length in zip(rows.block_table, rows.query_lens, rows.context_lens, strict=True):
            latents = reference.gather(cache, table, length)[:, 0]
            k, v = layer.decompress(*latents.split([layer.d_c, layer.d_rope], dim=1))
            out, _ = reference.attend(q[start : start + num_queries], k, v, layer.scale, causal=True)
            outputs.append(out.to(q.dtype))
            start += num_queries
        return torch.cat(outputs)
