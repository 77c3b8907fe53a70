"""What drafters with a cache have in common: a first pass over accepted rows, then one token a pass.

    first pass     every row whose token is accepted and not in the drafter's cache yet  -> draft 1
    pass j         draft j - 1, one row a request                                        -> draft j

The first pass runs for requests that get no drafts too (chunks of prompts, requests near max_model_len): their blocks
are shared by name with others, who will read the drafter's slots. Later passes write slots beyond the accepted tokens;
what comes of rejected drafts is overwritten before it is read.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch

from minivllm.forward_context import set_forward_context
from minivllm.sample.random import Purpose, uniform
from minivllm.sample.sampler import draw
from minivllm.speculate.proposer import Drafts, VerifiedStep
from minivllm.worker.inputs import Layout, copy_to_device, lay_out
from minivllm.worker.paged_cache import PagedCache

_LOWEST_TEMPERATURE = 1e-30


class CachedProposer(ABC):
    """A drafter that reads the target's block tables, with tensors of its own.

    Args:
        k: most drafts for a request.
        cache: of the drafter's attention layers; allocated by whoever knows the number of blocks.
        draws: whether requests that sample get drafts drawn at their temperature; else the most likely ones.
    """

    def __init__(self, k: int, cache: PagedCache, draws: bool) -> None:
        self.k, self.cache, self.draws = k, cache, draws

    @abstractmethod
    def first_pass(self, step: VerifiedStep) -> tuple[torch.Tensor, np.ndarray]:
        """Read all accepted rows; hidden [S, hidden_size] and position [S] of the last of each request with drafts."""

    @abstractmethod
    def next_pass(self, input_ids: torch.Tensor, layout: Layout, hidden: torch.Tensor) -> torch.Tensor:
        """Read one draft a request: input_ids [B], hidden [B, hidden_size] of the pass before -> hidden."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> [N, V]."""

    def propose(self, step: VerifiedStep) -> Drafts:
        hidden, last_position = self.first_pass(step)
        rows, most = step.rows, step.most_drafts(self.k)
        states = [step.inputs.states[index] for index in step.inputs.sampled]
        active = np.nonzero(most > 0)[0]
        ids = torch.zeros(0, dtype=torch.int64)
        passes: list[tuple[np.ndarray, torch.Tensor, torch.Tensor | None]] = []
        for index in range(int(most.max(initial=0))):
            stays = most[active] > index
            if index == 0 or not stays.all():
                if index:
                    active, kept = active[stays], torch.from_numpy(np.nonzero(stays)[0]).to(self.cache.device)
                    ids, hidden = ids[kept], hidden[kept]
                else:
                    hidden = hidden[torch.from_numpy(active).to(self.cache.device)]
            if index:
                ones = np.ones(len(active), dtype=np.int64)
                layout, _ = lay_out(step.batch, rows[active], last_position[active] + index, ones, 1, self.cache.device)
                with set_forward_context(self.cache.context(layout.attention)):
                    hidden = self.next_pass(ids, layout, hidden)
            ids, q = self._choose(step, rows[active], index, self.compute_logits(hidden).float())
            passes.append((active, ids, q))
        return self._collect(states, passes)

    def _choose(
        self, step: VerifiedStep, rows: np.ndarray, index: int, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft number `index` of each row: the most likely token, or one drawn from q, which comes along."""
        best = logits.argmax(dim=-1)
        temperature = step.batch.temperature[rows]
        if not self.draws or not temperature.any():
            return best, None
        on_device = copy_to_device(
            {
                "temperature": temperature,
                "seeds": step.batch.seeds[rows],
                "positions": step.batch.num_tokens[rows] + index,
            },
            self.cache.device,
        )
        is_greedy = on_device["temperature"] == 0
        divisor = torch.where(is_greedy, 1.0, on_device["temperature"].clamp(min=_LOWEST_TEMPERATURE))
        q = (logits / divisor[:, None]).softmax(dim=-1)
        drawn = draw(q, uniform(on_device["seeds"], on_device["positions"], Purpose.DRAFT))
        return torch.where(is_greedy, best, drawn), q

    @staticmethod
    def _collect(states: list, passes: list[tuple[np.ndarray, torch.Tensor, torch.Tensor | None]]) -> Drafts:
        """From passes to requests; all drafts come to the host in one copy."""
        drafts = Drafts()
        if not passes:
            return drafts
        on_host = iter(torch.cat([ids for _, ids, _ in passes]).tolist())
        drawn_from: dict[str, list[torch.Tensor]] = {}
        for active, _, q in passes:
            for place, index in enumerate(active):
                state = states[index]
                drafts.token_ids.setdefault(state.req_id, []).append(next(on_host))
                if q is not None and not state.sampling_params.is_greedy:
                    drawn_from.setdefault(state.req_id, []).append(q[place])
        drafts.probabilities = {req_id: torch.stack(rows) for req_id, rows in drawn_from.items()}
        return drafts
