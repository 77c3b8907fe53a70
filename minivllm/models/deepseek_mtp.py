"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2): a layer behind the last that guesses one token further.

    token t_i+1, hidden h_i  --eh_proj(concat(enorm(embed(t)), hnorm(h)))--> decoder block --> norm --> head --> t_i+2

The target has read t_i at position i and sampled t_i+1; the layer reads that token together with the target's hidden
state, and guesses the one after it. Three rules, which training shares:

- h is the target's hidden state after its final norm in the first pass, and the layer's own output, after the norm of
  its head, in later passes: one layer guesses k tokens by running k times;
- positions are those of h, not shifted;
- the embedding is zeroed at position 0.

A checkpoint keeps layer i under model.layers.{num_hidden_layers + i}. Embedding and head may be stored there once more,
as DeepSeek does; where they are not, they are the target's. A target that is the last of several stages has no
embedding: then the layers read the checkpoint's once more.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minivllm.layers.embedding import LMHead, VocabEmbedding
from minivllm.layers.linear import Linear
from minivllm.layers.mla import MLAttention
from minivllm.layers.norm import RMSNorm
from minivllm.layers.sharding import Slot
from minivllm.models.deepseek import DeepseekDecoderLayer, DeepseekForCausalLM, finalize, mtp_prefixes

Slots = Iterator[tuple[str, Slot]]


class MTPLayer(nn.Module):
    """One MTP layer. Embedding and head are the model's unless `has_own_embedding`, `has_own_head` say otherwise."""

    def __init__(
        self,
        config: Any,
        index: int,
        target: DeepseekForCausalLM,
        embedding: VocabEmbedding,
        has_own_embedding: bool,
        has_own_head: bool,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.has_own_embedding, self.has_own_head = has_own_embedding, has_own_head
        self.embed_tokens = VocabEmbedding(config.vocab_size, size) if has_own_embedding else embedding
        self.enorm, self.hnorm = RMSNorm(size, config.rms_norm_eps), RMSNorm(size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * size, size)
        self.block = DeepseekDecoderLayer(config, index, target.routing_of(config))
        self.head_norm = RMSNorm(size, config.rms_norm_eps)
        self.head = LMHead(config.vocab_size, size) if has_own_head else target.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        embedded = self.embed_tokens(input_ids).masked_fill((positions == 0)[:, None], 0.0)
        x = self.eh_proj(torch.cat((self.enorm(embedded, None)[0], self.hnorm(hidden, None)[0]), dim=-1))
        return self.head_norm(*self.block(x, None, cos, sin))[0]

    def slots(self) -> Slots:
        name = self.block.name
        if self.has_own_embedding:
            yield from self.embed_tokens.slots(f"{name}.embed_tokens")
        yield f"{name}.enorm.weight", self.enorm.weight
        yield f"{name}.hnorm.weight", self.hnorm.weight
        yield from self.eh_proj.slots(f"{name}.eh_proj")
        yield from self.block.slots()
        yield f"{name}.shared_head.norm.weight", self.head_norm.weight
        if self.has_own_head:
            yield from self.head.slots(f"{name}.shared_head.head")


class DeepseekMTP(nn.Module):
    """The MTP layers of a checkpoint, beside the target that they belong to. Pass s runs layer s mod their number.

    `tensor_names` are the names in the checkpoint, which decide whether a layer has an embedding and a head of its own.
    """

    def __init__(self, config: Any, target: DeepseekForCausalLM, tensor_names: frozenset[str]) -> None:
        super().__init__()
        self.rotary = target.rotary
        self._read_again = None
        embedding = target.embed_tokens
        own = [f"{prefix}embed_tokens.weight" in tensor_names for prefix in mtp_prefixes(config)]
        if embedding is None and not all(own):
            embedding = self._read_again = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            MTPLayer(
                config,
                config.num_hidden_layers + index,
                target,
                embedding,
                has_own_embedding=f"{prefix}embed_tokens.weight" in tensor_names,
                has_own_head=f"{prefix}shared_head.head.weight" in tensor_names,
            )
            for index, prefix in enumerate(mtp_prefixes(config))
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, step: int = 0
    ) -> torch.Tensor:
        """Tokens input_ids [T] with hidden states [T, hidden_size] at positions [T] -> hidden [T, hidden_size].

        What comes back is after the norm of the shared head: ready for `compute_logits`, and for the next pass.
        """
        cos, sin = self.rotary(positions, hidden.dtype)
        return self.layers[step % len(self.layers)](input_ids, positions, hidden, cos, sin)

    def compute_logits(self, hidden: torch.Tensor, step: int = 0) -> torch.Tensor:
        """hidden [N, hidden_size], rows of what `forward` returned -> logits [N, vocab_size]."""
        return self.layers[step % len(self.layers)].head(hidden)

    def attention_layers(self) -> list[MLAttention]:
        """The layers that need a cache: the target's block ids, in tensors of their own."""
        return [layer.block.self_attn.attn for layer in self.layers]

    def slots(self) -> Slots:
        """Yields (name in the checkpoint, tensor to copy into)."""
        if self._read_again is not None:
            yield from self._read_again.slots("model.embed_tokens")
        for layer in self.layers:
            yield from layer.slots()

    def finalize(self) -> None:
        """Called once, after loading, and after the target's own; no slots after it."""
        finalize(self)
