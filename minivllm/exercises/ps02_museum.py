"""The bug museum of set 2: a hit that is free space at the same time, and a block that keeps its old name.

free queue   3  2  1  0      hits 0 and 1: of the four free blocks only 3 and 2 can be new ones
                   ^  ^
map          A -> 0          once 0 is handed out for another text, A must not lead there any more
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from minivllm.exercises.checking import Case, Exercise, plural

Allocation = tuple[list[int], list[int], list[int]]
ALLOCATION_PARTS = ("table", "free", "ref_counts")


def allocate(free: list[int], ref_counts: list[int], hits: list[int], num_new: int) -> Allocation:
    """(table, free, ref_counts) once a request has its hits and num_new blocks; an empty table if it must wait."""
    idle = [block for block in hits if ref_counts[block] == 0]
    if num_new + len(idle) > len(free):
        return [], list(free), list(ref_counts)
    rest = [block for block in free if block not in idle]
    table, rest = hits + rest[:num_new], rest[num_new:]
    return table, rest, [count + (block in table) for block, count in enumerate(ref_counts)]


def wrong_parts(names: Sequence[str], kinds: Sequence[type], got: Any) -> str | None:
    """What is wrong with the answer's form; None if it is a tuple of parts of these kinds."""
    if not isinstance(got, tuple) or len(got) != len(names):
        return f"the answer is a {type(got).__name__}, not the tuple ({', '.join(names)})"
    for name, kind, part in zip(names, kinds, got, strict=True):
        if not isinstance(part, kind):
            return f"{name} is a {type(part).__name__}, not a {kind.__name__}"
    return None


def judge_allocation(expected: Allocation, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """The table first, then what is left in the queue, then who holds what."""
    why = wrong_parts(ALLOCATION_PARTS, (list, list, list), got)
    if why is not None or got == expected:
        return why
    free, ref_counts, hits, num_new = inputs["free"], inputs["ref_counts"], inputs["hits"], inputs["num_new"]
    (table, queue, counts), (want_table, want_queue, want_counts) = got, expected
    strays = [block for block in table if block not in range(len(ref_counts))]
    if strays:
        return f"the table holds {strays[0]!r}, which is no block of this pool"
    idle = [block for block in hits if ref_counts[block] == 0]
    wanted = f"{plural(num_new, 'new block')} and {plural(len(idle), 'idle hit')}"
    sums = f"{wanted} leave the free queue, which has {len(free)}"
    if want_table == [] and table:
        twice = next((block for i, block in enumerate(table) if block in table[:i]), None)
        symptom = "" if twice is None else f"; now block {twice} stands twice in the table"
        return f"{sums}: the request must wait{symptom}"
    if want_table == []:
        part, want, have = ("free", free, queue) if queue != free else ("ref_counts", ref_counts, counts)
        return f"a request that must wait changes nothing: {part} stays {want}, got {have}"
    if not table:
        return f"{sums}: the request is served"
    if table[: len(hits)] != hits:
        return f"the table begins with the hits, in their order: {hits}, got {table[: len(hits)]}"
    for block in table[len(hits) :]:
        if block in hits:
            return (
                f"block {block} is a hit and was handed out as a new block, too: the request overwrites its own prefix"
            )
        if ref_counts[block]:
            return f"block {block} is held by {plural(ref_counts[block], 'request')}, and was handed out as a new one"
    if table != want_table:
        return f"new blocks come from the front of the queue, past the hits: {want_table}, got {table}"
    if queue != want_queue:
        left = next((block for block in queue if block in table), None)
        if left is not None:
            return f"block {left} is in the table and still in the free queue: the next request gets it as well"
        return f"the other free blocks keep their order: {want_queue}, got {queue}"
    block = next((i for i, pair in enumerate(zip(want_counts, counts, strict=False)) if pair[0] != pair[1]), None)
    if block is None:
        return f"there are {plural(len(ref_counts), 'block')}, but {plural(len(counts), 'ref count')}"
    return f"block {block} is held by {plural(want_counts[block], 'request')} now, but its ref count is {counts[block]}"


def show_parts(names: Sequence[str]) -> Callable[[tuple], str]:
    """One line a part."""
    return lambda parts: "\n".join(f"{name} = {part}" for name, part in zip(names, parts, strict=True))


ALLOCATE = Exercise(
    name="ps02.allocate",
    oracle=allocate,
    judge=judge_allocation,
    show=show_parts(ALLOCATION_PARTS),
    hint="check first: num_new + idle hits against the queue; then take the idle hits out, then the new ones",
    cases=(
        Case(([3, 2, 1, 0], [0, 0, 0, 0], [], 2), hint="no hits: two blocks from the front"),
        Case(([3, 2], [1, 1, 0, 0], [0, 1], 1), hint="both hits are held by somebody: they only get one holder more"),
        Case(([3, 2, 1, 0], [0, 0, 0, 0], [0, 1], 2), hint="two idle hits and two new blocks: exactly what there is"),
        Case(([3, 2, 1, 0], [0, 0, 0, 0], [0, 1], 3), hint="of the four free blocks two are the hits themselves"),
        Case(([3], [1, 1, 1, 0], [], 2), hint="two blocks are needed, one is free: wait"),
        Case(([1, 3, 2], [1, 0, 0, 0], [1], 2), hidden=True, hint="the hit is next in line: take hits out first"),
        Case(([0, 1, 2, 3], [0, 0, 0, 0], [0, 1], 1), hidden=True, hint="both hits stand at the front"),
        Case(([3, 2, 1, 0], [0, 0, 0, 0], [0, 1], 0), hidden=True, hint="hits only: they leave the queue all the same"),
        Case(([1], [1, 0, 2], [0, 1], 1), hidden=True, hint="the only free block is the idle hit"),
        Case(([], [1, 2], [0, 1], 0), hidden=True, hint="others hold all that it needs: no free block is needed"),
        Case(([], [1, 1], [], 1), hidden=True, hint="an empty queue serves nobody"),
        Case(([0], [0], [], 0), hidden=True, hint="nothing wanted, nothing changed"),
        *(
            Case((free, [0 if block in free else 1 for block in range(4)], hits, num_new), hidden=True)
            for free, hits, num_new in product(
                ([2, 0, 3, 1], [1, 3], [2, 1, 0]), ([], [0], [1, 3], [2, 0]), range(4)
            )
        ),
    ),
)  # fmt: skip

HandedOut = tuple[list[int], list[int], list[bytes | None], dict[bytes, list[int]]]
HANDED_OUT_PARTS = ("blocks", "free", "names", "cached")


def hand_out(free: list[int], names: list[bytes | None], cached: dict[bytes, list[int]], num_blocks: int) -> HandedOut:
    """(blocks, free, names, cached) once the first num_blocks of the queue have new owners."""
    blocks, rest = free[:num_blocks], free[num_blocks:]
    new_names = [None if block in blocks else name for block, name in enumerate(names)]
    left = {name: [block for block in ids if block not in blocks] for name, ids in cached.items()}
    return blocks, rest, new_names, {name: ids for name, ids in left.items() if ids}


def judge_handed_out(expected: HandedOut, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Who gets what first, then who can still be found, and under which name."""
    why = wrong_parts(HANDED_OUT_PARTS, (list, list, list, dict), got)
    if why is not None or got == expected:
        return why
    (blocks, free, names, cached), (want_blocks, want_free, want_names, want_cached) = got, expected
    strays = [ids for ids in cached.values() if not isinstance(ids, list)]
    if strays:
        return f"the map leads from a name to a {type(strays[0]).__name__} ({strays[0]!r}), not to a list of block ids"
    if len(names) != len(want_names):
        return f"there are {plural(len(want_names), 'block')}, but {plural(len(names), 'name')}"
    if blocks != want_blocks or free != want_free:
        return f"blocks come from the front of the queue: {want_blocks}, which leaves {want_free}"
    for name, ids in inputs["cached"].items():
        have, want = cached.get(name, []), want_cached.get(name, [])
        stale = next((block for block in have if block in blocks), None)
        if stale is not None:
            return (
                f"block {stale} gets another text now, and the map still leads to it under {name!r}: "
                f"who looks that beginning up reads the new owner's text"
            )
        lost = next((block for block in want if block not in have), None)
        if lost is not None and lost not in free and any(block in blocks for block in ids):
            return f"block {lost} carries {name!r}, too, and stays what it is: one entry of the name goes, not all"
        if lost is not None:
            return f"block {lost} keeps its text, but is not found under {name!r} any more"
        if name in cached and not cached[name]:
            return f"no block is called {name!r} any more: the empty entry goes, or a lookup takes it for a hit"
    block = next((i for i, pair in enumerate(zip(want_names, names, strict=True)) if pair[0] != pair[1]), None)
    if block is not None and block in blocks:
        return f"block {block} has a new owner and no full text yet: its name is None, not {names[block]!r}"
    if block is not None:
        return f"block {block} was not handed out and keeps its name {want_names[block]!r}, got {names[block]!r}"
    return f"the map should be {want_cached}, got {cached}"


A, B, C = b"A", b"B", b"C"

HAND_OUT = Exercise(
    name="ps02.hand_out",
    oracle=hand_out,
    judge=judge_handed_out,
    show=show_parts(HANDED_OUT_PARTS),
    hint="a block that is handed out loses its name in two places: its own entry of names, and its entry of the map",
    cases=(
        Case(([2, 0, 1], [None, None, None], {}, 2), hint="no names at all: two blocks from the front"),
        Case(([2, 1, 0], [A, B, None], {A: [0], B: [1]}, 1), hint="block 2 has no name: nothing is forgotten"),
        Case(([2, 1, 0], [A, B, None], {A: [0], B: [1]}, 2), hint="block 1 was called B: B leads nowhere now"),
        Case(([1, 2, 0], [A, B, C], {A: [0], B: [1], C: [2]}, 3), hint="all of them: an empty map"),
        Case(([0], [A, A], {A: [0, 1]}, 1), hidden=True, hint="blocks 0 and 1 are both called A: only 0 goes"),
        Case(([1, 0], [A, A, B], {A: [0, 1], B: [2]}, 1), hidden=True, hint="block 0 is still called A, 2 is still B"),
        Case(([1, 0], [A, A, A], {A: [2, 0, 1]}, 2), hidden=True, hint="of three blocks of one name one is left"),
        Case(([1, 0], [A, A], {A: [0, 1]}, 2), hidden=True, hint="both blocks of the name go, and the entry with them"),
        Case(([2, 1, 0], [A, B, None], {A: [0], B: [1]}, 0), hidden=True, hint="nobody asked for anything"),
        Case(([], [A], {A: [0]}, 0), hidden=True, hint="an empty queue, and a block that somebody holds"),
        *(
            Case((free, [A, None, B, A], {A: [0, 3], B: [2]}, num_blocks), hidden=True)
            for free in ([0, 1, 2, 3], [3, 2], [2, 3, 0], [1])
            for num_blocks in range(len(free) + 1)
        ),
    ),
)  # fmt: skip
