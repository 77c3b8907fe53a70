"""A pipeline whose stages all live in this process: deterministic, and open to be looked at.

    submit -> [stage 0] -> hidden -> [stage 1] -> hidden -> ... [last stage] -> collect

Each stage is a `ModelRunner` with its part of the model, its cache and its own copy of every request's state; they
share nothing but messages and hidden states. Time goes in ticks: in each, every stage that has something before it runs
one step, the last stage first. So while results are awaited, the stages work on different steps, as processes would.
"""

import copy
import time
from collections import deque
from collections.abc import Sequence

from minivllm.config import EngineConfig
from minivllm.engine.batch_queue import PipelineCore
from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.engine.simulate import CostModel
from minivllm.engine.stage_states import CLASSIC
from minivllm.engine.stage_timeline import StageTimeline
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.stage import LocalLink, PipelineStage


class InProcessPipeline:
    """A `PipelineWorker` (engine/batch_queue.py) of stages that take turns.

    Args:
        config: the engine's settings; `pipeline_parallel_size` stages are made.
        model_path: directory with the checkpoint.
        costs: what a step takes on each stage, for the timeline; None: as measured.

    Attributes:
        stages: the runners; the last one samples.
        timeline: when each stage would have worked, had each a device of its own.
        messages: what the scheduler has sent, if `keep_messages` is set.
        num_blocks, max_model_len: the least that any stage has room for.
    """

    def __init__(self, config: EngineConfig, model_path: str, costs: Sequence[CostModel] | None = None) -> None:
        self.costs = costs
        self.num_stages = size = config.pipeline_parallel_size
        self.stages = [
            ModelRunner(config, model_path, (index, size), num_sharing=size, allocate=False) for index in range(size)
        ]
        self.num_blocks = min(stage.num_blocks for stage in self.stages)
        for stage in self.stages:
            stage.allocate_kv_cache(self.num_blocks)
        last = self.stages[-1]
        self.max_model_len, self.block_size = last.max_model_len, last.block_size
        self.hf_config, self.vocab_size = last.hf_config, last.vocab_size
        self.timeline = StageTimeline(size)
        self.keep_messages = False
        self.messages: list[SchedulerOutput] = []
        self._forget_steps()

    def _forget_steps(self) -> None:
        links = LocalLink.create(self.num_stages)
        self._workers = [PipelineStage(runner, link) for runner, link in zip(self.stages, links, strict=True)]
        self._inboxes: list[deque[SchedulerOutput]] = [deque() for _ in self.stages]
        self._results: deque[tuple[int, ModelRunnerOutput]] = deque()

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """Put a step in front of the first stage."""
        if self.keep_messages:
            self.messages.append(copy.deepcopy(scheduler_output))
        self._inboxes[0].append(scheduler_output)
        if scheduler_output.num_scheduled_tokens:
            self.timeline.submit(scheduler_output.step)

    def collect(self) -> ModelRunnerOutput:
        """Let time pass until the oldest step has come through."""
        while not self._results:
            if not any(self._inboxes):
                raise RuntimeError("no step is on its way")
            self.tick()
        step, output = self._results.popleft()
        self.timeline.collect(step)
        return output

    def tick(self) -> None:
        """Every stage that has something before it runs one step; what it sends is read in the next tick."""
        for index in reversed(range(self.num_stages)):
            if self._inboxes[index]:
                self._run(index, self._inboxes[index].popleft())

    def _run(self, index: int, message: SchedulerOutput) -> None:
        start = time.perf_counter()
        output = self._workers[index].run(message)
        if index + 1 < self.num_stages:
            self._inboxes[index + 1].append(message)
        if not message.num_scheduled_tokens:
            return
        if output is not None:
            self._results.append((message.step, output))
        seconds = time.perf_counter() - start if self.costs is None else self._cost(index, message)
        self.timeline.run(index, message.step, seconds, message.total_num_scheduled_tokens)

    def _cost(self, index: int, message: SchedulerOutput) -> float:
        starts = [new.num_computed_tokens for new in message.scheduled_new_reqs]
        num_tokens = message.total_num_scheduled_tokens
        num_context_tokens = num_tokens + sum(starts) + sum(message.scheduled_cached_reqs.num_computed_tokens)
        return self.costs[index].step_time(num_tokens, num_context_tokens)

    def reset(self) -> None:
        """Forget all requests and all steps on their way."""
        self.timeline.clear_waiting()
        self._forget_steps()

    def close(self) -> None:
        """There is nothing to end: the stages go with this object."""


def use_classic_rule(core: PipelineCore) -> None:
    """Let scheduler and stages follow the classic rule (engine/stage_states.py), to see what it loses.

    For an engine with stages in this process, before it has requests; a reset undoes it.
    """
    core.scheduler.stage_states.rule = CLASSIC
    for stage in core.worker.stages[:-1]:
        stage.batch.rule = CLASSIC
