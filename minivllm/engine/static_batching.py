"""How it was done before: a batch is filled, runs until its longest request ends, and only then comes the next.

Each request reserves `max_model_len` contiguous slots of the cache, since nobody knows how long it will become. Both
habits cost: slots that are never written, and rows that compute for requests that have ended. Continuous batching
(Orca, Yu et al. 2022) ends the second, paging (PagedAttention, Kwon et al. 2023) the first.

The result is a `Trace` with blocks of `max_model_len` tokens, one a request, so that metrics and figures of the two
worlds can be laid side by side. The baseline is not made worse than it was: a prompt is computed whole and without
padding, a batch starts with whoever is waiting, and a request counts as finished with its own last token.
"""

from collections import deque
from collections.abc import Iterable

from minivllm.engine.simulate import CostModel
from minivllm.engine.trace import DECODE, PREFILL, ScheduledTokens, StepEvent, Trace, TracedRequest
from minivllm.engine.workload import SimulatedRequest


def simulate_static_batching(
    requests: Iterable[SimulatedRequest],
    cost: CostModel | None = None,
    *,
    num_slots: int,
    max_model_len: int = 2048,
    max_num_seqs: int = 256,
) -> Trace:
    """Run a workload in static batches, on a virtual clock.

    Args:
        requests: in any order; served first come, first served.
        cost: what a step takes, as in `simulate`. A row whose request has ended still costs a token and its context.
        num_slots: tokens that the cache holds; compare with `num_blocks * block_size` of `simulate`.

    Raises:
        ValueError: the cache holds no request, or one is longer than max_model_len.
    """
    requests = sorted(requests, key=lambda request: request.arrival)
    num_places = num_slots // max_model_len
    if num_places < 1:
        raise ValueError(f"{num_slots} slots hold no request of max_model_len ({max_model_len})")
    for request in requests:
        if request.num_prompt_tokens + request.num_output_tokens > max_model_len:
            raise ValueError(f"request {request.req_id!r} is longer than max_model_len ({max_model_len})")
    batch_size = min(num_places, max_num_seqs)
    # The budget is a batch of the longest prompts: static batching knows none.
    trace = Trace("static batching", num_places, max_model_len, max_model_len, batch_size, batch_size * max_model_len)
    waiting, to_come, now = deque(), deque(requests), 0.0
    cost = cost or CostModel()
    freed: list[str] = []
    while to_come or waiting:
        if not waiting:
            now = max(now, to_come[0].arrival)
        _let_in(to_come, waiting, now)
        batch = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
        for request in batch:
            trace.requests[request.req_id] = TracedRequest(request.num_prompt_tokens, request.arrival, request.priority)
        for index in range(max(request.num_output_tokens for request in batch)):
            _let_in(to_come, waiting, now)
            event = _batch_step(batch, index, cost, now, len(trace.steps))
            event.num_waiting = len(waiting)
            if index == 0:
                event.freed = freed
                event.new_blocks = {request.req_id: [place] for place, request in enumerate(batch)}
            trace.steps.append(event)
            now = event.end
        freed = [request.req_id for request in batch]
    return trace


def _let_in(to_come: deque[SimulatedRequest], waiting: deque[SimulatedRequest], now: float) -> None:
    while to_come and to_come[0].arrival <= now:
        waiting.append(to_come.popleft())


def _batch_step(batch: list[SimulatedRequest], index: int, cost: CostModel, now: float, step: int) -> StepEvent:
    """Step `index` of a batch: prompts first, then a token a row; rows that have ended stay and compute nothing."""
    event = StepEvent(step, now, now, num_used_blocks=len(batch))
    num_tokens = num_context_tokens = 0
    for request in batch:
        first = request.num_prompt_tokens + index - 1 if index else 0
        num_new = 1 if index else request.num_prompt_tokens
        last_index = request.num_output_tokens - 1
        num_tokens += num_new
        num_context_tokens += request.num_prompt_tokens + min(index, last_index)
        event.num_stored_tokens += request.num_prompt_tokens + min(index, last_index)
        if index > last_index:
            continue
        event.num_running += 1
        kind = DECODE if index else PREFILL
        event.scheduled.append(ScheduledTokens(request.req_id, kind, first, num_new, num_output=1))
        if index == last_index:
            event.finished[request.req_id] = "length"
    event.end = now + cost.step_time(num_tokens, num_context_tokens)
    return event
