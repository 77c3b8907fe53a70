"""Who runs in the next step, and with how many tokens.

One rule, no phases. A request is scheduled for `n` of the tokens whose K and V are not in the cache yet:

```
    0          computed      num_tokens      num_tokens_with_spec
    |--- in cache ---|-- to compute --|--- drafts to verify ---|
                     |<---- n tokens, as the budget allows ---->|
```

A fresh prompt, a chunk of a long one, a decode, the verification of k drafts and the recomputation after a
preemption are all this one case. Running requests come first, in order of arrival, then waiting ones; all share the
token budget of the step (continuous batching: Orca, Yu et al. 2022; chunked prefill: Sarathi, Agrawal et al. 2023).

When the pool is empty, the request that came last gives its blocks up and goes back to the front of the queue. It
keeps its outputs and recomputes their K and V later: *preemption by recompute*. Since the first of the running
requests is never the victim while others run, it always gets on, and so does everyone in turn.
"""

import time
from collections import deque
from collections.abc import Iterable

from minivllm.config import ConfigError
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.messages import (
    CachedRequestData,
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from minivllm.engine.request import Request, RequestStatus


class Scheduler:
    """Decides each step (`schedule`) and books its results (`update_from_output`).

    Args:
        kv_cache_manager: owner of the block tables; its pool must hold one request of `max_model_len`.
        max_model_len: longest request, prompt and output together, in tokens.
        max_num_seqs: most requests that run at the same time.
        max_num_batched_tokens: token budget of a step.
        enable_chunked_prefill: if False, a prompt is computed whole in one step or waits.
        long_prefill_token_threshold: longest chunk of one request in one step; 0 means no limit of its own.
        num_lookahead_tokens: cache slots a proposer needs beyond the scheduled tokens.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> None:
        largest = kv_cache_manager.num_blocks * kv_cache_manager.block_size
        if largest < max_model_len:
            raise ConfigError(
                f"the KV cache holds {largest} tokens and cannot serve one request of max_model_len "
                f"({max_model_len}): lower max_model_len to at most {largest} or give the cache more blocks"
            )
        if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_model_len ({max_model_len}), or a long prompt could never run"
            )
        self.kv_cache_manager = kv_cache_manager
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.num_lookahead_tokens = num_lookahead_tokens

        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._finished_req_ids: set[str] = set()
        self._preempted_req_ids: set[str] = set()

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its prompt is empty, leaves no room for an output, or its id is in use.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request")
        if request.num_prompt_tokens == 0:
            raise ValueError("the prompt is empty: it needs at least one token")
        if request.num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {request.num_prompt_tokens} tokens and leaves no room for an output within "
                f"max_model_len ({self.max_model_len}): shorten it to at most {self.max_model_len - 1} tokens"
            )
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Plan one step. Counters move at once, so that the next step can be planned before this one has run."""
        output = SchedulerOutput()
        budget = self.max_num_batched_tokens
        budget = self._schedule_running(output, budget)
        if not self._preempted_req_ids:
            self._admit_waiting(output, budget)
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        output.preempted_req_ids, self._preempted_req_ids = self._preempted_req_ids, set()
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new = self.num_new_tokens(request, request.num_computed_tokens, budget)
            if num_new > 0:
                new_block_ids = self._allocate_or_preempt(request, num_new)
                if new_block_ids is None:
                    break  # the request itself was the last one left to give its blocks up
                self._append_cached(output.scheduled_cached_reqs, request, new_block_ids)
                self._book(output, request, num_new)
                budget -= num_new
            index += 1
        return budget

    def _admit_waiting(self, output: SchedulerOutput, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            computed_blocks = self.kv_cache_manager.find_computed_blocks(request)
            num_computed = len(computed_blocks) * self.kv_cache_manager.block_size
            num_new = self.num_new_tokens(request, num_computed, budget)
            if not self.enable_chunked_prefill and num_new < request.num_tokens - num_computed:
                break
            new_block_ids = self.kv_cache_manager.allocate(request, num_new, computed_blocks, self.num_lookahead_tokens)
            if new_block_ids is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.num_computed_tokens = num_computed
            if request.status is RequestStatus.PREEMPTED:
                output.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
                self._append_cached(output.scheduled_cached_reqs, request, new_block_ids)
            else:
                request.num_cached_tokens = num_computed
                request.first_scheduled_time = time.monotonic()
                output.scheduled_new_reqs.append(self._new_request_data(request, new_block_ids))
            request.status = RequestStatus.RUNNING
            self._book(output, request, num_new)
            budget -= num_new

    def num_new_tokens(self, request: Request, num_computed: int, budget: int) -> int:
        """The one rule: all that is not in the cache yet, cut to the threshold, the budget and the longest length.

        The last position of a request of max_model_len tokens is never computed: no token may follow it.
        """
        num_new = request.num_tokens_with_spec - num_computed
        if 0 < self.long_prefill_token_threshold < num_new:
            num_new = self.long_prefill_token_threshold
        return min(num_new, budget, self.max_model_len - 1 - num_computed)

    def _allocate_or_preempt(self, request: Request, num_new: int) -> list[int] | None:
        while True:
            new_block_ids = self.kv_cache_manager.allocate(
                request, num_new, num_lookahead_tokens=self.num_lookahead_tokens
            )
            if new_block_ids is not None:
                return new_block_ids
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self._preempted_req_ids.add(request.request_id)

    def _book(self, output: SchedulerOutput, request: Request, num_new: int) -> None:
        """Enter `num_new` tokens of a request; drafts that the step has no room for are dropped."""
        num_drafts = request.num_computed_tokens + num_new - request.num_tokens
        if num_drafts > 0:
            output.scheduled_spec_decode_tokens[request.request_id] = request.spec_token_ids[:num_drafts]
        request.spec_token_ids = []
        output.num_scheduled_tokens[request.request_id] = num_new
        request.num_computed_tokens += num_new

    @staticmethod
    def _append_cached(cached: CachedRequestData, request: Request, new_block_ids: list[int]) -> None:
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(new_block_ids)
        cached.num_computed_tokens.append(request.num_computed_tokens)

    @staticmethod
    def _new_request_data(request: Request, block_ids: list[int]) -> NewRequestData:
        params = request.sampling_params
        eos_token_ids = frozenset() if params.ignore_eos else request.eos_token_ids
        return NewRequestData(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=params,
            stop_token_ids=eos_token_ids | frozenset(params.stop_token_ids),
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Book what a step brought: append tokens, settle stops, free what has ended."""
        outputs: list[EngineCoreOutput] = []
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is None or request.status is RequestStatus.WAITING:
                continue  # aborted while the step was on its way, and its id perhaps given to another
            token_ids = model_output.sampled_token_ids.get(req_id, [])
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(req_id)
            if drafts:
                request.num_computed_tokens -= len(drafts) + 1 - len(token_ids)
            num_kept = self._append_until_stop(request, token_ids)
            prompt_logprobs = model_output.prompt_logprobs.get(req_id, [])
            if num_kept or prompt_logprobs:
                outputs.append(self._engine_core_output(request, num_kept, model_output))
            if not request.status.is_finished and request.num_computed_tokens >= request.num_tokens - 1:
                request.spec_token_ids = list(model_output.draft_token_ids.get(req_id, []))
        self._release_finished()
        return outputs

    def _append_until_stop(self, request: Request, token_ids: list[int]) -> int:
        """Append token by token; what follows a stop is dropped. Returns how many were kept."""
        for count, token_id in enumerate(token_ids, start=1):
            if request.append_output_token(token_id, self.max_model_len):
                return count
        return len(token_ids)

    @staticmethod
    def _engine_core_output(request: Request, num_kept: int, model_output: ModelRunnerOutput) -> EngineCoreOutput:
        req_id = request.request_id
        return EngineCoreOutput(
            req_id=req_id,
            new_token_ids=model_output.sampled_token_ids.get(req_id, [])[:num_kept],
            new_logprobs=model_output.logprobs.get(req_id, [])[:num_kept],
            new_prompt_logprobs=model_output.prompt_logprobs.get(req_id, []),
            finish_reason=request.status.value if request.status.is_finished else None,
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            queue_time=request.first_scheduled_time - request.arrival_time,
        )

    def _release_finished(self) -> None:
        finished = [request for request in self.running if request.status.is_finished]
        if finished:
            self.running = [request for request in self.running if not request.status.is_finished]
            for request in finished:
                self._release(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at once, whatever they are doing; unknown or finished ids are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            request.status = RequestStatus.FINISHED_ABORTED
            self._release(request)

    def _release(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)
