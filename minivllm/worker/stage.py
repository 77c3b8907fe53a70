"""One stage of a pipeline at work: a model runner, and a link to the stages around it.

    message --update_states--> inputs      hidden of the stage before --forward--> hidden --send--> the stage after
                                                                     the last stage: --sample--> tokens, drafts

A link is the one interface between stages, with two implementations: `LocalLink` for stages of one process, and
`DistributedLink` (parallel.py) for a process a stage.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.worker.feedback import TokenFeedback, pack_tokens
from minivllm.worker.model_runner import ModelRunner


class StageLink(Protocol):
    """How a stage talks to the others. Everything arrives in the order in which it was sent."""

    def send(self, hidden: torch.Tensor) -> None:
        """To the stage after this one: [2, T, hidden_size]."""

    def receive(self, room: torch.Tensor) -> torch.Tensor:
        """From the stage before: a tensor of the shape, dtype and device of `room`, or `room` itself."""

    def send_tokens(self, token_ids: np.ndarray) -> None:
        """From the last stage to all others: [S, k + 1] int32."""

    def receive_tokens(self, num_rows: int, width: int) -> np.ndarray:
        """What the last stage has sent, [num_rows, width] int32."""


class PipelineStage:
    """Runs the steps of one stage.

    Args:
        runner: the stage's part of the model.
        link: to the other stages.
    """

    def __init__(self, runner: ModelRunner, link: StageLink) -> None:
        self.runner, self.link = runner, link
        self.reset()

    def reset(self) -> None:
        """Forget all requests; every step that was sent has been run by then."""
        self.runner.reset()
        config, place = self.runner.config, self.runner.stage
        self._is_fed_by_broadcast = config.pp_token_feedback == "broadcast"
        self._feedback: TokenFeedback | None = None
        if self._is_fed_by_broadcast and not place.is_last:
            width = config.num_speculative_tokens + 1
            self._feedback = TokenFeedback(lambda num_rows: self.link.receive_tokens(num_rows, width))

    def drain(self) -> None:
        """Read all tokens that are still to come, as before a reset: each has been sent."""
        if self._feedback is not None:
            self._feedback.drain()

    def run(self, message: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step, or apply the news of a message without tokens; the last stage returns what came of the step."""
        runner, feedback = self.runner, self._feedback
        if feedback is not None:
            feedback.catch_up(runner.batch, message.num_steps_booked)
        inputs = runner.begin(message)
        if inputs is None:
            return None
        received = None
        if not runner.stage.is_first:
            received = self.link.receive(runner.empty_hidden(len(inputs.input_ids)))
        hidden = runner.forward(inputs, received)
        if not runner.stage.is_last:
            self.link.send(hidden)
            if feedback is not None:
                feedback.expect(inputs)
            return None
        output = runner.finish(inputs, hidden)
        if self._is_fed_by_broadcast:
            self.link.send_tokens(pack_tokens(inputs, output, runner.config.num_speculative_tokens))
        return output


class LocalLink:
    """Between stages of one process; make all of them with `LocalLink.create`."""

    def __init__(self, index: int, hidden: Sequence[deque], tokens: Sequence[deque]) -> None:
        self._index, self._hidden, self._tokens = index, hidden, tokens

    @classmethod
    def create(cls, num_stages: int) -> list["LocalLink"]:
        hidden: list[deque] = [deque() for _ in range(num_stages)]
        tokens: list[deque] = [deque() for _ in range(num_stages)]
        return [cls(index, hidden, tokens) for index in range(num_stages)]

    def send(self, hidden: torch.Tensor) -> None:
        self._hidden[self._index + 1].append(hidden)

    def receive(self, room: torch.Tensor) -> torch.Tensor:
        hidden = self._hidden[self._index].popleft()
        assert (hidden.shape, hidden.dtype) == (room.shape, room.dtype)
        return hidden

    def send_tokens(self, token_ids: np.ndarray) -> None:
        for tokens in self._tokens[:-1]:
            tokens.append(token_ids)

    def receive_tokens(self, num_rows: int, width: int) -> np.ndarray:
        token_ids = self._tokens[self._index].popleft()
        assert token_ids.shape == (num_rows, width)
        return token_ids
