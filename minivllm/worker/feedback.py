"""pp_token_feedback="broadcast": the last stage itself tells the others what it has accepted.

A stage notes who takes part in each step that it sends on. The last stage's broadcasts come in the order of the steps,
and name tokens only: row j belongs to the j-th request that sampled. Before a stage applies a message, it reads the
broadcasts of all steps that the scheduler had booked when it made the message (`num_steps_booked`), and of no others:
so it knows just what the scheduler knew.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from minivllm.engine.messages import ModelRunnerOutput
from minivllm.worker.batch import RequestState
from minivllm.worker.inputs import StepInputs
from minivllm.worker.stage_batch import StageBatch


def pack_tokens(inputs: StepInputs, output: ModelRunnerOutput, num_speculative_tokens: int) -> np.ndarray:
    """[S, k + 1] int32, a row for each request that sampled, filled up with -1."""
    packed = np.full((len(inputs.sampled), num_speculative_tokens + 1), -1, dtype=np.int32)
    for row, index in zip(packed, inputs.sampled, strict=True):
        token_ids = output.sampled_token_ids[inputs.states[index].req_id]
        row[: len(token_ids)] = token_ids
    return packed


class TokenFeedback:
    """One stage's end of the broadcasts.

    Args:
        receive: returns the next broadcast, given its number of rows.
    """

    def __init__(self, receive: Callable[[int], np.ndarray]) -> None:
        self._receive = receive
        self._expected: deque[list[RequestState]] = deque()
        self._num_read = 0

    def expect(self, inputs: StepInputs) -> None:
        """A step has been sent on."""
        self._expected.append([inputs.states[index] for index in inputs.sampled])

    def catch_up(self, batch: StageBatch, num_steps_booked: int) -> None:
        """Read the broadcasts that a message presumes."""
        while self._num_read < num_steps_booked:
            states = self._expected.popleft()
            batch.append_sampled(states, self._receive(len(states)))
            self._num_read += 1

    def drain(self) -> None:
        """Read what is still to come, and drop it."""
        while self._expected:
            self._receive(len(self._expected.popleft()))
