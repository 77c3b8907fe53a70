"""Paged attention in vectorised PyTorch: the backend for CPUs.

A batch of decodes is one gather and one fused attention call, no loop over requests. Chunks of prompts are few and
long, so they are served one by one: padding them to each other would cost more than the loop.
"""

import torch
import torch.nn.functional as F

from minivllm.attention.metadata import KVCache, PagedRows


class TorchPagedAttention:
    """Gathers K and V of the requests into a workspace and attends there.

    The workspace is kept between calls and only grows: fresh memory for each layer would cost more in page faults
    than the copy itself (2.7 ms against 1.0 ms for 32 requests of 300 tokens of SmolLM2 on two cores).
    """

    def __init__(self) -> None:
        self._workspace = torch.empty(0)

    def decode(self, q: torch.Tensor, kv_cache: KVCache, rows: PagedRows, scale: float) -> torch.Tensor:
        """Equally many queries a request, mostly one.

        Args:
            q: [B * max_seqlen_q, H, D].
            kv_cache: K and V, [num_blocks, block_size, Hkv, D] each.

        Returns:
            [B * max_seqlen_q, H, D].
        """
        k, v = self._gather(kv_cache, rows.slots())
        queries = q.view(-1, rows.max_seqlen_q, *q.shape[1:]).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=rows.mask(), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)

    def varlen(self, q: torch.Tensor, kv_cache: KVCache, rows: PagedRows, scale: float) -> torch.Tensor:
        """Several queries a request, causal, aligned bottom-right.

        Args:
            q: [num_rows, H, D].
            kv_cache: K and V, [num_blocks, block_size, Hkv, D] each.

        Returns:
            [num_rows, H, D].
        """
        out = torch.empty_like(q)
        start = 0
        for index, (num_queries, context_len) in enumerate(zip(rows.query_lens, rows.context_lens, strict=True)):
            end = start + num_queries
            k, v = self._gather(kv_cache, rows.slots()[index : index + 1, :context_len])
            is_whole = num_queries == context_len
            attended = F.scaled_dot_product_attention(
                q[None, start:end].transpose(1, 2),
                k,
                v,
                attn_mask=None if is_whole else _chunk_mask(num_queries, context_len, q.device),
                is_causal=is_whole,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[start:end] = attended[0].transpose(0, 1)
            start = end
        return out

    def _gather(self, kv_cache: KVCache, slots: torch.Tensor) -> list[torch.Tensor]:
        """Caches [num_blocks, block_size, Hkv, D] and slots [B, S] -> K and V [B, Hkv, S, D] in the workspace."""
        like = kv_cache[0]
        num_kv_heads, head_dim = like.shape[2:]
        width = num_kv_heads * head_dim
        size = slots.numel() * width
        if self._workspace.numel() < 2 * size or self._workspace.dtype != like.dtype:
            self._workspace = like.new_empty(2 * size)
        gathered = []
        for index, cache in enumerate(kv_cache):
            out = self._workspace[index * size : (index + 1) * size].view(-1, width)
            torch.index_select(cache.view(-1, width), 0, slots.reshape(-1), out=out)
            gathered.append(out.view(*slots.shape, num_kv_heads, head_dim).transpose(1, 2))
        return gathered


def write_rows(cache: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows [T, ...] into a cache seen as [slots, ...]; rows of slot -1, which are padding, go nowhere."""
    if (slot_mapping < 0).any():
        is_real = slot_mapping >= 0
        slot_mapping, rows = slot_mapping[is_real], rows[is_real]
    cache.index_copy_(0, slot_mapping, rows)


def _chunk_mask(num_queries: int, context_len: int, device: torch.device) -> torch.Tensor:
    """[num_queries, context_len] bool: query i sees keys up to context_len - num_queries + i."""
    all_visible = torch.ones(num_queries, context_len, dtype=torch.bool, device=device)
    return all_visible.tril(context_len - num_queries)
