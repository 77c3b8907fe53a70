"""Text into rows of a batch: one long stream of ids that stays on the device, cut anew in every epoch.

    stream   a a a a <eos> b b b b b b b b <eos> c ...        documents, separated by blank lines in the text
    row      <bos> | T + 1 consecutive ids of the stream      [T + 2]

A row of T + 2 ids serves T positions: position j reads id j and predicts id j + 1; the MTP layer at position j reads
id j + 1 and predicts id j + 2. Each epoch starts at another offset, so that cuts fall elsewhere, and shuffles its
rows; both depend only on (seed, epoch), so a step's batch is known without the steps before it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from minivllm.checkpoints.training.tokenizer import BOS_ID, EOS_ID

HELD_OUT_SHARE = 0.05
_BLANK_LINE = re.compile(r"\n[ \t]*\n\s*")


def read_documents(path: Path) -> list[str]:
    """Documents of a UTF-8 text file, split at blank lines. Raises ValueError for a missing or empty file."""
    if not path.is_file():
        raise ValueError(f"there is no text file {path}: give one with --text or --valid")
    documents = [document for document in _BLANK_LINE.split(path.read_text(encoding="utf-8")) if document.strip()]
    if not documents:
        raise ValueError(f"the text file {path} is empty: there is nothing to train on")
    return documents


def split_documents(documents: list[str]) -> tuple[list[str], list[str]]:
    """(training, held out): the last lines, a twentieth of the characters, are held out."""
    lines = [(index, line) for index, document in enumerate(documents) for line in document.splitlines(keepends=True)]
    total, held_out = sum(len(line) for _, line in lines), 0
    cut = len(lines)
    while cut > 1 and held_out < HELD_OUT_SHARE * total:
        cut -= 1
        held_out += len(lines[cut][1])
    if cut == len(lines) or len(lines) < 2:
        raise ValueError("the text has one line only, so none can be held out: give more lines, or --valid")
    return _joined(lines[:cut]), _joined(lines[cut:])


def _joined(lines: list[tuple[int, str]]) -> list[str]:
    documents: dict[int, str] = {}
    for index, line in lines:
        documents[index] = documents.get(index, "") + line
    return list(documents.values())


def encode(documents: list[str], tokenizer: Tokenizer, device: torch.device) -> Tensor:
    """One stream of ids, int64 [num_tokens]; every document ends with <eos>."""
    lines = [document.splitlines(keepends=True) for document in documents]
    encodings = iter(tokenizer.encode_batch([line for group in lines for line in group], add_special_tokens=False))
    ids: list[int] = []
    for group in lines:
        for _ in group:
            ids += next(encodings).ids
        ids.append(EOS_ID)
    return torch.tensor(ids, device=device)


@dataclass(frozen=True)
class Stream:
    """ids int64 [num_tokens] on the device, read in rows that serve T = sequence_length positions."""

    ids: Tensor
    sequence_length: int

    def __post_init__(self) -> None:
        if len(self.ids) < 2 * self.sequence_length + 1:
            raise ValueError(
                f"the text has {len(self.ids)} tokens, fewer than two rows of {self.sequence_length}: give more text "
                "or a smaller --sequence-length"
            )

    @property
    def rows_per_epoch(self) -> int:
        """At every offset there are this many rows."""
        return (len(self.ids) - self.sequence_length - 1) // self.sequence_length

    def rows(self, starts: Tensor) -> Tensor:
        """The rows whose stream part begins at `starts` [B]: [B, T + 2]."""
        part = self.ids[starts[:, None] + torch.arange(self.sequence_length + 1, device=self.ids.device)]
        return torch.nn.functional.pad(part, (1, 0), value=BOS_ID)

    def epoch_starts(self, seed: int, epoch: int) -> Tensor:
        """Where the rows of an epoch begin, shuffled: [rows_per_epoch]."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        offset = torch.randint(self.sequence_length, (1,), generator=generator)
        order = torch.randperm(self.rows_per_epoch, generator=generator)
        return (offset + self.sequence_length * order).to(self.ids.device)

    def held_out_starts(self) -> Tensor:
        """Rows side by side from the first token on: each token is predicted once."""
        rows = (len(self.ids) - 1) // self.sequence_length
        return torch.arange(rows, device=self.ids.device) * self.sequence_length


class Batches:
    """batch(step) -> [B, T + 2], the same for the same (seed, step)."""

    def __init__(self, stream: Stream, batch_size: int, seed: int) -> None:
        if stream.rows_per_epoch < batch_size:
            raise ValueError(
                f"the text gives {stream.rows_per_epoch} rows of {stream.sequence_length} tokens, fewer than a batch "
                f"of {batch_size}: give more text, or a smaller --batch-size or --sequence-length"
            )
        self.stream, self.batch_size, self.seed = stream, batch_size, seed
        self.steps_per_epoch = stream.rows_per_epoch // batch_size
        self._epoch, self._starts = -1, torch.empty(0)

    def batch(self, step: int) -> Tensor:
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self.stream.epoch_starts(self.seed, epoch)
        return self.stream.rows(self._starts[index * self.batch_size : (index + 1) * self.batch_size])
