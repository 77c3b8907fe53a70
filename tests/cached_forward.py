"""A model over one request in steps of given lengths, through a paged cache: what a worker does, in a few lines."""

from collections.abc import Callable

import torch

from minivllm.attention.backend import choose_backend
from minivllm.attention.latent import choose_latent_backend
from minivllm.attention.metadata import AttentionMetadata, PagedRows
from minivllm.forward_context import ForwardContext, set_forward_context
from minivllm.layers.mla import MLAttention

BLOCK_SIZE = 16


class CachedForward:
    """Caches of `layers` with blocks in scrambled order; slots that nobody wrote hold NaN."""

    def __init__(self, layers, backend: str = "torch", max_len: int = 128, device: str = "cpu") -> None:
        self.device, first = torch.device(device), layers[0]
        num_blocks = -(-max_len // BLOCK_SIZE)
        self.table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        rows = num_blocks, BLOCK_SIZE
        if isinstance(first, MLAttention):
            self.backend = choose_latent_backend(backend, self.device, first, BLOCK_SIZE)
            new = lambda: torch.full((*rows, 1, first.d_c + first.d_rope), torch.nan, device=device)  # noqa: E731
        else:
            self.backend = choose_backend(backend, self.device, first.head_dim, BLOCK_SIZE)
            shape = *rows, first.num_kv_heads, first.head_dim
            new = lambda: tuple(torch.full(shape, torch.nan, device=device) for _ in "kv")  # noqa: E731
        self.caches = {layer.layer_name: new() for layer in layers}

    @torch.inference_mode()
    def run(self, forward: Callable[..., torch.Tensor], start: int, count: int) -> torch.Tensor:
        """forward(positions) under the context of a step that computes tokens start .. start + count - 1."""
        positions = torch.arange(start, start + count)
        slots = self.table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        length = start + count
        rows = PagedRows(
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor([length], dtype=torch.int32, device=self.device),
            block_table=self.table[None].to(self.device),
            block_size=BLOCK_SIZE,
            num_rows=count,
            max_seqlen_q=count,
            max_seqlen_k=length,
            query_lens=[count],
            context_lens=[length],
        )
        slots = slots.to(self.device)
        metadata = AttentionMetadata(slots, rows if count == 1 else None, None if count == 1 else rows)
        with set_forward_context(ForwardContext(metadata, self.backend, self.caches)):
            return forward(positions.to(self.device))


STEPS = [13, 1, 1, 20, 1, 3, 1]
"""A prompt, decodes, chunks with context behind them: decompressed and absorbed in turn."""


def logits_in_steps(model, token_ids: torch.Tensor, backend: str = "torch", steps=STEPS) -> torch.Tensor:
    """token_ids [sum(steps)] -> logits [sum(steps), V], each row computed in its step."""
    cached = CachedForward(model.attention_layers(), backend, device=token_ids.device)
    rows, start = [], 0
    for count in steps:
        ids = token_ids[start : start + count]
        hidden = cached.run(lambda positions, ids=ids: model(ids, positions), start, count)
        rows.append(model.compute_logits(hidden))
        start += count
    return torch.cat(rows)
