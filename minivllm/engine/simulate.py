"""The real scheduler and the real block manager, against a worker that only knows what a step costs.

    requests -> Scheduler.schedule() -> SimulatedWorker: the clock moves on -> Scheduler.update_from_output() -> Trace

Nothing here decides anything: who runs, who waits, who loses its blocks is the engine's own code, at thousands of
steps a second. What is simulated is time. The result is a `Trace`; trace_metrics.py and plotting/ know what it says.

Contiguous allocation is a special case: with `block_size=max_model_len` and no prefix caching, each request reserves
one block for the longest it could become, whatever it needs (what PagedAttention, Kwon et al. 2023, compares with).
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.engine.recorder import record
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.trace import Trace
from minivllm.engine.workload import TEXT_STRIDE, SimulatedRequest, engine_request


@dataclass(frozen=True)
class CostModel:
    """Seconds a step takes: fixed + per_token x tokens scheduled + per_context_token x tokens of K and V read.

    The defaults are modelled, not measured: a dense model of 8 billion parameters in bfloat16 on a GPU with 4.8 TB/s
    and some 600 TFLOP/s in practice. Reading 16 GB of weights takes 3.3 ms, a token's 16 GFLOPs 27 microseconds, and
    a context token's 128 KiB of K and V 27 nanoseconds. A request's context is read once a step, however many of its
    tokens are scheduled.
    """

    fixed: float = 3.5e-3
    per_token: float = 27e-6
    per_context_token: float = 27e-9

    def __post_init__(self) -> None:
        if min(self.fixed, self.per_token, self.per_context_token) < 0 or self.fixed + self.per_token <= 0:
            raise ValueError("costs must not be negative, and a step must take some time")

    def step_time(self, num_tokens: int, num_context_tokens: int) -> float:
        return self.fixed + self.per_token * num_tokens + self.per_context_token * num_context_tokens


class SimulatedWorker:
    """Answers as a model runner would, with tokens that mean nothing.

    Args:
        num_drafts: drafts proposed for each request after each token.
        acceptance_rate: chance that a draft is right, if those before it were.
    """

    def __init__(self, cost: CostModel, num_drafts: int = 0, acceptance_rate: float = 0.7, seed: int = 0) -> None:
        self.cost, self.num_drafts, self.acceptance_rate = cost, num_drafts, acceptance_rate
        self._random = random.Random(seed)
        self._num_tokens: dict[str, int] = {}
        self._num_sampled = 0

    def execute_model(self, message: SchedulerOutput) -> tuple[ModelRunnerOutput, float]:
        """What the step brings, and the seconds it takes."""
        for req_id in message.finished_req_ids:
            self._num_tokens.pop(req_id, None)
        starts = {new.req_id: new.num_computed_tokens for new in message.scheduled_new_reqs}
        self._num_tokens.update((new.req_id, len(new.prompt_token_ids)) for new in message.scheduled_new_reqs)
        cached = message.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

        output, num_context_tokens = ModelRunnerOutput(), 0
        for req_id, num_scheduled in message.num_scheduled_tokens.items():
            end = starts[req_id] + num_scheduled
            num_context_tokens += end
            if end >= self._num_tokens[req_id]:
                self._sample(req_id, len(message.scheduled_spec_decode_tokens.get(req_id, ())), output)
        return output, self.cost.step_time(message.total_num_scheduled_tokens, num_context_tokens)

    def _sample(self, req_id: str, num_drafts: int, output: ModelRunnerOutput) -> None:
        num_new = 1
        while num_new <= num_drafts and self._random.random() < self.acceptance_rate:
            num_new += 1
        # Below every text of a workload: outputs are never mistaken for a prompt by the prefix cache.
        output.sampled_token_ids[req_id] = [-2 - self._num_sampled - i for i in range(num_new)]
        output.draft_token_ids[req_id] = [0] * self.num_drafts
        self._num_tokens[req_id] += num_new
        self._num_sampled += num_new


def simulate(
    requests: Iterable[SimulatedRequest],
    cost: CostModel | None = None,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_model_len: int = 2048,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    enable_prefix_caching: bool = True,
    num_drafts: int = 0,
    acceptance_rate: float = 0.7,
    max_steps: int | None = None,
    seed: int = 0,
    **scheduler_options: Any,
) -> Trace:
    """Run a workload to its end, or for `max_steps` steps, on a virtual clock.

    Args:
        requests: in any order; each enters the queue when the clock passes its arrival.
        cost: what a step takes; None is `CostModel()`.
        num_drafts, acceptance_rate: speculation, see `SimulatedWorker`.
        seed: decides which drafts are right.
        scheduler_options: further arguments of `Scheduler`, such as `long_prefill_token_threshold`.

    Raises:
        ValueError: a request that can never run, or settings that cannot work.
    """
    EngineConfig(
        "simulated",
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )  # refuses what the engine would refuse
    manager = KVCacheManager(num_blocks, block_size, max_model_len, enable_prefix_caching)
    scheduler = Scheduler(manager, max_model_len, max_num_seqs, max_num_batched_tokens, **scheduler_options)
    worker = SimulatedWorker(cost or CostModel(), num_drafts, acceptance_rate, seed)
    to_come = deque(sorted(requests, key=lambda request: request.arrival))
    own_texts = iter(range(1 + max((request.prefix for request in to_come), default=0), TEXT_STRIDE))
    now = 0.0
    with record(scheduler, "simulation", clock=lambda: now) as trace:
        while (to_come or scheduler.num_unfinished_requests) and len(trace.steps) != max_steps:
            if not scheduler.num_unfinished_requests:
                now = max(now, to_come[0].arrival)
            while to_come and to_come[0].arrival <= now:
                scheduler.add_request(engine_request(to_come.popleft(), next(own_texts)))
            output = scheduler.schedule()
            if not output.num_scheduled_tokens:
                raise RuntimeError(f"step {len(trace.steps) - 1} is empty, though requests are unfinished")
            results, seconds = worker.execute_model(output)
            now += seconds
            scheduler.update_from_output(output, results)
    return trace
