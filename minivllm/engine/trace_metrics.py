"""What a trace says in numbers: how long each request waited for what, and how well steps and memory were used.

```
    arrival        first step       first token      token     token          last token
    |--- queue time ---|--- prefill ---|--- inter-token latencies: one a gap ---|
    |---- time to first token ---------|
    |---------------------- end-to-end latency --------------------------------|
```

All tokens of a step arrive when it ends; of several accepted at once, the later ones have an inter-token latency of 0,
as for a reader who is handed them together. Everything is computed from the trace, so that engine, simulation and
baseline are measured with one measure. Times are in seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minivllm.engine.spec_stats import SpecDecodeStats
from minivllm.engine.trace import PARTS, Trace


@dataclass
class RequestMetrics:
    """One request; a time that did not come to pass before the trace ended is None."""

    req_id: str
    num_prompt_tokens: int
    arrival: float
    first_scheduled: float
    token_times: list[float]
    """When each output token arrived."""
    finished: float | None = None
    num_preemptions: int = 0
    num_prefix_hit_tokens: int = 0
    """Prompt tokens that the prefix cache had when the request was first admitted."""
    num_recomputed_tokens: int = 0

    @property
    def queue_time(self) -> float:
        return self.first_scheduled - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def inter_token_latencies(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def time_per_output_token(self) -> float | None:
        """Mean of the inter-token latencies."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def end_to_end_latency(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival


@dataclass
class Summary:
    """A whole trace. Latencies are of all requests together; percentiles by `percentile`."""

    num_requests: int
    num_finished: int
    num_steps: int
    duration: float
    num_output_tokens: int
    times_to_first_token: list[float]
    inter_token_latencies: list[float]
    times_per_output_token: list[float]
    end_to_end_latencies: list[float]
    queue_times: list[float]
    hit_rate: float
    """Share of the tokens looked up in the prefix cache that it had."""
    acceptance_rate: float
    """Share of the drafts verified that were accepted."""
    mean_acceptance_length: float
    """Tokens that a verification of drafts yields on average; 1 where there was none."""
    num_preemptions: int
    num_recomputed_tokens: int
    mean_budget_use: float
    """Share of the token budget used, mean over steps."""
    mean_running: float
    """Requests that run, mean over time."""

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.duration if self.duration else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` % of the values do not exceed; linear between neighbours, as NumPy has it.

    Raises:
        ValueError: no values, or percent outside 0..100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values: needs 0..100 and at least one value")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def request_metrics(trace: Trace) -> list[RequestMetrics]:
    """One entry a request, in order of admission."""
    metrics: dict[str, RequestMetrics] = {}
    for event in trace.steps:
        for req_id in event.preempted:
            metrics[req_id].num_preemptions += 1
        for row in event.scheduled:
            if row.req_id not in metrics:
                traced = trace.requests[row.req_id]
                metrics[row.req_id] = RequestMetrics(
                    row.req_id, traced.num_prompt_tokens, traced.arrival, first_scheduled=event.start, token_times=[]
                )
                metrics[row.req_id].num_prefix_hit_tokens = event.prefix_hits.get(row.req_id, [0, 0])[0]
            metrics[row.req_id].token_times += [event.end] * row.num_output
            metrics[row.req_id].num_recomputed_tokens += row.num_recomputed
        for req_id in event.finished:
            metrics[req_id].finished = event.end
    return list(metrics.values())


def spec_decode(trace: Trace) -> SpecDecodeStats:
    """What became of all drafts, position by position."""
    stats = SpecDecodeStats()
    for event in trace.steps:
        for row in event.scheduled:
            if row.num_drafts and row.num_output:
                stats.record(row.num_drafts, row.num_accepted, row.num_output)
    return stats


def summarise(trace: Trace) -> Summary:
    """The trace in a dozen numbers."""
    requests = request_metrics(trace)
    hits = [hit for event in trace.steps for hit in event.prefix_hits.values()]
    drafted = [row for event in trace.steps for row in event.scheduled if row.num_drafts]
    return Summary(
        num_requests=len(requests),
        num_finished=sum(request.finished is not None for request in requests),
        num_steps=len(trace.steps),
        duration=trace.duration,
        num_output_tokens=sum(len(request.token_times) for request in requests),
        times_to_first_token=_known(request.time_to_first_token for request in requests),
        inter_token_latencies=[latency for request in requests for latency in request.inter_token_latencies],
        times_per_output_token=_known(request.time_per_output_token for request in requests),
        end_to_end_latencies=_known(request.end_to_end_latency for request in requests),
        queue_times=[request.queue_time for request in requests],
        hit_rate=_ratio(sum(hit for hit, _ in hits), sum(looked_up for _, looked_up in hits)),
        acceptance_rate=_ratio(sum(row.num_accepted for row in drafted), sum(row.num_drafts for row in drafted)),
        mean_acceptance_length=spec_decode(trace).mean_acceptance_length,
        num_preemptions=sum(request.num_preemptions for request in requests),
        num_recomputed_tokens=sum(request.num_recomputed_tokens for request in requests),
        mean_budget_use=_ratio(sum(budget_use(trace)), len(trace.steps)),
        mean_running=_ratio(sum(e.num_running * e.duration for e in trace.steps), sum(e.duration for e in trace.steps)),
    )


def budget_use(trace: Trace) -> list[float]:
    """For each step, the share of the token budget that was used."""
    return [event.num_scheduled_tokens / trace.max_num_batched_tokens for event in trace.steps]


def tokens_by_part(trace: Trace) -> dict[str, list[int]]:
    """For each of `PARTS`, how many tokens each step scheduled of it."""
    counts = {part: [0] * len(trace.steps) for part in PARTS}
    for index, event in enumerate(trace.steps):
        for row in event.scheduled:
            for part, count in row.parts().items():
                counts[part][index] += count
    return counts


@dataclass
class Occupancy:
    """How the KV cache was filled, one entry a step; tokens (slots) of `capacity`.

    `stored`, `kept_for_later` and `never_used` make up what is reserved: slots with the K and V of a token, slots
    that their request fills later, and slots that it never fills (internal fragmentation).
    """

    capacity: int
    starts: list[float]
    """Seconds."""
    stored: list[int]
    kept_for_later: list[int]
    never_used: list[int]
    contiguous: list[int]
    """What the running requests would reserve with max_model_len contiguous slots each."""

    @property
    def reserved(self) -> list[int]:
        parts = zip(self.stored, self.kept_for_later, self.never_used, strict=True)
        return [stored + later + never for stored, later, never in parts]

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of the slots reserved, summed over all steps, the shares stored, kept for later and never used."""
        whole = sum(self.reserved)
        return tuple(_ratio(sum(part), whole) for part in (self.stored, self.kept_for_later, self.never_used))


def occupancy(trace: Trace) -> Occupancy:
    """How full the cache was, and with what, while each step ran."""
    result = Occupancy(trace.num_blocks * trace.block_size, [], [], [], [], [])
    reached = _final_lengths(trace)
    for event, tables in zip(trace.steps, trace.tables(), strict=True):
        reserved = event.num_used_blocks * trace.block_size
        # What each request can still fill of the blocks it holds lies at its own end, never in a shared block.
        will_fill = sum(min(reached[req_id], len(table) * trace.block_size) for req_id, table in tables.items())
        num_shared = sum(len(table) for table in tables.values()) - event.num_used_blocks
        filled_at_last = max(event.num_stored_tokens, will_fill - num_shared * trace.block_size)
        result.starts.append(event.start)
        result.stored.append(event.num_stored_tokens)
        result.kept_for_later.append(filled_at_last - event.num_stored_tokens)
        result.never_used.append(reserved - filled_at_last)
        result.contiguous.append(event.num_running * trace.max_model_len)
    return result


def _final_lengths(trace: Trace) -> dict[str, int]:
    """For each request, the most slots that it filled: the end of its furthest row."""
    lengths = dict.fromkeys(trace.requests, 0)
    for event in trace.steps:
        for row in event.scheduled:
            lengths[row.req_id] = max(lengths[row.req_id], row.first + row.num_tokens - row.num_rejected)
    return lengths


def _known(times: Iterable[float | None]) -> list[float]:
    return [time for time in times if time is not None]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
