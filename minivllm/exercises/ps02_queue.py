"""Set 2, the free queue: which block is given out next, and which prefix lives longest (`free_order`).

front [no name] ... [freed long ago] ... [freed just now] back
        ^ given out next          ^ a hit leaves from anywhere, without a search
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.exercises.checking import Case, Exercise, plural

MOST_COMPARISONS = 40  # in a pool of a thousand blocks, where one search takes hundreds


@dataclass(eq=False)
class Tally:
    """How often the ids of one case were compared since they were last copied for an answer."""

    comparisons: int = 0


class BlockId(int):
    """A block id whose copies count how often they are compared: that is how a search through the queue is seen."""

    def __new__(cls, value: int, tally: Tally, is_copy: bool = False) -> "BlockId":
        block = super().__new__(cls, value)
        block.tally, block.is_copy = tally, is_copy
        return block

    def __deepcopy__(self, memo: dict) -> "BlockId":
        self.tally.comparisons = 0
        return BlockId(int(self), self.tally, is_copy=True)

    def __eq__(self, other: object) -> bool:
        self.tally.comparisons += self.is_copy
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        self.tally.comparisons += self.is_copy
        return int.__ne__(self, other)

    __hash__ = int.__hash__


def free_order(num_blocks: int, events: list[tuple]) -> list[int]:
    """The ids in the free queue after these events, front first; at the beginning it is 0 .. num_blocks - 1."""
    end = num_blocks  # the one place that is never taken: before the front and behind the back
    ahead, behind = [end, *range(num_blocks)], [*range(1, num_blocks + 1), 0]

    def link(block: int, front: int, back: int) -> None:
        ahead[block], behind[block] = front, back
        behind[front] = ahead[back] = block

    def unlink(block: int) -> None:
        behind[ahead[block]], ahead[behind[block]] = behind[block], ahead[block]

    for kind, what, *rest in events:
        if kind == "take":
            for _ in range(what):
                unlink(behind[end])
        elif kind == "hit":
            unlink(what)
        else:
            for i in reversed(range(len(what))):
                if i < rest[0]:
                    link(what[i], ahead[end], end)
                else:
                    link(what[i], end, behind[end])
    order, block = [], behind[end]
    while block != end:
        order.append(block)
        block = behind[block]
    return order


def judge_order(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first place that is wrong, and recognise the usual other orders."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of block ids"
    tallies = {what.tally for _, what, *_ in inputs["events"] if isinstance(what, BlockId)}
    comparisons = sum(tally.comparisons for tally in tallies)
    if got == expected and comparisons > MOST_COMPARISONS:
        return (
            f"the order is right, but the queue was searched: {comparisons:,} comparisons for "
            f"{plural(len(inputs['events']), 'hit')}; a block that knows its neighbours leaves without one"
        )
    if got == expected:
        return None
    twice = [block for i, block in enumerate(got) if block in got[:i]]
    if twice:
        return f"block {twice[0]} is in the queue twice"
    for kind, what, *_ in reversed(inputs["events"]):
        if kind == "hit" and what in got and what not in expected:
            return f"block {what} was hit and is held by a request: it is not free any more"
    surplus = [block for block in got if block not in expected]
    missing = [block for block in expected if block not in got]
    if surplus:
        return f"block {surplus[0]} was handed out and is not free; blocks are taken from the front"
    if missing:
        return f"block {missing[0]} is free, but not in the queue"
    i = next(i for i, (want, have) in enumerate(zip(expected, got, strict=True)) if want != have)
    for kind, table, *rest in reversed(inputs["events"]):
        if kind == "free" and expected[i] in table and got[i] in table:
            later, earlier = table.index(expected[i]), table.index(got[i])
            if earlier < later < rest[0]:
                return (
                    f"block {expected[i]} stands behind block {got[i]} in its table and is of no use without it: the "
                    f"tail must be evicted first"
                )
    unnamed = {b for kind, table, *rest in inputs["events"] if kind == "free" for b in table[rest[0] :]}
    if expected[i] in unnamed and got[i] not in unnamed:
        return f"block {expected[i]} has no name, nobody can ever find it: it goes to the front, before {got[i]}"
    return f"at place {i} of the queue stands block {expected[i]}, got {got[i]}"


def _many_hits(num_blocks: int, num_hits: int) -> list[tuple]:
    tally, hits = Tally(), random.Random(2).sample(range(num_blocks // 4, num_blocks), num_hits)
    return [("hit", BlockId(block, tally)) for block in hits]


FREE_ORDER = Exercise(
    name="ps02.free_order",
    oracle=free_order,
    judge=judge_order,
    hint="give a table back from its last block to its first: without a name to the front, with one to the back",
    cases=(
        Case((6, [("take", 2)]), hint="blocks 0 and 1 leave from the front"),
        Case((6, [("take", 3), ("free", [0, 1, 2], 3)]), hint="all three have names: 2, then 1, then 0 go to the back"),
        Case((6, [("take", 3), ("free", [0, 1, 2], 2)]), hint="block 2 has no name: to the front; 1 and 0 to the back"),
        Case((6, [("hit", 3)]), hint="block 3 leaves from the middle, the others keep their order"),
        Case((5, [("take", 4), ("free", [0, 1, 2, 3], 4), ("hit", 0), ("take", 2)]), hint="after the hit: 4, 3, 2, 1"),
        Case(
            (6, [("take", 4), ("free", [0, 1, 2, 3], 1)]),
            hidden=True,
            hint="three without a name: 3, 2, 1 go to the front one after the other, so 1 is given out next",
        ),
        Case((4, [("hit", 0), ("hit", 3)]), hidden=True, hint="the first and the last can be hit, too"),
        Case((1, [("hit", 0)]), hidden=True, hint="the only one: an empty queue"),
        Case((2, [("take", 2), ("free", [1], 1), ("free", [0], 1)]), hidden=True, hint="an empty queue fills again"),
        Case((2, [("take", 2), ("free", [1], 0), ("free", [0], 0)]), hidden=True, hint="both without a name"),
        Case((3, []), hidden=True, hint="nothing happened"),
        Case((4, [("take", 0), ("free", [], 0)]), hidden=True, hint="nothing taken, nothing given back"),
        Case((0, []), hidden=True, hint="a pool without blocks"),
        Case(
            (6, [("take", 3), ("free", [1, 0], 2), ("hit", 0), ("free", [2], 0), ("hit", 1), ("free", [0, 1], 2)]),
            hidden=True,
            hint="blocks come back in other company than they left",
        ),
        Case(
            (1000, _many_hits(1000, 8)),
            hidden=True,
            hint="list.remove searches from the front; a block that knows its neighbours leaves without a search",
        ),
    ),
)  # fmt: skip
