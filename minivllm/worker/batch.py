"""The worker's own copy of each request's state, in persistent arrays: one row a request, updated in place.

A request takes a free row when it arrives and keeps it until it ends or is preempted; rows never move. A step then
needs only the numbers of the rows that take part, and its cost grows with the tokens computed, not with the length
of the requests. A preempted request is *parked*: its tokens are kept, its row and its block table are not.

Arrays (R = max_num_seqs, L = max_model_len, W = blocks of the longest request):

    token_ids [R, L] int32        block_table [R, W] int32       num_tokens, num_prompt_tokens, num_computed [R] int64
    temperature, top_p, min_p [R] float32                        top_k, seeds, num_drafter_computed [R] int64

Drafts to verify stand in token_ids behind the num_tokens accepted ones, until the tokens that the step emits take their
places. Rejected ones need no cleaning up: num_computed comes anew with each message, and reads end there.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from minivllm.engine.messages import NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams


@dataclass(eq=False)
class RequestState:
    """What does not fit an array: settings, and what few requests need."""

    req_id: str
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    num_prompt_tokens: int
    row: int = -1
    parked_token_ids: np.ndarray | None = field(default=None, repr=False)
    """All token ids, while the request is preempted."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose log-probabilities have been returned; never repeated after a preemption."""
    prompt_mask: torch.Tensor | None = field(default=None, repr=False)
    """[V] bool, tokens of the prompt; only where penalties need it."""
    output_counts: torch.Tensor | None = field(default=None, repr=False)
    """[V] float32, how often each token is in the output; only where penalties need it."""
    draft_probs: torch.Tensor | None = field(default=None, repr=False)
    """[k, V] float32, what the drafts to be verified next were drawn from; None where they were not drawn."""


class PersistentBatch:
    """All requests that the worker knows.

    Args:
        max_num_seqs: rows R.
        max_model_len: longest request L in tokens.
        block_size: tokens a KV cache block holds.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        width = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((max_num_seqs, width), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_drafter_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.states: dict[str, RequestState] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Apply a message: first forget and park, then add and extend."""
        for req_id in scheduler_output.finished_req_ids:
            self._forget(req_id)
        for req_id in scheduler_output.preempted_req_ids:
            self._park(req_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self.states[req_id]
            if req_id in cached.resumed_req_ids:
                self._seat(state, state.parked_token_ids)
            self._append_blocks(state.row, block_ids)
            self.num_computed[state.row] = num_computed
            if req_id in cached.resumed_req_ids:
                self.num_drafter_computed[state.row] = num_computed

    def token_ids_of(self, req_id: str) -> np.ndarray:
        """All token ids of a request that has a row, [num_tokens] int32."""
        row = self.states[req_id].row
        return self.token_ids[row, : self.num_tokens[row]]

    def block_ids_of(self, req_id: str) -> np.ndarray:
        """The block table of a request that has a row, [blocks it owns] int32."""
        row = self.states[req_id].row
        return self.block_table[row, : self.num_blocks[row]]

    def append_token(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """One sampled token for each of these rows."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """The first counts[i] of token_ids[i] for each of these rows; token_ids [B, k + 1], counts [B] at least 1."""
        for column in range(token_ids.shape[1]):
            more = counts > column
            self.append_token(rows[more], token_ids[more, column])

    def _add(self, new: NewRequestData) -> None:
        state = RequestState(
            new.req_id, new.sampling_params, new.stop_token_ids, num_prompt_tokens=len(new.prompt_token_ids)
        )
        self.states[new.req_id] = state
        self._seat(state, np.asarray(new.prompt_token_ids, dtype=np.int32))
        self._append_blocks(state.row, new.block_ids)
        self.num_computed[state.row] = self.num_drafter_computed[state.row] = new.num_computed_tokens

    def _seat(self, state: RequestState, token_ids: np.ndarray) -> None:
        """Give a new or resumed request a row with an empty block table."""
        row = state.row = self._free_rows.pop()
        params = state.sampling_params
        state.parked_token_ids = state.draft_probs = None
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = state.num_prompt_tokens
        self.num_blocks[row] = 0
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.top_k[row] = params.top_k
        self.seeds[row] = params.seed or 0

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        if block_ids:
            start = self.num_blocks[row]
            self.block_table[row, start : start + len(block_ids)] = block_ids
            self.num_blocks[row] += len(block_ids)

    def _park(self, req_id: str) -> None:
        state = self.states.get(req_id)
        if state is not None:
            state.parked_token_ids = self.token_ids[state.row, : self.num_tokens[state.row]].copy()
            self._leave_row(state)

    def _forget(self, req_id: str) -> None:
        """A request that ended may be unknown here: it can be aborted before it was ever scheduled."""
        state = self.states.pop(req_id, None)
        if state is not None and state.row >= 0:
            self._leave_row(state)

    def _leave_row(self, state: RequestState) -> None:
        self._free_rows.append(state.row)
        state.row = -1
