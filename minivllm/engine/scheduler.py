"""Who runs in the next step, and with how many tokens.

One rule, no phases. A request is scheduled for `n` of the tokens whose K and V are not in the cache yet:

```
    0          computed      num_tokens      num_tokens_with_spec
    |--- in cache ---|-- to compute --|--- drafts to verify ---|
                     |<---- n tokens, as the budget allows ---->|
```

A fresh prompt, a chunk of a long one, a decode, the verification of k drafts and the recomputation after a
preemption are all this one case. Running requests come first, in the order in which they were admitted, then waiting
ones; all share the token budget of the step (continuous batching: Orca, Yu et al. 2022; chunked prefill: Sarathi,
Agrawal et al. 2023).

When the pool is empty, a victim gives its blocks up and goes back to the queue: under "fcfs" the request that was
admitted last, under "priority" the least urgent one. It keeps its outputs and recomputes their K and V later:
*preemption by recompute*. The most urgent of the running requests is never the victim while others run: it always
gets on, and so does everyone in turn. A victim may have been scheduled in this very step; then that is undone.

Steps may be planned before the results of earlier ones are known:
  * counters move when a step is scheduled, so a request whose newest token is on its way has nothing to compute, and
    is left out; with several stages a step takes only its share of the decodes, and other steps take the others;
  * with `async_scheduling` the tokens on their way are counted as placeholders, and computing goes on past them.
"""

import time
from collections.abc import Iterable

from minivllm.config import ConfigError
from minivllm.engine.in_flight import StepPlan, StepsInFlight
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.messages import EngineCoreOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from minivllm.engine.request import Request, RequestStatus
from minivllm.engine.request_queue import make_queue, urgency
from minivllm.engine.stage_states import StageStates

UNKNOWN_DRAFT = -1


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
        scheduling_policy: "fcfs" or "priority"; who is admitted first, and who is preempted.
        async_scheduling: plan a step before the results of the one before it are known.
        num_speculative_tokens: with `async_scheduling`, drafts that the worker will have for each request.
        pipeline_parallel_size: stages, and so batches in flight, that the decodes are shared out among.
        pp_token_feedback: with several stages, who tells those that do not sample: "scheduler" or "broadcast".

    Attributes:
        requests: every unfinished request by its id.
        waiting: those that hold no blocks, in the order of admission.
        running: the others.
        stage_states: what the stages have been told; None where they need not be.
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
        scheduling_policy: str = "fcfs",
        async_scheduling: bool = False,
        num_speculative_tokens: int = 0,
        pipeline_parallel_size: int = 1,
        pp_token_feedback: str = "scheduler",
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
        self.scheduling_policy = scheduling_policy
        self.async_scheduling = async_scheduling
        self.num_speculative_tokens = num_speculative_tokens
        self.pipeline_parallel_size = pipeline_parallel_size
        self.stage_states: StageStates | None = None
        if pipeline_parallel_size > 1 and pp_token_feedback == "scheduler":
            self.stage_states = StageStates()

        self.requests: dict[str, Request] = {}
        self.waiting = make_queue(scheduling_policy)
        self.running: list[Request] = []
        self._in_flight = StepsInFlight()
        self._num_steps = 0
        self._num_arrivals = 0
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
        request.arrival_index = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Plan one step. Counters move at once, so that the next step can be planned before this one has run."""
        plan = StepPlan(SchedulerOutput(step=self._num_steps), self.max_num_batched_tokens)
        self._num_steps += 1
        self._schedule_running(plan)
        if not plan.has_preempted:
            self._admit_waiting(plan)
        output = plan.output
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        output.preempted_req_ids, self._preempted_req_ids = self._preempted_req_ids, set()
        if output.num_scheduled_tokens:
            self._in_flight.add(output.step, plan.step)
        if self.stage_states is not None:
            self.stage_states.enter(output, self.requests)
        return output

    def _schedule_running(self, plan: StepPlan) -> None:
        max_decodes = -(-len(self.running) // self.pipeline_parallel_size)
        while plan.cursor < len(self.running) and plan.budget > 0:
            request = self.running[plan.cursor]
            num_new = self.num_new_tokens(request, request.num_computed_tokens, plan.budget)
            # n <= 0: everything is on its way in an earlier step (less than nothing, while it verifies drafts).
            if num_new > 0 and not self._must_wait(plan, request, max_decodes):
                new_block_ids = self._allocate_or_preempt(plan, request, num_new)
                if new_block_ids is None:
                    break
                plan.output.scheduled_cached_reqs.append(request, new_block_ids)
                self._book(plan, request, num_new)
            plan.cursor += 1

    def _must_wait(self, plan: StepPlan, request: Request, max_decodes: int) -> bool:
        """Whether a request with tokens to compute sits this step out: others' turn, or its end is on the way."""
        if request.num_output_placeholders:
            num_outputs = request.num_output_tokens + self._in_flight.num_tokens_on_the_way(request)
            if num_outputs >= request.sampling_params.max_tokens:
                return True
        return len(plan.decodes) >= max_decodes and request.is_decode

    def _admit_waiting(self, plan: StepPlan) -> None:
        manager = self.kv_cache_manager
        while self.waiting and plan.budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            if request.num_preemptions and self._in_flight.hold(request):
                break  # its tokens on the way are not known yet, and a position must not be sampled twice
            computed_blocks = manager.find_computed_blocks(request)
            num_computed = len(computed_blocks) * manager.block_size
            num_new = self.num_new_tokens(request, num_computed, plan.budget)
            if not self.enable_chunked_prefill and num_new < request.num_tokens - num_computed:
                break
            block_ids = manager.allocate(request, num_new, computed_blocks, self.num_lookahead_tokens)
            if block_ids is None:
                break
            self.waiting.pop()
            self.running.append(request)
            request.num_computed_tokens = num_computed
            if request.status is RequestStatus.PREEMPTED:
                plan.output.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
                plan.output.scheduled_cached_reqs.append(request, block_ids)
            else:
                request.num_cached_tokens = num_computed
                request.first_scheduled_time = time.monotonic()
                if manager.looks_up(request):
                    manager.prefix_cache_stats.record(request.num_tokens, num_computed)
                plan.output.scheduled_new_reqs.append(NewRequestData.of(request, block_ids))
            request.status = RequestStatus.RUNNING
            self._book(plan, request, num_new)

    def num_new_tokens(self, request: Request, num_computed: int, budget: int) -> int:
        """The one rule: all that is not in the cache yet, cut to the threshold, the budget and the longest length.

        The last position of a request of max_model_len tokens is never computed: no token may follow it.
        """
        num_new = request.num_tokens_with_spec + request.num_output_placeholders - num_computed
        if 0 < self.long_prefill_token_threshold < num_new:
            num_new = self.long_prefill_token_threshold
        return min(num_new, budget, self.max_model_len - 1 - num_computed)

    def _allocate_or_preempt(self, plan: StepPlan, request: Request, num_new: int) -> list[int] | None:
        """Blocks for a running request, taken from others if need be; None if it was itself the one to give way."""
        while True:
            new_block_ids = self.kv_cache_manager.allocate(
                request, num_new, num_lookahead_tokens=self.num_lookahead_tokens
            )
            if new_block_ids is not None:
                return new_block_ids
            victim = self.running[-1] if self.scheduling_policy == "fcfs" else max(self.running, key=urgency)
            if self.running.index(victim) < plan.cursor:
                plan.cursor -= 1
            if victim.request_id in plan.step.requests:
                plan.withdraw(victim)
                self.kv_cache_manager.forget_last_names(victim)
            self.preempt(victim)
            plan.has_preempted = True
            if victim is request:
                return None

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away and send it back to the queue; it keeps its tokens.

        Steps of it that are in flight still bring theirs. Until they have, it is not admitted again.
        """
        self.running.remove(request)
        self.kv_cache_manager.free(request)
        self._in_flight.note_preemption(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.waiting.put_back(request)
        self._preempted_req_ids.add(request.request_id)

    def _book(self, plan: StepPlan, request: Request, num_new: int) -> None:
        """Enter `num_new` tokens of a request; drafts that the step has no room for are dropped."""
        request_id, output = request.request_id, plan.output
        num_drafts = request.num_computed_tokens + num_new - request.num_tokens - request.num_output_placeholders
        if num_drafts > 0:
            output.scheduled_spec_decode_tokens[request_id] = request.spec_token_ids[:num_drafts]
        request.spec_token_ids = []
        if self.pipeline_parallel_size > 1 and request.is_decode:
            plan.decodes.add(request_id)
        if num_drafts < 0:
            plan.step.prefill_chunks.add(request_id)
        elif self.async_scheduling:
            request.num_output_placeholders += 1 + num_drafts
            request.spec_token_ids = [UNKNOWN_DRAFT] * self.num_speculative_tokens
        plan.step.requests[request_id] = request
        output.num_scheduled_tokens[request_id] = num_new
        request.num_computed_tokens += num_new
        plan.budget -= num_new

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Book what a step brought: append tokens, settle stops, free what has ended."""
        outputs: list[EngineCoreOutput] = []
        if not scheduler_output.num_scheduled_tokens:
            return outputs
        step = self._in_flight.pop(scheduler_output.step)
        finished: list[Request] = []
        for req_id, request in step.requests.items():
            if request.status.is_finished:
                continue  # ended or aborted while the step was on its way, and its id perhaps given to another
            token_ids = model_output.sampled_token_ids.get(req_id, [])
            num_kept = request.append_output_tokens(token_ids, self.max_model_len)
            if req_id not in step.preempted:
                drafts = scheduler_output.scheduled_spec_decode_tokens.get(req_id)
                num_rejected = len(drafts) + 1 - len(token_ids) if drafts else 0
                request.num_computed_tokens -= num_rejected
                if drafts:
                    request.spec_decode.record(len(drafts), len(token_ids) - 1, num_kept)
                if self.async_scheduling:
                    request.num_output_placeholders -= num_rejected + num_kept
                elif model_output.draft_token_ids and req_id not in step.prefill_chunks:
                    request.spec_token_ids = list(model_output.draft_token_ids.get(req_id, []))
            if num_kept or req_id in model_output.prompt_logprobs:
                outputs.append(EngineCoreOutput.of(request, num_kept, model_output))
            if request.status.is_finished:
                finished.append(request)
        self._release(finished)
        return outputs

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at once, whatever they are doing; unknown or finished ids are ignored."""
        aborted = [
            self.requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self.requests
        ]
        for request in aborted:
            request.status = RequestStatus.FINISHED_ABORTED
        self._release(aborted)

    def _release(self, finished: list[Request]) -> None:
        """Requests have ended: they leave the scheduler and the cache, and the workers will be told."""
        if not finished:
            return
        self.running = [request for request in self.running if not request.status.is_finished]
        for request in finished:
            if not self.kv_cache_manager.holds(request):
                self.waiting.remove(request)
            self.kv_cache_manager.free(request)
            del self.requests[request.request_id]
            self._finished_req_ids.add(request.request_id)
            self._preempted_req_ids.discard(request.request_id)
