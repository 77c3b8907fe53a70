"""The multi-token prediction layer guesses (DeepSeek-V3, 2024): it reads what the target just thought.

Slot i of its cache holds (token i + 1, hidden state i). All drafts come from the layer. The token that the target
itself has emitted last is the layer's *input*, and not a draft.

    prefill   target reads p0 p1 p2 p3, samples t4
              pass 1: tokens p1 p2 p3 t4 at positions 0 1 2 3 with the target's h0 h1 h2 h3   -> d5
              pass 2: d5 at position 4 with the layer's own output of position 3               -> d6
    verify    target reads t4 d5 d6 d7 at positions 4 .. 7; d5 is right, d6 is not: it emits d5 x6
              pass 1: tokens d5 x6 at positions 4 5 with the target's h4 h5: the accepted rows  -> d7

In a chunk of a prompt the next prompt token takes the place of the sampled one. k may exceed the layers of a
checkpoint: the first one serves every pass, fed with its own output.
"""

import numpy as np
import torch

from minivllm.forward_context import set_forward_context
from minivllm.models.deepseek_mtp import DeepseekMTP
from minivllm.speculate.drafter import CachedProposer
from minivllm.speculate.proposer import VerifiedStep
from minivllm.worker.inputs import Layout, flat_starts, lay_out, ranges
from minivllm.worker.paged_cache import PagedCache


class MTPProposer(CachedProposer):
    """Drafts with the first MTP layer of the target's checkpoint; the rest is as in `CachedProposer`."""

    def __init__(self, k: int, mtp: DeepseekMTP, cache: PagedCache, draws: bool) -> None:
        super().__init__(k, cache, draws)
        self.mtp = mtp

    def first_pass(self, step: VerifiedStep) -> tuple[torch.Tensor, np.ndarray]:
        inputs, counts = step.inputs, step.num_accepted_rows
        # Fewer rows than the target's, in the same order: what was a decode is one still.
        layout, extra = lay_out(
            step.batch,
            inputs.rows,
            inputs.num_computed,
            counts,
            self.k + 1,
            self.cache.device,
            shift=1,
            extra={"from": ranges(inputs.starts, counts), "to": self._flat_rows(counts)},
        )
        hidden = step.hidden.new_zeros(len(layout.input_ids), step.hidden.shape[1])
        hidden[extra["to"]] = step.hidden[extra["from"]]
        with set_forward_context(self.cache.context(layout.attention)):
            hidden = self.mtp(layout.input_ids, layout.positions, hidden)
        last = (layout.starts + counts - 1)[inputs.sampled]
        position = (inputs.num_computed + counts - 1)[inputs.sampled]
        return hidden[torch.from_numpy(last).to(self.cache.device)], position

    def _flat_rows(self, counts: np.ndarray) -> np.ndarray:
        return ranges(flat_starts(counts, self.k + 1), counts)

    def next_pass(self, input_ids: torch.Tensor, layout: Layout, hidden: torch.Tensor) -> torch.Tensor:
        return self.mtp(input_ids, layout.positions, hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mtp.compute_logits(hidden)
