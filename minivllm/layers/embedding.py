"""The two ends of a language model: token ids to vectors, and vectors to scores over the vocabulary.

    VocabEmbedding  input_ids [T] int64           -> [T, hidden_size]
    LMHead          hidden    [N, hidden_size]    -> logits [N, vocab_size]

Small models share one matrix between both (Press and Wolf, 2017): after `tie`, the head holds the very same
Parameter. Packing the head for the CPU then costs a second copy, since a lookup needs plain rows.

With tensor parallelism each rank holds a range of the vocabulary, the same for both; a vocabulary that the ranks do not
divide is padded with rows of zeros, which no token id names and whose scores are cut off:

    embedding   a rank looks up the ids of its range and has zeros for the others; their sum is exact
    head        a rank scores its range; the ranges are put side by side on every rank, so that all sample alike
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.linear import Linear
from minivllm.layers.sharding import Slot, slot, split_padded, whole
from minivllm.worker.tensor_parallel import collective_group


class VocabEmbedding(nn.Module):
    """A table with one row a token."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.rows, self.hidden_size = split_padded(vocab_size), hidden_size
        self.weight = nn.Parameter(torch.empty(self.rows.size, hidden_size), requires_grad=False)
        self.group = collective_group()

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yields (checkpoint name, the tensor to copy into)."""
        yield f"{prefix}.weight", slot(self.weight, self.rows, whole(self.hidden_size))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return F.embedding(input_ids, self.weight)
        row = input_ids - self.rows.start
        is_other = (row < 0) | (row >= self.rows.size)
        vectors = F.embedding(row.masked_fill(is_other, 0), self.weight)
        return self.group.all_reduce(vectors.masked_fill_(is_other[:, None], 0.0))


class LMHead(Linear):
    """Scores of the whole vocabulary for each row; called only on rows whose logits are wanted."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(hidden_size, split_padded(vocab_size))
        self.vocab_size, self.group = vocab_size, collective_group()
        self.tied = False

    def tie(self, embedding: VocabEmbedding) -> None:
        """Makes the head use the embedding's matrix; a tied head has no tensor of its own to load."""
        self.weight = embedding.weight
        self.tied = True

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        if not self.tied:
            yield from super().slots(prefix)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.forward(x)
        return logits if self.group is None else self.group.all_gather(logits)[:, : self.vocab_size].contiguous()
