"""A step from its first entry until its results are booked: planned, then on its way.

An engine may have several at once: one a stage of a pipeline, or one ahead of the worker where scheduling is
asynchronous. Meanwhile a request can be aborted, its id be given to another, and a running one be preempted. So a
step keeps the requests themselves, not their ids, and notes who has lost its blocks since.
"""

from dataclasses import dataclass, field

from minivllm.engine.messages import SchedulerOutput
from minivllm.engine.request import Request


@dataclass(slots=True)
class StepInFlight:
    """Who takes part in one step."""

    requests: dict[str, Request] = field(default_factory=dict)
    prefill_chunks: set[str] = field(default_factory=set)
    """Of these, the ones whose newest token is not reached yet: the step brings no token for them."""
    preempted: set[str] = field(default_factory=set)
    """Of these, the ones preempted since: their tokens still count, their counters have moved on."""


@dataclass(slots=True)
class StepPlan:
    """A step in the making: everything that is entered can still be taken back."""

    output: SchedulerOutput
    budget: int
    """Tokens that the step has room for."""
    cursor: int = 0
    """The running request whose turn it is."""
    step: StepInFlight = field(default_factory=StepInFlight)
    decodes: set[str] = field(default_factory=set)
    """Scheduled requests that compute their newest token (and drafts), and nothing before it."""
    has_preempted: bool = False

    def withdraw(self, request: Request) -> None:
        """Take back all that the step was to do for a running request."""
        request_id = request.request_id
        self.budget += self.output.withdraw(request_id)
        del self.step.requests[request_id]
        self.step.prefill_chunks.discard(request_id)
        self.decodes.discard(request_id)


class StepsInFlight:
    """All steps whose results are awaited, by the number of the step."""

    def __init__(self) -> None:
        self._steps: dict[int, StepInFlight] = {}

    def add(self, number: int, step: StepInFlight) -> None:
        self._steps[number] = step

    def pop(self, number: int) -> StepInFlight:
        """The results of a step have come; raises KeyError for a step that is not (or no longer) awaited."""
        return self._steps.pop(number)

    def __len__(self) -> int:
        return len(self._steps)

    def hold(self, request: Request) -> bool:
        """Whether any step has this very request in it."""
        return any(step.requests.get(request.request_id) is request for step in self._steps.values())

    def num_tokens_on_the_way(self, request: Request) -> int:
        """Tokens that a request is certain to get: one from each step that samples for it, drafts aside."""
        request_id = request.request_id
        return sum(
            step.requests.get(request_id) is request and request_id not in step.prefill_chunks
            for step in self._steps.values()
        )

    def note_preemption(self, request: Request) -> None:
        for step in self._steps.values():
            if step.requests.get(request.request_id) is request:
                step.preempted.add(request.request_id)
