"""Latent attention through the Triton kernels: mla.py decodes, flash.py serves prompts.

Chunks and prefix hits have context from before this step. A chunk attends to its own keys first, then to the earlier
context piece by piece, and the results are merged by LSE, so that what is decompressed at a time is bounded:

    contexts, end to end   |- request 0 -|------- request 1 -------|- request 2 -|
    pieces                 |______ piece 0 ______|______ piece 1 ______|__ p. 2 _|

A piece holds no key of some requests; their part of it is empty, with lse = -inf and no weight.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from minivllm.attention import reference
from minivllm.attention.latent_backend import LatentBackend
from minivllm.attention.metadata import PagedRows

if TYPE_CHECKING:
    from minivllm.layers.mla import MLAttention

CONTEXT_PIECE = 8192
"""Tokens of earlier context that are decompressed at a time."""


class Piece(NamedTuple):
    """A part of the earlier contexts of all requests, end to end."""

    slots: torch.Tensor
    """[tokens] int64."""
    cu_seqlens_k: torch.Tensor
    """[B + 1] int32: which of them belong to which request."""
    max_seqlen_k: int


class LatentTritonBackend(LatentBackend):
    """The kernels of mla.py and flash.py; on a CPU in Triton's interpreter, for study."""

    name = "triton"

    def __init__(self) -> None:
        # Imported here, because importing Triton settles whether kernels are compiled or interpreted.
        from minivllm.attention.flash import flash_attn_varlen_func
        from minivllm.attention.mla import flash_mla_with_kvcache, get_mla_metadata
        from minivllm.attention.store import store_latent

        self._flash, self._store = flash_attn_varlen_func, store_latent
        self._mla, self._metadata = flash_mla_with_kvcache, get_mla_metadata

    def store(self, c: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self._store(c, k_rope, cache, slot_mapping)

    def decode(self, layer: "MLAttention", q: torch.Tensor, cache: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        num_requests = len(rows.query_lens)
        q = q.view(num_requests, rows.max_seqlen_q, *q.shape[1:])
        plan = rows.plans.get("mla")
        if plan is None:
            plan = rows.plans["mla"] = self._metadata(rows.seq_lens, rows.max_seqlen_q * layer.num_heads, 1)
        is_fp8 = cache.dtype == torch.uint8
        out, _ = self._mla(
            q, cache, rows.block_table, rows.seq_lens, layer.d_c, *plan, layer.scale, True, is_fp8_kvcache=is_fp8
        )
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
        k, v = layer.decompress(c, k_rope)
        cu, longest = rows.cu_seqlens_q, rows.max_seqlen_q
        if rows.are_whole_prompts:
            return self._flash(q, k, v, cu, cu, longest, longest, layer.scale, causal=True)
        out, lse = self._flash(q, k, v, cu, cu, longest, longest, layer.scale, causal=True, return_softmax_lse=True)
        if "pieces" not in rows.plans:
            rows.plans["pieces"] = cut_contexts(rows, CONTEXT_PIECE)
        merged = out.float()
        for piece in rows.plans["pieces"]:
            k, v = layer.decompress(*self._read(layer, cache, piece.slots, q.dtype))
            ks = piece.cu_seqlens_k, longest, piece.max_seqlen_k
            out, piece_lse = self._flash(q, k, v, cu, *ks, layer.scale, return_softmax_lse=True)
            merged, lse = _merge(merged, lse, out, piece_lse)
        return merged.to(q.dtype)

    def _read(
        self, layer: "MLAttention", cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [N, d_c] and rotary keys [N, d_r] of these slots."""
        latents = cache.view(-1, cache.shape[3])[slots]
        if cache.dtype == torch.uint8:
            latents = reference.unpack_latent(latents, layer.d_c).to(dtype)
        return latents.split([layer.d_c, layer.d_rope], dim=1)


def cut_contexts(rows: PagedRows, piece_len: int) -> list[Piece]:
    """The contexts from before this step, end to end, in pieces of piece_len tokens; made once a step."""
    earlier = [total - new for total, new in zip(rows.context_lens, rows.query_lens, strict=True)]
    total = sum(earlier)
    device = rows.seq_lens.device
    lengths = rows.seq_lens - rows.cu_seqlens_q.diff()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    request = torch.repeat_interleave(torch.arange(len(earlier), device=device), lengths, output_size=total)
    position = torch.arange(total, device=device) - cu_seqlens[request]
    block_ids = rows.block_table[request, position // rows.block_size].long()
    slots = block_ids * rows.block_size + position % rows.block_size
    longest = min(piece_len, max(earlier))
    return [
        Piece(slots[start : start + piece_len], (cu_seqlens - start).clamp(0, min(piece_len, total - start)), longest)
        for start in range(0, total, piece_len)
    ]


def _merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins attention over disjoint keys: out [N, H, D], float32 at first, lse [H, N]; `lse` has to be finite."""
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = (torch.exp(part - total).T[..., None] for part in (lse, other_lse))
    return out * weight + other * other_weight, total
