"""One step of set 9: running requests first, then waiting ones, under one budget and in one pool of blocks.

running   a  b  c  d          waiting   e  f
          --------->                    ---->
          in order, while budget is left;      then these, while there is budget, a place and blocks,
          no blocks: the last one gives way    unless somebody has given way in this step
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from minivllm.exercises.checking import Case, Exercise, plural


class Row(NamedTuple):
    """A request as a step sees it."""

    name: str
    num_tokens: int
    """Prompt and outputs."""
    num_computed: int = 0
    """Of these, the ones whose K and V are in the cache. A request that waits has none."""


Step = tuple[dict[str, int], list[str], list[str]]


def plan_step(
    running: list[Row], waiting: list[Row], budget: int, max_num_seqs: int, num_free_blocks: int, block_size: int
) -> Step:
    """(tokens of each scheduled request, names of those that run then, names of those that wait then)."""
    running, waiting, scheduled = list(running), list(waiting), {}
    has_preempted = False

    def num_blocks(num_tokens: int) -> int:
        return -(-num_tokens // block_size)

    cursor = 0
    while cursor < len(running) and budget > 0:
        row = running[cursor]
        cursor += 1
        n = min(row.num_tokens - row.num_computed, budget)
        if n <= 0:
            continue
        needed = num_blocks(row.num_computed + n) - num_blocks(row.num_computed)
        while needed > num_free_blocks and row in running:
            victim = running.pop()
            num_free_blocks += num_blocks(victim.num_computed)
            waiting.insert(0, victim)
            has_preempted = True
        if row not in running:
            break
        scheduled[row.name] = n
        budget, num_free_blocks = budget - n, num_free_blocks - needed
    while waiting and budget > 0 and len(running) < max_num_seqs and not has_preempted:
        n = min(waiting[0].num_tokens, budget)
        if num_blocks(n) > num_free_blocks:
            break
        scheduled[waiting[0].name] = n
        budget, num_free_blocks = budget - n, num_free_blocks - num_blocks(n)
        running.append(waiting.pop(0))
    return scheduled, [row.name for row in running], [row.name for row in waiting]


def judge_step(expected: Step, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Who runs comes first, then who waits, then who computes how much."""
    if not isinstance(got, tuple) or len(got) != 3:
        return f"the answer is a {type(got).__name__}, not the tuple (scheduled, running, waiting)"
    for part, kind, name in zip(got, (dict, list, list), ("scheduled", "running", "waiting"), strict=True):
        if not isinstance(part, kind):
            return f"{name} is a {type(part).__name__}, not a {kind.__name__}"
        stray = next((entry for entry in part if not isinstance(entry, str)), None)
        if stray is not None:
            return f"{name} holds a {type(stray).__name__}; requests are listed by their names"
    if got == expected:
        return None
    looks = (_wrong_running, _wrong_waiting, _wrong_counts)
    return next(why for look in looks if (why := look(expected, got, inputs)))


def _wrong_running(expected: Step, got: Step, inputs: Mapping[str, Any]) -> str | None:
    before = [row.name for row in inputs["running"]]
    want, have = expected[1], got[1]
    if want == have:
        return None
    if len(have) > inputs["max_num_seqs"]:
        return f"{len(have)} requests run, but max_num_seqs is {inputs['max_num_seqs']}: it counts all who run"
    victims, admitted = ([n for n in before if n not in want], [n for n in have if n not in before])
    if victims and admitted:
        return f"{victims[-1]} gave way in this step, so nobody is admitted in it; {admitted[0]} was"
    got_victims = [name for name in before if name not in have]
    if victims != got_victims:
        told = f"got {', '.join(got_victims)}" if got_victims else "got nobody"
        if not victims:
            return f"there are blocks for all who run, so nobody gives way; {told}"
        return f"the pool is too small for all, and the last of those that run gives way: {', '.join(victims)}; {told}"
    missing = [name for name in want if name not in have]
    if missing:
        return f"there is budget, a place and room for {missing[0]}, which is next in line: it is admitted"
    wrongly = [name for name in admitted if name not in want]
    if wrongly:
        return f"{wrongly[0]} can't be admitted: no budget, no blocks, or somebody before it has to wait"
    return f"those that run keep their order, and who is admitted comes last: {want}, got {have}"


def _wrong_waiting(expected: Step, got: Step, inputs: Mapping[str, Any]) -> str | None:
    if got[2] == expected[2]:
        return None
    if sorted(got[2]) == sorted(expected[2]) and len(expected[2]) > len(inputs["waiting"]):
        return f"who gave way goes to the front of the queue, in the old order: {expected[2]}, got {got[2]}"
    return f"who doesn't run waits, and keeps its place: {expected[2]}, got {got[2]}"


def _wrong_counts(expected: Step, got: Step, inputs: Mapping[str, Any]) -> str:
    want, have, budget = expected[0], got[0], inputs["budget"]
    if not all(type(n) is int for n in have.values()):
        return f"scheduled maps names to numbers of tokens, which are ints: {have}"
    if sum(have.values()) > budget:
        return f"the step has {plural(sum(have.values()), 'token')}, but its budget is {budget}"
    for name, n in want.items():
        if name not in have:
            return f"{name} has {plural(n, 'token')} to compute and there is budget for it: it must not be passed over"
        if have[name] != n:
            return f"{name} computes {plural(n, 'token')}, what it lacks or what the budget has left; got {have[name]}"
    stray = next(name for name in have if name not in want)
    return f"{stray} computes nothing in this step; only who does is listed"


def show_step(step: Step) -> str:
    scheduled, running, waiting = step
    return f"scheduled = {scheduled}\nrunning = {running}\nwaiting = {waiting}"


def rows(**counts: tuple[int, int] | int) -> list[Row]:
    """rows(a=(5, 4), b=9): a has 5 tokens, 4 of them computed; b has 9, none computed."""
    return [Row(name, *(count if isinstance(count, tuple) else (count,))) for name, count in counts.items()]


PLAN_STEP = Exercise(
    name="ps09.plan_step",
    oracle=plan_step,
    judge=judge_step,
    show=show_step,
    hint="two loops: over a copy of running with a cursor, then over waiting if nobody gave way; change budget and "
    "free blocks with each entry",
    cases=(
        Case((rows(a=(5, 4), b=(7, 6)), [], 10, 8, 9, 4), hint="two decodes; a opens a new block"),
        Case((rows(a=(6, 5), b=(7, 6)), rows(c=20, d=20), 10, 8, 9, 4), hint="c gets what the decodes leave, 8"),
        Case((rows(a=(20, 8)), rows(b=3), 16, 8, 9, 4), hint="a running request may be in the middle of its prompt"),
        Case((rows(a=(6, 5)), rows(b=3, c=2, d=2), 16, 3, 9, 4), hint="max_num_seqs counts those that run already"),
        Case(
            (rows(a=(9, 8), b=(5, 4), c=(6, 5)), rows(d=2), 16, 8, 0, 4),
            hint="a needs a block and none is free: c, the last of running, gives its two up; d must wait",
        ),
        Case(
            (rows(a=(6, 6), b=(6, 5)), rows(c=3), 16, 8, 9, 4),
            hidden=True,
            hint="the newest token of a is still on its way: skip it, and go on with those behind it",
        ),
        Case(
            (rows(a=(6, 5), b=(9, 8)), rows(c=3), 16, 8, 0, 4),
            hidden=True,
            hint="b is the last of running itself: it gives way, and computes nothing",
        ),
        Case(
            (rows(a=(21, 8), b=(4, 3), c=(3, 2), d=(3, 2)), rows(e=2), 16, 8, 1, 4),
            hidden=True,
            hint="a needs more than the last one has: b, c and d give way one after the other, as far as needed",
        ),
        Case(
            (rows(a=(6, 5)), rows(b=30, c=2), 64, 8, 3, 4),
            hidden=True,
            hint="first come, first served: c does not pass b by, though it would fit",
        ),
        Case(
            (rows(a=(6, 5)), rows(b=30, c=2), 9, 8, 2, 4),
            hidden=True,
            hint="a chunk needs blocks for the chunk, not for the whole prompt",
        ),
        Case(([], rows(a=5, b=5), 5, 8, 9, 4), hidden=True, hint="no budget is left for b: it waits"),
        Case(
            (rows(a=(40, 8), b=(6, 5)), [], 16, 8, 9, 4),
            hidden=True,
            hint="a takes the whole budget, and b stays where it is: in running, without tokens",
        ),
        Case(
            (rows(a=(5, 4), b=(5, 4), c=(5, 4)), [], 16, 8, 1, 4),
            hidden=True,
            hint="a takes the last free block, b takes that of c",
        ),
        Case(([], [], 16, 8, 9, 4), hidden=True, hint="nobody there: an empty step"),
    ),
)
