"""The real scheduler and the real batch queue, against a pipeline that only knows what each stage costs.

requests -> PipelineCore: fill, then wait -> SimulatedPipeline: the timeline moves on -> Trace and StageTimeline
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.batch_queue import PipelineCore
from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.engine.recorder import record
from minivllm.engine.simulate import CostModel, SimulatedWorker
from minivllm.engine.stage_timeline import StageTimeline
from minivllm.engine.trace import Trace
from minivllm.engine.workload import TEXT_STRIDE, SimulatedRequest, engine_request


class SimulatedPipeline:
    """A `PipelineWorker` with a cost a stage, whose tokens mean nothing.

    Args:
        costs: one a stage.
        num_drafts, acceptance_rate, seed: as in `SimulatedWorker`.

    Attributes:
        timeline: who worked when.
        messages: all that the scheduler has sent, in order.
    """

    def __init__(
        self, costs: Sequence[CostModel], num_drafts: int = 0, acceptance_rate: float = 0.7, seed: int = 0
    ) -> None:
        self.costs, self.num_stages = list(costs), len(costs)
        self.timeline = StageTimeline(len(costs))
        self.messages: list[SchedulerOutput] = []
        self._worker = SimulatedWorker(_EachStage(self.costs), num_drafts, acceptance_rate, seed)
        self._results: deque[tuple[int, ModelRunnerOutput]] = deque()

    def submit(self, message: SchedulerOutput) -> None:
        self.messages.append(message)
        results, seconds = self._worker.execute_model(message)
        if not message.num_scheduled_tokens:
            return
        self.timeline.submit(message.step)
        for stage, stage_seconds in enumerate(seconds):
            self.timeline.run(stage, message.step, stage_seconds, message.total_num_scheduled_tokens)
        self._results.append((message.step, results))

    def collect(self) -> ModelRunnerOutput:
        step, results = self._results.popleft()
        self.timeline.collect(step)
        return results

    def reset(self) -> None:
        self._results.clear()
        self.timeline.clear_waiting()


class _EachStage:
    """Costs side by side: what a step takes on each stage."""

    def __init__(self, costs: Sequence[CostModel]) -> None:
        self._costs = costs

    def step_time(self, num_tokens: int, num_context_tokens: int) -> list[float]:
        return [cost.step_time(num_tokens, num_context_tokens) for cost in self._costs]


def simulate_pipeline(
    requests: Iterable[SimulatedRequest],
    costs: Sequence[CostModel],
    *,
    num_blocks: int,
    block_size: int = 16,
    max_model_len: int = 2048,
    max_num_seqs: int = 256,
    num_drafts: int = 0,
    acceptance_rate: float = 0.7,
    max_in_flight: int | None = None,
    max_steps: int | None = None,
    seed: int = 0,
    **engine_options: Any,
) -> tuple[Trace, SimulatedPipeline]:
    """Run a workload through a pipeline on a virtual clock, to its end or for `max_steps` results.

    Args:
        requests: in any order; each enters the queue when the engine's clock passes its arrival.
        costs: one for each stage.
        max_in_flight: most batches on their way; None is one a stage, 1 waits for each step as a single stage would.
        engine_options: further fields of `EngineConfig`, such as `long_prefill_token_threshold`.

    Raises:
        ValueError: a request that can never run, or settings that cannot work.
    """
    config = EngineConfig(
        "simulated",
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        pipeline_parallel_size=len(costs),
        **engine_options,
    )
    pipeline = SimulatedPipeline(costs, num_drafts, acceptance_rate, seed)
    core = PipelineCore(config, pipeline, num_blocks, max_model_len, block_size)
    if max_in_flight is not None:
        core.max_in_flight = max_in_flight
        core.scheduler.pipeline_parallel_size = max_in_flight
    timeline = pipeline.timeline
    to_come = deque(sorted(requests, key=lambda request: request.arrival))
    own_texts = iter(range(1 + max((request.prefix for request in to_come), default=0), TEXT_STRIDE))
    num_results = 0
    with record(core.scheduler, "simulated pipeline", clock=lambda: timeline.now) as trace:
        while (to_come or core.has_unfinished_requests()) and num_results != max_steps:
            if not core.has_unfinished_requests():
                timeline.now = max(timeline.now, to_come[0].arrival)
            while to_come and to_come[0].arrival <= timeline.now:
                core.add_request(engine_request(to_come.popleft(), next(own_texts)))
            core.step()
            num_results += 1
    return trace, pipeline
