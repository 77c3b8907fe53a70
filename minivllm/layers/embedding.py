"""The two ends of a language model: token ids to vectors, and vectors to scores over the vocabulary.

    VocabEmbedding  input_ids [T] int64           -> [T, hidden_size]
    LMHead          hidden    [N, hidden_size]    -> logits [N, vocab_size]

Small models share one matrix between both (Press and Wolf, 2017): after `tie`, the head holds the very same
Parameter. Packing the head for the CPU then costs a second copy, since a lookup needs plain rows.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.linear import Linear


class VocabEmbedding(nn.Module):
    """A table with one row a token."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def slots(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (checkpoint name, the tensor to copy into)."""
        yield f"{prefix}.weight", self.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)


class LMHead(Linear):
    """Scores of the whole vocabulary for each row; called only on rows whose logits are wanted."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(hidden_size, vocab_size)
        self.tied = False

    def tie(self, embedding: VocabEmbedding) -> None:
        """Makes the head use the embedding's matrix; a tied head has no tensor of its own to load."""
        self.weight = embedding.weight
        self.tied = True

    def slots(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        if not self.tied:
            yield from super().slots(prefix)
