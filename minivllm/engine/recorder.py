"""Watching a scheduler at work: `with record(scheduler) as trace`, around the real engine or the simulator.

The recorder stands at the two doors through which everything passes: it shadows `schedule` and `update_from_output` of
one scheduler while the `with` block lasts. An engine that is not recorded pays nothing. What it writes down it takes
from the messages, so that recording a step costs what has changed and not what the cache holds.

A step is entered when it is scheduled and completed when its results come back; in between others may be entered,
where an engine keeps several in flight.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minivllm.engine.messages import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.trace import DECODE, PREFILL, RECOMPUTE, VERIFY, ScheduledTokens, StepEvent, Trace, TracedRequest


@contextmanager
def record(
    scheduler: Scheduler, source: str = "engine", clock: Callable[[], float] = time.monotonic
) -> Iterator[Trace]:
    """Record every step of a scheduler into the trace that is yielded.

    Args:
        scheduler: `EngineCore.scheduler`, or one of your own. Request ids must not be used twice in a recording.
        source: who is recorded, in words.
        clock: the one that `Request.arrival_time` was read from, in seconds.

    Raises:
        ValueError: requests are running already; their tables and counters were never seen.
    """
    if scheduler.running:
        raise ValueError("a recording must begin before requests run, or their block tables would be unknown")
    recorder = _Recorder(scheduler, source, clock)
    schedule, update_from_output = scheduler.schedule, scheduler.update_from_output

    def recorded_schedule() -> SchedulerOutput:
        start = recorder.now()
        output = schedule()
        recorder.enter(output, start)
        return output

    def recorded_update(output: SchedulerOutput, results: ModelRunnerOutput) -> list[EngineCoreOutput]:
        core_outputs = update_from_output(output, results)
        recorder.complete(output, results, core_outputs)
        return core_outputs

    scheduler.schedule, scheduler.update_from_output = recorded_schedule, recorded_update
    try:
        yield recorder.trace
    finally:
        del scheduler.schedule, scheduler.update_from_output


class _Recorder:
    """The books that a recording needs beside its trace: how far each request got, and how long its table is."""

    def __init__(self, scheduler: Scheduler, source: str, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self._clock, self._began = clock, clock()
        manager = scheduler.kv_cache_manager
        self.trace = Trace(
            source,
            manager.num_blocks,
            manager.block_size,
            scheduler.max_model_len,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
        )
        self._in_flight: dict[int, tuple[SchedulerOutput, StepEvent]] = {}
        self._num_computed: dict[str, int] = {}
        """Of the requests that hold blocks, tokens in the cache once all that is scheduled has run."""
        self._table_length: dict[str, int] = {}
        self._recompute_until: dict[str, int] = {}
        self._finished: set[str] = set()

    def now(self) -> float:
        return self._clock() - self._began

    def enter(self, output: SchedulerOutput, start: float) -> None:
        """A step has been scheduled."""
        event = StepEvent(len(self.trace.steps), start, start)
        self.trace.steps.append(event)
        self._in_flight[id(output)] = (output, event)
        self._enter_losses(output, event)
        for new in output.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            arrival = request.arrival_time - self._began
            self.trace.requests[new.req_id] = TracedRequest(len(new.prompt_token_ids), arrival, request.priority)
            self._enter_admission(event, new.req_id, new.num_computed_tokens)
            self._enter_row(output, event, new.req_id, new.num_computed_tokens, new.block_ids)
        cached = output.scheduled_cached_reqs
        for req_id, num_computed, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if req_id in cached.resumed_req_ids:
                self._enter_admission(event, req_id, num_computed)
            self._enter_row(output, event, req_id, num_computed, block_ids)
        self._enter_occupancy(event)

    def complete(
        self, output: SchedulerOutput, results: ModelRunnerOutput, core_outputs: list[EngineCoreOutput]
    ) -> None:
        """The results of a step have been booked."""
        _, event = self._in_flight.pop(id(output))
        event.end = self.now()
        num_kept = {core_output.req_id: len(core_output.new_token_ids) for core_output in core_outputs}
        for row in event.scheduled:
            row.num_output = num_kept.get(row.req_id, 0)
            if row.num_drafts:
                row.num_accepted = max(0, len(results.sampled_token_ids.get(row.req_id, [])) - 1)
                self._take_back_rejected(row)
        for core_output in core_outputs:
            if core_output.finish_reason is not None:
                event.finished[core_output.req_id] = core_output.finish_reason
                self._finished.add(core_output.req_id)

    def _take_back_rejected(self, row: ScheduledTokens) -> None:
        if row.req_id in self._num_computed:
            self._num_computed[row.req_id] -= row.num_rejected
        elif row.req_id in self._recompute_until:  # preempted while this step was on its way
            num_kept = row.first + row.num_tokens - row.num_rejected
            self._recompute_until[row.req_id] = min(num_kept, self._recompute_until[row.req_id])

    def _enter_losses(self, output: SchedulerOutput, event: StepEvent) -> None:
        known = self.trace.requests
        event.preempted = sorted(req_id for req_id in output.preempted_req_ids if req_id in known)
        event.aborted = sorted(r for r in output.finished_req_ids if r in known and r not in self._finished)
        for req_id in event.preempted:
            computed = self._num_computed.get(req_id, 0)
            self._recompute_until[req_id] = max(computed, self._recompute_until.get(req_id, 0))
        for req_id in sorted(output.preempted_req_ids | output.finished_req_ids):
            if self._table_length.pop(req_id, None) is not None:
                event.freed.append(req_id)
                del self._num_computed[req_id]

    def _enter_admission(self, event: StepEvent, req_id: str, num_hit: int) -> None:
        if self.scheduler.kv_cache_manager.enable_prefix_caching:
            event.prefix_hits[req_id] = [num_hit, self.scheduler.requests[req_id].num_tokens]

    def _enter_row(
        self, output: SchedulerOutput, event: StepEvent, req_id: str, first: int, block_ids: list[int]
    ) -> None:
        num_tokens = output.num_scheduled_tokens[req_id]
        num_drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
        num_recomputed = max(0, min(first + num_tokens, self._recompute_until.get(req_id, 0)) - first)
        if num_drafts:
            kind = VERIFY
        elif num_recomputed:
            kind = RECOMPUTE
        else:
            kind = PREFILL if first < self.trace.requests[req_id].num_prompt_tokens else DECODE
        event.scheduled.append(ScheduledTokens(req_id, kind, first, num_tokens, num_recomputed, num_drafts))
        if block_ids:
            event.new_blocks[req_id] = list(block_ids)
        self._num_computed[req_id] = first + num_tokens
        self._table_length[req_id] = self._table_length.get(req_id, 0) + len(block_ids)

    def _enter_occupancy(self, event: StepEvent) -> None:
        """Shared blocks are full: each table beyond the first that holds one counts block_size tokens too many."""
        manager = self.scheduler.kv_cache_manager
        event.num_used_blocks = manager.num_used_blocks
        num_shared = sum(self._table_length.values()) - event.num_used_blocks
        event.num_stored_tokens = sum(self._num_computed.values()) - num_shared * manager.block_size
        event.num_running, event.num_waiting = len(self.scheduler.running), len(self.scheduler.waiting)
