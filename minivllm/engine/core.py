"""The engine's heartbeat: schedule a step, let the workers run it, book the result.

```
    add_request -> Scheduler.schedule() -> SchedulerOutput -> worker -> ModelRunnerOutput
                        ^                                                      |
                        +------------- Scheduler.update_from_output() <--------+
```

One step at a time. With several pipeline stages the engine is a `PipelineCore` (batch_queue.py).
"""

from collections.abc import Iterable
from typing import Protocol

from minivllm.config import EngineConfig
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.messages import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.engine.request import Request
from minivllm.engine.scheduler import Scheduler


class Worker(Protocol):
    """What the engine asks of a worker; a model runner, or a double in a test. `reset` forgets all requests."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...

    def reset(self) -> None: ...


class EngineCore:
    """Scheduler and worker, one step at a time.

    Args:
        config: the engine's settings.
        worker: runs the steps.
        num_blocks: KV cache blocks that the worker has allocated.
        max_model_len: longest request in tokens, after the model and the pool had their say.
        block_size: tokens in one of the worker's blocks; None: as the config says.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        num_blocks: int,
        max_model_len: int,
        block_size: int | None = None,
    ) -> None:
        self.config = config
        self.worker = worker
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.block_size = config.resolved_block_size() if block_size is None else block_size
        self.scheduler = self._make_scheduler()

    def _make_scheduler(self) -> Scheduler:
        config, speculation = self.config, self.config.speculation
        manager = KVCacheManager(
            self.num_blocks,
            self.block_size,
            self.max_model_len,
            config.enable_prefix_caching,
            drop_last_hit_block=speculation is not None and speculation.method == "mtp",
        )
        return Scheduler(
            manager,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            scheduling_policy=config.scheduling_policy,
            num_lookahead_tokens=0 if speculation is None else speculation.num_lookahead_tokens,
            num_speculative_tokens=config.num_speculative_tokens,
            pipeline_parallel_size=config.pipeline_parallel_size,
            pp_token_feedback=config.pp_token_feedback,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request; raises ValueError where it can never run."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests at once; their tokens on the way are dropped. Unknown ids are ignored."""
        self.scheduler.abort(request_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; refused (False) while requests hold blocks, and then nothing changes."""
        return self.scheduler.kv_cache_manager.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.num_unfinished_requests > 0

    def step(self) -> list[EngineCoreOutput]:
        """Run one step and return what is new, one entry for each request that got on.

        A step that is cut short leaves counters ahead of the work and named blocks without their contents. Then all
        requests are dropped, scheduler, cache and worker start afresh, and the exception goes on to the caller.
        """
        try:
            scheduler_output = self.scheduler.schedule()
            model_output = self.worker.execute_model(scheduler_output)
            return self.scheduler.update_from_output(scheduler_output, model_output)
        except BaseException:
            self.scheduler = self._make_scheduler()
            self.worker.reset()
            raise
