"""What a trace looks like: its data in the shape that a picture needs, so that plotting/ only has to draw.

Trace -> timeline()      -> rows of cells: request x step
      -> block_spans()   -> who held which block, from which step to which
      -> tables_at(step) -> prefix_tree() -> which requests share which beginning
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from minivllm.engine.trace import ScheduledTokens, Trace


@dataclass(frozen=True)
class Cell:
    """What one request did in one step."""

    row: int
    step: int
    tokens: ScheduledTokens


@dataclass(frozen=True)
class Wait:
    """Steps in which a request was there but had no place: from `first` up to, not including, `end`."""

    row: int
    first: int
    end: int
    after_preemption: bool


@dataclass
class Timeline:
    """Requests by steps; steps `first` up to, not including, `end`."""

    req_ids: list[str]
    first: int
    end: int
    cells: list[Cell] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)


def timeline(trace: Trace, first: int = 0, end: int | None = None) -> Timeline:
    """What each request did in each step of a range; requests in order of arrival."""
    end = len(trace.steps) if end is None else min(end, len(trace.steps))
    steps = trace.steps[first:end]
    waits = _waits(trace)
    shown = {row.req_id for event in steps for row in event.scheduled}
    shown |= {req_id for req_id, start, stop, _ in waits if start < end and stop > first}
    req_ids = sorted((req_id for req_id in trace.requests if req_id in shown), key=lambda r: trace.requests[r].arrival)
    rows = {req_id: row for row, req_id in enumerate(req_ids)}
    view = Timeline(req_ids, first, end)
    for event in steps:
        view.cells += [Cell(rows[tokens.req_id], event.step, tokens) for tokens in event.scheduled]
    for req_id, start, stop, after_preemption in waits:
        start, stop = max(start, first), min(stop, end)
        if start < stop:
            view.waits.append(Wait(rows[req_id], start, stop, after_preemption))
    return view


def _waits(trace: Trace) -> list[tuple[str, int, int, bool]]:
    """(request, first step, step of admission, after a preemption) for each time that a request waited."""
    waits: list[tuple[str, int, int, bool]] = []
    since: dict[str, tuple[int, bool]] = {}
    finished: set[str] = set()
    to_come = deque(sorted(trace.requests, key=lambda req_id: trace.requests[req_id].arrival))
    for event in trace.steps:
        while to_come and trace.requests[to_come[0]].arrival <= event.start:
            since[to_come.popleft()] = (event.step, False)
        # A request may be preempted and end all the same, with the results of a step that was on its way.
        since.update({req_id: (event.step, True) for req_id in event.preempted if req_id not in finished})
        finished.update(event.finished)
        admitted = [row.req_id for row in event.scheduled if row.req_id in since]
        for req_id in (*admitted, *event.aborted):
            first, after_preemption = since.pop(req_id, (event.step, False))
            if first < event.step:
                waits.append((req_id, first, event.step, after_preemption))
    waits += [(req_id, first, len(trace.steps), preempted) for req_id, (first, preempted) in since.items()]
    return waits


@dataclass(frozen=True)
class BlockSpan:
    """A block that the same requests held from step `first` up to, not including, `end`."""

    block_id: int
    first: int
    end: int
    owners: tuple[str, ...]


def block_spans(trace: Trace) -> list[BlockSpan]:
    """Who held which block and when, by block and step; a block nobody held has no span."""
    spans: list[BlockSpan] = []
    open_spans: dict[int, tuple[int, tuple[str, ...]]] = {}

    def close(block_id: int, end: int) -> None:
        first, owners = open_spans.pop(block_id)
        spans.append(BlockSpan(block_id, first, end, owners))

    owners_of: dict[int, tuple[str, ...]] = {}
    for event, tables in zip(trace.steps, trace.tables(), strict=True):
        if event.freed or event.new_blocks:
            owners_of = _owners(tables)
        for block_id in [block for block, (_, owners) in open_spans.items() if owners_of.get(block) != owners]:
            close(block_id, event.step)
        for block_id, owners in owners_of.items():
            open_spans.setdefault(block_id, (event.step, owners))
    for block_id in list(open_spans):
        close(block_id, len(trace.steps))
    return sorted(spans, key=lambda span: (span.block_id, span.first))


def _owners(tables: Mapping[str, Sequence[int]]) -> dict[int, tuple[str, ...]]:
    owners: dict[int, tuple[str, ...]] = {}
    for req_id, table in tables.items():
        for block_id in table:
            owners[block_id] = (*owners.get(block_id, ()), req_id)
    return owners


@dataclass
class PrefixNode:
    """A run of blocks that the same requests share, after the run of its parent."""

    items: list[Hashable]
    """Block ids, or what else stood in the tables; none for a root from which requests part at once."""
    req_ids: list[str]
    children: list["PrefixNode"] = field(default_factory=list)

    @property
    def num_leaves(self) -> int:
        return sum(child.num_leaves for child in self.children) or 1


def prefix_tree(tables: Mapping[str, Sequence[Hashable]]) -> PrefixNode:
    """The tree of common beginnings: a node a run, a branch where requests part.

    Args:
        tables: for each request its block table (`Trace.tables_at`), or any sequence of hashable things, such as the
            tuples of tokens that its blocks hold.
    """
    return _grow(dict(tables), start=0)


def _grow(tables: dict[str, Sequence[Hashable]], start: int) -> PrefixNode:
    end = start
    columns = zip(*(table[start:] for table in tables.values()), strict=False)
    for column in columns:
        if len(set(column)) > 1:
            break
        end += 1
    any_table = next(iter(tables.values()), ())
    node = PrefixNode(list(any_table[start:end]), list(tables))
    branches: dict[Hashable, dict[str, Sequence[Hashable]]] = {}
    for req_id, table in tables.items():
        if len(table) > end:
            branches.setdefault(table[end], {})[req_id] = table
    node.children = [_grow(branch, end) for branch in branches.values()]
    return node
