"""What every proposer is asked, and what it answers.

After each step the runner tells the proposer what was computed and emitted, and gets the drafts for the next one:

    target computes:   tokens at positions computed .. computed + n - 1, the last s of them drafts
    emitted:           a accepted drafts and one more token; the rows behind the accepted ones are void
    proposed:          up to k tokens that may follow the emitted ones: all of them unverified

Drafts near max_model_len are cut: a draft stands at a position below max_model_len - 1, since the token after it has to
fit too. A request in the middle of its prompt gets none, but a drafter with a cache reads its rows all the same.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from minivllm.worker.batch import PersistentBatch
from minivllm.worker.inputs import StepInputs


@dataclass
class VerifiedStep:
    """A step after sampling; the emitted tokens stand in the batch already."""

    batch: PersistentBatch
    inputs: StepInputs
    hidden: torch.Tensor
    """[T, hidden_size], the target's last hidden states, after its final norm."""
    num_accepted_rows: np.ndarray
    """[B] of each request's computed rows, how many hold accepted tokens: all but the rejected drafts."""
    max_model_len: int

    @property
    def rows(self) -> np.ndarray:
        """[S] rows in the batch of the requests that get drafts."""
        return self.inputs.rows[self.inputs.sampled]

    def most_drafts(self, k: int) -> np.ndarray:
        """[S] drafts that each of those requests has room for, 0 .. k."""
        return np.clip(self.max_model_len - 1 - self.batch.num_tokens[self.rows], 0, k)


@dataclass
class Drafts:
    """Proposals by request; requests without any are left out."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    probabilities: dict[str, torch.Tensor] = field(default_factory=dict)
    """[drafts, V] float32, what they were drawn from, of the requests whose drafts were drawn."""


class Proposer(Protocol):
    """One way to guess."""

    def propose(self, step: VerifiedStep) -> Drafts: ...
