"""A smaller model guesses (Leviathan et al. 2023): it writes k tokens while the target would read one.

The draft model reads every token itself, so its cache runs ahead of the target's: after a step it has read all the
tokens up to the newest, and all drafts but the last one.

    position                   T - 1     T      T + 1    T + 2          T = num_tokens, k = 3
    first pass reads           newest                                   -> d1
    later passes read                    d1     d2                      -> d2, d3;  nobody has read d3
    a = 3 accepted, bonus b:             d1     d2       d3     b       next first pass: [d3, b] at T + 2, T + 3
    a = 1 accepted, then x:              d1     x                       next first pass: [x] at T + 1

`num_drafter_computed` of the batch counts the slots that are right as long as the drafts are.
"""

from pathlib import Path

import numpy as np
import torch

from minivllm.config import ConfigError
from minivllm.forward_context import set_forward_context
from minivllm.speculate.drafter import CachedProposer
from minivllm.speculate.proposer import VerifiedStep
from minivllm.worker.inputs import Layout, lay_out
from minivllm.worker.paged_cache import PagedCache


class DraftModelProposer(CachedProposer):
    """Drafts with `model`; the rest is as in `CachedProposer`."""

    def __init__(self, k: int, model: torch.nn.Module, cache: PagedCache, draws: bool) -> None:
        super().__init__(k, cache, draws)
        self.model = model

    def first_pass(self, step: VerifiedStep) -> tuple[torch.Tensor, np.ndarray]:
        batch, inputs = step.batch, step.inputs
        # Where a step reached the newest token it emitted more: they are read too.
        end = inputs.num_computed + inputs.num_scheduled
        end[inputs.sampled] = batch.num_tokens[step.rows]
        first = np.minimum(batch.num_drafter_computed[inputs.rows], end - 1)
        counts = end - first
        order = np.argsort(counts > self.k + 1, kind="stable")
        layout, extra = self._lay_out(step, order, first, counts)
        with set_forward_context(self.cache.context(layout.attention)):
            hidden = self.model(layout.input_ids, layout.positions)
        batch.num_drafter_computed[inputs.rows] = end
        batch.num_drafter_computed[step.rows] += np.maximum(step.most_drafts(self.k) - 1, 0)
        return hidden[extra], end[inputs.sampled] - 1

    def _lay_out(
        self, step: VerifiedStep, order: np.ndarray, first: np.ndarray, counts: np.ndarray
    ) -> tuple[Layout, torch.Tensor]:
        """The layout, and [S] the flat row of the newest token of each request that gets drafts."""
        rows, device = step.inputs.rows[order], self.cache.device
        layout, _ = lay_out(step.batch, rows, first[order], counts[order], self.k + 1, device)
        last = np.empty(len(order), dtype=np.int64)
        last[order] = layout.starts + layout.num_scheduled - 1
        return layout, torch.from_numpy(last[step.inputs.sampled]).to(device)

    def next_pass(self, input_ids: torch.Tensor, layout: Layout, hidden: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, layout.positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)


def check_vocabularies(target_path: Path, draft_path: Path, target_size: int, draft_size: int) -> None:
    """Drafts are the target's tokens: raises ConfigError where the two models do not mean the same by an id."""
    if target_size != draft_size:
        raise ConfigError(
            f"speculative_config: the vocabularies differ: {draft_path} has vocab_size {draft_size}, the target "
            f"{target_size}; use a draft model with the target's tokenizer"
        )
    from minivllm.tokenizer import load_tokenizer

    paths = target_path, draft_path
    if all((path / "tokenizer.json").is_file() for path in paths):
        target, draft = (load_tokenizer(path).get_vocab() for path in paths)
        if target != draft:
            odd = sorted(token for token in {**target, **draft} if target.get(token) != draft.get(token))
            raise ConfigError(
                f"speculative_config: the vocabularies differ: {odd[0]!r} is {draft.get(odd[0])} in {draft_path} and "
                f"{target.get(odd[0])} in the target; use a draft model with the target's tokenizer"
            )
