"""What a step's rows ask of the sampler: settings, counts and drafts, from the batch's rows to tensors.

A request that verifies s drafts has s + 1 rows. Row j chooses the token behind draft j: it stands j positions further
on, and its penalties and min_tokens count the drafts before it as outputs, since it matters only if they were accepted.
"""

from dataclasses import dataclass

import numpy as np
import torch

from minivllm.sample.sampler import PenaltyRow, SamplingMetadata
from minivllm.worker.batch import PersistentBatch, RequestState
from minivllm.worker.inputs import copy_to_device, ranges


@dataclass
class DraftRows:
    """The rows of requests with drafts, all requests one after the other; what `RejectionSampler` takes."""

    metadata: SamplingMetadata
    draft_ids: torch.Tensor
    """[N] int64; -1 on the last row of each request."""
    cu_rows: torch.Tensor
    """[S + 1] int64: which rows belong to which request."""
    max_drafts: int
    q: torch.Tensor | None
    """[N, V] float32: what the drafts were drawn from; None where none was drawn."""


class SamplingInputs:
    """Makes the sampler's inputs from the rows of a batch."""

    def __init__(self, batch: PersistentBatch, vocab_size: int, device: torch.device) -> None:
        self.batch, self.vocab_size, self.device = batch, vocab_size, device

    def draft_rows(
        self, states: list[RequestState], rows: np.ndarray, num_drafts: np.ndarray, cu_rows: np.ndarray
    ) -> DraftRows:
        """For S requests with num_drafts [S] drafts, which stand in the batch behind their tokens."""
        num_rows = num_drafts + 1
        row_of_logits, offset = rows.repeat(num_rows), ranges(np.zeros_like(num_rows), num_rows)
        is_draft = np.ones(len(row_of_logits), dtype=bool)
        is_draft[cu_rows[1:] - 1] = False
        draft_ids = np.full(len(row_of_logits), -1, dtype=np.int64)
        places = (self.batch.num_tokens[row_of_logits] + offset)[is_draft]
        draft_ids[is_draft] = self.batch.token_ids[row_of_logits[is_draft], places]
        on_device = copy_to_device({"draft_ids": draft_ids, "cu_rows": cu_rows}, self.device)
        of_row = [state for state, count in zip(states, num_rows, strict=True) for _ in range(count)]
        drafts_before = [
            self.batch.token_ids[row, self.batch.num_tokens[row] : self.batch.num_tokens[row] + count].tolist()
            for row, count in zip(row_of_logits, offset, strict=True)
        ]
        return DraftRows(
            self.metadata(of_row, row_of_logits, offset, drafts_before),
            on_device["draft_ids"],
            on_device["cu_rows"],
            int(num_drafts.max()),
            self._draft_probabilities(states, num_drafts, on_device["draft_ids"], cu_rows),
        )

    def _draft_probabilities(
        self,
        states: list[RequestState],
        num_drafts: np.ndarray,
        draft_ids: torch.Tensor,
        cu_rows: np.ndarray,
    ) -> torch.Tensor | None:
        """[N, V] what the drafts were drawn from, one-hot for those that were not; None if no draft was drawn."""
        if all(state.draft_probs is None for state in states):
            return None
        q = torch.zeros(len(draft_ids), self.vocab_size, device=self.device)
        q.scatter_(1, draft_ids.clamp(min=0)[:, None], 1.0)
        for state, start, count in zip(states, cu_rows, num_drafts, strict=False):
            if state.draft_probs is not None:
                q[start : start + count] = state.draft_probs[:count]
        return q

    def metadata(
        self,
        states: list[RequestState],
        rows: np.ndarray,
        offset: np.ndarray | int = 0,
        drafts_before: list[list[int]] | None = None,
    ) -> SamplingMetadata:
        """What each row asks for; a row that verifies draft `offset` counts the drafts before it as outputs."""
        batch = self.batch
        temperature, top_k = batch.temperature[rows], batch.top_k[rows]
        is_random = temperature > 0
        random_top_k = top_k[is_random]
        num_outputs = (batch.num_tokens[rows] - batch.num_prompt_tokens[rows] + offset).tolist()
        tensors = copy_to_device(
            {
                "temperature": temperature,
                "top_k": top_k,
                "top_p": batch.top_p[rows],
                "min_p": batch.min_p[rows],
                "seeds": batch.seeds[rows],
                "positions": batch.num_tokens[rows] + offset,
            },
            self.device,
        )
        return SamplingMetadata(
            **tensors,
            all_greedy=not is_random.any(),
            all_random=bool(is_random.all()),
            max_top_k=int(random_top_k.max()) if random_top_k.size and random_top_k.all() else 0,
            any_top_k=bool(random_top_k.any()),
            any_top_p=bool((batch.top_p[rows] < 1)[is_random].any()),
            any_min_p=bool((batch.min_p[rows] > 0)[is_random].any()),
            penalties=[
                self._penalty_row(index, state, drafts_before[index] if drafts_before else [])
                for index, state in enumerate(states)
                if state.sampling_params.has_penalties
            ],
            banned_token_ids=[
                (index, sorted(state.stop_token_ids))
                for index, state in enumerate(states)
                if state.stop_token_ids and num_outputs[index] < state.sampling_params.min_tokens
            ],
        )

    def _penalty_row(self, index: int, state: RequestState, drafts_before: list[int]) -> PenaltyRow:
        """Counts are made once from the tokens and then kept up to date, also while a request is preempted."""
        if state.output_counts is None:
            tokens = self.batch.token_ids[state.row, : self.batch.num_tokens[state.row]].astype(np.int64)
            prompt, outputs = np.split(tokens, [state.num_prompt_tokens])
            counts = np.bincount(outputs, minlength=self.vocab_size).astype(np.float32)
            mask = np.bincount(prompt, minlength=self.vocab_size) > 0
            state.prompt_mask = torch.from_numpy(mask).to(self.device)
            state.output_counts = torch.from_numpy(counts).to(self.device)
        params, counts = state.sampling_params, state.output_counts
        if drafts_before:
            drafts = torch.tensor(drafts_before, device=self.device)
            counts = counts.index_add(0, drafts, torch.ones_like(drafts, dtype=torch.float32))
        return PenaltyRow(
            index,
            state.prompt_mask,
            counts,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
