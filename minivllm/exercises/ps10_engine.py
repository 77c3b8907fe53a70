"""Set 10, what an engine does with drafts: how many are worth their price, and which blocks may carry a name.

`blocks_to_name` is from the bug museum: blocks of 4, a step that computes positions 6 to 9, of which 7 to 9 are drafts.

    positions    0  1  2  3 | 4  5  6  7 | 8  9
    tokens       known        known .  d    d  d        7 tokens are known: block 1 is full only if the draft is right
"""

from collections.abc import Mapping
from typing import Any

from minivllm.exercises.checking import Case, Exercise

CLOSE = 1e-9


def best_k(acceptance: float, cost: float, largest: int) -> tuple[int, float]:
    """(k, speed-up): the number of drafts, 0 to largest, with the largest speed-up; the smallest of equals."""
    speed_ups = [speed_up(acceptance, cost, k) for k in range(largest + 1)]
    return speed_ups.index(max(speed_ups)), max(speed_ups)


def speed_up(acceptance: float, cost: float, k: int) -> float:
    """Tokens a step, 1 + a + ... + a^k, for the price of 1 + k c plain steps."""
    return sum(acceptance**j for j in range(k + 1)) / (1 + k * cost)


def judge_choice(expected: tuple[int, float], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare the speed-up at the chosen k, then the choice."""
    if not isinstance(got, tuple) or len(got) != 2:
        return f"the answer is a {type(got).__name__}, not the pair (k, speed-up)"
    k, claimed = got
    if type(k) is not int or not 0 <= k <= inputs["largest"]:
        return f"k is {k!r}; it must be an int from 0 to {inputs['largest']}"
    if isinstance(claimed, bool) or not isinstance(claimed, int | float):
        return f"the speed-up is a {type(claimed).__name__} ({claimed!r}), not a number"
    a, c = inputs["acceptance"], inputs["cost"]
    at_k = speed_up(a, c, k)
    if not abs(claimed - at_k) < CLOSE:
        tokens = sum(a**j for j in range(k + 1))
        return (
            f"with k = {k} a step emits {tokens:.4g} tokens on average and costs {1 + k * c:.4g} plain steps: the "
            f"speed-up is {at_k:.4g}, got {claimed:.4g}"
        )
    if k == expected[0]:
        return None
    if abs(at_k - expected[1]) < CLOSE:
        return f"k = {expected[0]} and k = {k} are equally fast: take the smaller one"
    return f"k = {expected[0]} is faster: {expected[1]:.4g} times plain decoding, k = {k} only {at_k:.4g} times"


BEST_K = Exercise(
    name="ps10.best_k",
    oracle=best_k,
    judge=judge_choice,
    hint="1 + a + a^2 + ... + a^k tokens for 1 + k c steps; try every k from 0",
    cases=(
        Case((0.5, 0.25, 4), hint="k = 1: 1.5 tokens for 1.25 steps; k = 2: 1.75 for 1.5"),
        Case((0.75, 0.125, 8), hint="good and cheap drafts: several of them"),
        Case((0.25, 0.5, 4), hint="bad and dear: k = 0, and the speed-up is 1"),
        Case((1.0, 0.25, 4), hidden=True, hint="a = 1: k + 1 tokens; the closed form divides by 0"),
        Case((0.0, 0.125, 4), hidden=True, hint="no draft is ever right"),
        Case((0.5, 0.0, 5), hidden=True, hint="drafts that cost nothing: as many as there may be"),
        Case((0.0, 0.0, 3), hidden=True, hint="free and useless: all k are equal, the smallest is 0"),
        Case((0.5, 0.5, 4), hidden=True, hint="k = 0 and k = 1 are both 1: the smaller"),
        Case((0.9, 0.1, 0), hidden=True, hint="largest = 0: there is no choice"),
        Case((0.9, 0.05, 20), hidden=True),
    ),
)


def blocks_to_name(num_named: int, num_tokens: int, num_computed: int, n: int, block_size: int) -> list[int]:
    """Entries of the block table that get a name in a step that computes n tokens from num_computed on."""
    num_full = min(num_computed + n, num_tokens) // block_size
    return list(range(num_named, num_full))


def judge_entries(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Say of the first entry that differs what the block holds after the step."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of table entries"
    if got == expected:
        return None
    num_tokens, size = inputs["num_tokens"], inputs["block_size"]
    end = inputs["num_computed"] + inputs["n"]
    for entry in got:
        if type(entry) is not int or entry < 0:
            return f"{entry!r} is no entry of a block table"
        first, last = entry * size, entry * size + size - 1
        if entry < inputs["num_named"]:
            return f"entry {entry} has its name already (num_named = {inputs['num_named']})"
        if last >= end:
            return (
                f"entry {entry} holds positions {first} to {last}, and the step computes up to {end - 1}: it isn't full"
            )
        if last >= num_tokens:
            return (
                f"entry {entry} holds positions {first} to {last}, but only {num_tokens} tokens are known: from "
                f"position {num_tokens} on it holds drafts, which may be rejected and written over"
            )
    missing = next((entry for entry in expected if entry not in got), None)
    if missing is not None:
        last = missing * size + size - 1
        return f"entry {missing} is full after the step (up to position {last}), all of it known tokens: it gets a name"
    return f"each entry once, in order: {expected}"


BLOCKS_TO_NAME = Exercise(
    name="ps10.blocks_to_name",
    oracle=blocks_to_name,
    judge=judge_entries,
    hint="count full blocks up to the end of the step, but no further than the known tokens reach",
    cases=(
        Case((1, 8, 7, 1, 4), hint="a decode that fills block 1"),
        Case((0, 10, 0, 10, 4), hint="a prompt of 10: blocks 0 and 1 are full, block 2 is not"),
        Case((1, 7, 6, 1, 4), hint="position 6: block 1 has a slot left"),
        Case((1, 7, 6, 4, 4), hint="drafts at 7 to 9: block 1 is full only if the first of them is right"),
        Case((1, 16, 4, 8, 4), hidden=True, hint="a chunk: tokens 12 to 15 are known, but not computed yet"),
        Case((1, 8, 7, 4, 4), hidden=True, hint="block 1 is full of known tokens, block 2 would hold drafts"),
        Case((1, 8, 7, 6, 4), hidden=True, hint="even if drafts fill all of block 2"),
        Case((2, 8, 7, 3, 4), hidden=True, hint="nothing new"),
        Case((2, 9, 8, 1, 4), hidden=True, hint="the first slot of block 2 is no full block"),
        Case((4, 5, 4, 3, 1), hidden=True, hint="blocks of one slot: the newest token's, but no draft's"),
        Case((0, 30, 0, 12, 8), hidden=True, hint="a chunk ends in the middle of a block"),
    ),
)
