"""The engine's heartbeat where the worker is a pipeline: as many batches in flight as there are stages.

```
    while there is room:   Scheduler.schedule() -> SchedulerOutput -> first stage      (filling comes before waiting)
    then:                  last stage -> ModelRunnerOutput of the oldest -> Scheduler.update_from_output()
```

Each batch has its own requests: one whose token is still on its way has nothing to compute, and a step takes at most
its share of the decodes, ceil(running / stages). Chunks of one prompt may follow each other.
"""

from collections import deque
from typing import Any, Protocol

from minivllm.engine.core import EngineCore
from minivllm.engine.messages import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput


class StageDied(RuntimeError):
    """A process of the pipeline has ended before its time; the message says which, and how."""


class PipelineWorker(Protocol):
    """What the engine asks of a pipeline. Results come in the order of the messages."""

    num_stages: int

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """Send a step on its way. A message without tokens is news only, and has no result."""

    def collect(self) -> ModelRunnerOutput:
        """Wait for the result of the oldest step on its way; raises StageDied where it will never come."""

    def reset(self) -> None:
        """Forget all requests, and the results of all steps on their way."""


class PipelineCore(EngineCore):
    """Scheduler and pipeline; `worker` is a `PipelineWorker`, the rest is as in `EngineCore`.

    Attributes:
        queue: messages whose results are awaited, oldest first.
        max_in_flight: most of them; one a stage.
    """

    worker: PipelineWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue: deque[SchedulerOutput] = deque()
        self.max_in_flight = self.worker.num_stages
        self._num_booked = 0

    def step(self) -> list[EngineCoreOutput]:
        """Fill the queue, then book the oldest step; what `EngineCore.step` says of exceptions holds here too."""
        try:
            self._fill()
            if not self.queue:
                return []
            results = self.worker.collect()
            self._num_booked += 1
            return self.scheduler.update_from_output(self.queue.popleft(), results)
        except BaseException:
            self.queue.clear()
            self._num_booked = 0
            self.scheduler = self._make_scheduler()
            self.worker.reset()
            raise

    def _fill(self) -> None:
        while len(self.queue) < self.max_in_flight and self.has_unfinished_requests():
            message = self.scheduler.schedule()
            message.num_steps_booked = self._num_booked
            has_tokens = bool(message.num_scheduled_tokens)
            if has_tokens or message.finished_req_ids or message.preempted_req_ids:
                self.worker.submit(message)
            if not has_tokens:
                break  # everything that could be computed is on its way
            self.queue.append(message)
