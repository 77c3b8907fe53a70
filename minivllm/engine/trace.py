"""What the engine did, step by step: the one record that every timeline, block map and occupancy figure is drawn from.

A `Trace` is made by `recorder.record`, around the real engine or around the simulator, and holds one `StepEvent` a
step. Times are seconds since the recording began. Block tables travel as changes, as they do in the messages, so that
a trace grows with what happened and not with steps x requests x blocks; `tables()` replays them.

What a request did in a step has a name here, though the scheduler knows no phases. The name follows from counters:

```
    0            first          first + num_tokens
    |-- in cache --|--- scheduled ---|

    prefill     first < num_prompt_tokens: a prompt, or a chunk of one
    recompute   first < what had been computed before a preemption
    decode      the token that was sampled last, alone
    verify      the token that was sampled last, then drafts: some are accepted, the rest rejected
```

Invariants (`check` proves them, and every file that is read goes through it): steps are numbered from 0 and their
tokens fit the budget; every request, block and kind that is named exists; replayed block tables hold no more blocks
than the pool had in use.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

PREFILL, RECOMPUTE, DECODE, VERIFY = KINDS = ("prefill", "recompute", "decode", "verify")
ACCEPTED, REJECTED = "accepted", "rejected"
PARTS = (PREFILL, RECOMPUTE, DECODE, ACCEPTED, REJECTED)
"""What scheduled tokens can be; a `verify` is a decoded token, accepted drafts and rejected ones."""

BlockTables = dict[str, list[int]]
"""Request id -> the blocks it holds, entry i for its tokens i * block_size .. (i + 1) * block_size - 1."""


class TraceError(ValueError):
    """A trace that contradicts itself, or a file that is none; the message names the place."""


@dataclass(slots=True)
class ScheduledTokens:
    """One request in one step."""

    req_id: str
    kind: str
    first: int
    """Tokens in the cache before the step: the position of the first scheduled one."""
    num_tokens: int
    num_recomputed: int = 0
    """Of these, how many had been computed before the request lost its blocks."""
    num_drafts: int = 0
    num_accepted: int = 0
    """Drafts that the target agreed with; the others were rejected."""
    num_output: int = 0
    """Tokens that entered the output: none for a chunk, several where drafts were accepted."""

    @property
    def num_rejected(self) -> int:
        return self.num_drafts - self.num_accepted

    def parts(self) -> dict[str, int]:
        """The scheduled tokens by what they were (`PARTS`); they sum to `num_tokens`."""
        if self.kind == VERIFY:
            num_decoded = self.num_tokens - self.num_drafts
            return {DECODE: num_decoded, ACCEPTED: self.num_accepted, REJECTED: self.num_rejected}
        if self.kind == RECOMPUTE:
            return {RECOMPUTE: self.num_recomputed, PREFILL: self.num_tokens - self.num_recomputed}
        return {self.kind: self.num_tokens}


@dataclass
class StepEvent:
    """One step of the engine. Block numbers and counts are those after scheduling, before the results came."""

    step: int
    start: float
    end: float
    scheduled: list[ScheduledTokens] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    """Requests whose blocks went back to the pool since the step before: ended, aborted or preempted."""
    new_blocks: BlockTables = field(default_factory=dict)
    """Blocks appended to the tables of requests, after `freed` was applied."""
    prefix_hits: dict[str, list[int]] = field(default_factory=dict)
    """For each request admitted in this step: tokens found in the prefix cache, and tokens looked up."""
    preempted: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    """Requests that were ended from outside since the step before."""
    finished: dict[str, str] = field(default_factory=dict)
    """Requests that ended with this step's results, and why: "stop" or "length"."""
    num_used_blocks: int = 0
    num_stored_tokens: int = 0
    """Slots that hold K and V of a token at the end of the step; what requests share counts once."""
    num_running: int = 0
    num_waiting: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        """Budget used."""
        return sum(row.num_tokens for row in self.scheduled)

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass
class TracedRequest:
    """What is known of a request once it has been admitted."""

    num_prompt_tokens: int
    arrival: float
    """Seconds since the recording began."""
    priority: int = 0


@dataclass
class Trace:
    """A recording: the limits of the engine, its requests in order of admission, its steps."""

    source: str
    """Who was recorded, in words: "engine", "simulation", "static batching"."""
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    requests: dict[str, TracedRequest] = field(default_factory=dict)
    steps: list[StepEvent] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """Seconds from the start of the recording to the end of its last step."""
        return self.steps[-1].end if self.steps else 0.0

    def tables(self) -> Iterator[BlockTables]:
        """The block tables while each step ran. They are updated in place: copy what has to be kept."""
        tables: BlockTables = {}
        for event in self.steps:
            for req_id in event.freed:
                tables.pop(req_id, None)
            for req_id, block_ids in event.new_blocks.items():
                tables.setdefault(req_id, []).extend(block_ids)
            yield tables

    def tables_at(self, step: int) -> BlockTables:
        """The block tables while step number `step` ran."""
        if not 0 <= step < len(self.steps):
            raise IndexError(f"step {step} is not in a trace of {len(self.steps)} steps")
        for event, tables in zip(self.steps, self.tables(), strict=True):
            if event.step == step:
                return {req_id: list(block_ids) for req_id, block_ids in tables.items()}
        raise AssertionError("steps are numbered from 0")

    def ref_counts_at(self, step: int) -> dict[int, int]:
        """For each block in use during a step, the number of requests that hold it; above 1: shared."""
        return dict(Counter(block_id for table in self.tables_at(step).values() for block_id in table))

    def check(self) -> None:
        """Prove the invariants of the module's docstring; raises `TraceError` with the culprit."""
        _require(self.block_size > 0 and self.num_blocks > 0, "num_blocks and block_size must be positive")
        for index, (event, tables) in enumerate(zip(self.steps, self.tables(), strict=True)):
            where = f"step {index}"
            _require(event.step == index, f"{where}: is numbered {event.step}")
            _require(event.start <= event.end, f"{where}: ends before it starts")
            used = event.num_scheduled_tokens
            _require(
                used <= self.max_num_batched_tokens, f"{where}: {used} tokens, budget {self.max_num_batched_tokens}"
            )
            for row in event.scheduled:
                _check_row(row, f"{where}, request {row.req_id!r}")
            named = [row.req_id for row in event.scheduled]
            for req_id in (*named, *event.freed, *event.new_blocks, *event.preempted, *event.finished, *event.aborted):
                _require(req_id in self.requests, f"{where}: request {req_id!r} is not among the trace's requests")
            self._check_blocks(event, tables, where)

    def _check_blocks(self, event: StepEvent, tables: BlockTables, where: str) -> None:
        for block_ids in event.new_blocks.values():
            for block_id in block_ids:
                _require(0 <= block_id < self.num_blocks, f"{where}: block {block_id} of {self.num_blocks}")
        _require(event.num_used_blocks <= self.num_blocks, f"{where}: more blocks used than there are")
        held = len({block_id for table in tables.values() for block_id in table})
        _require(held <= event.num_used_blocks, f"{where}: tables hold {held} blocks, {event.num_used_blocks} in use")


def _check_row(row: ScheduledTokens, where: str) -> None:
    _require(row.kind in KINDS, f"{where}: kind {row.kind!r} is none of {', '.join(KINDS)}")
    _require(row.first >= 0 and row.num_tokens > 0, f"{where}: {row.num_tokens} tokens from {row.first} on")
    _require(all(count >= 0 for count in row.parts().values()), f"{where}: a count of tokens is negative")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise TraceError(message)
