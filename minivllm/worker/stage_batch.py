"""The requests as a stage knows them that does not sample: accepted tokens come from outside.

    pp_token_feedback="scheduler"   with the message: `new_token_ids` of each request in it
    pp_token_feedback="broadcast"   from the last stage, for everyone who took part in a step

Either way, once a message has been applied, the tokens of every request in it are the scheduler's (stage_states.py).
"""

import numpy as np

from minivllm.engine.messages import SchedulerOutput
from minivllm.engine.stage_states import EXACT, RULES
from minivllm.worker.batch import PersistentBatch, RequestState


class StageBatch(PersistentBatch):
    """A persistent batch that is told the tokens.

    Args:
        rule: how `new_token_ids` are read, "exact" or "classic"; see stage_states.py.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, rule: str = EXACT) -> None:
        super().__init__(max_num_seqs, max_model_len, block_size)
        self.rule = rule

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        super().update_states(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed, new_token_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=bool(cached.new_token_ids)
        ):
            row = self.states[req_id].row
            news = RULES[self.rule](int(self.num_tokens[row]), num_computed, new_token_ids)
            self._extend(row, np.asarray(news, dtype=np.int32))

    def append_sampled(self, states: list[RequestState], token_ids: np.ndarray) -> None:
        """Tokens that the last stage has broadcast: token_ids [S, k + 1] int32, filled up with -1 behind.

        Requests that ended meanwhile are passed over, and those that were preempted keep their tokens all the same.
        """
        for state, row_of_ids in zip(states, token_ids, strict=True):
            accepted = row_of_ids[row_of_ids >= 0]
            if self.states.get(state.req_id) is not state:
                continue
            if state.row >= 0:
                self._extend(state.row, accepted)
            else:
                state.parked_token_ids = np.append(state.parked_token_ids, accepted)

    def _extend(self, row: int, token_ids: np.ndarray) -> None:
        start = self.num_tokens[row]
        # What passes the longest request follows its end, and nobody will read it.
        token_ids = token_ids[: self.token_ids.shape[1] - start]
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)
