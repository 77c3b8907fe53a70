"""Set 2, the paged KV cache: how many blocks a request takes, which it shares, and in what order they are lost.

How many blocks does a step take out of the free queue (`blocks_to_take`)? The cache as a book that is looked up is
in ps02_prefix.py (`block_names`, `cached_prefix`), the free queue in ps02_queue.py (`free_order`), and the two pieces
from the bug museum are in ps02_museum.py (`allocate`, `hand_out`). One request, as they see it:

    0                     computed          + new       + lookahead
    |--- hits ---|--- owned ---|--- blocks to take ---|
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

from minivllm.exercises.checking import Case, Exercise, plural
from minivllm.exercises.ps02_museum import ALLOCATE, HAND_OUT
from minivllm.exercises.ps02_prefix import BLOCK_NAMES, CACHED_PREFIX
from minivllm.exercises.ps02_queue import FREE_ORDER


def blocks_to_take(
    num_computed: int,
    num_new: int,
    num_lookahead: int,
    max_model_len: int,
    num_owned: int,
    hit_ref_counts: list[int],
    block_size: int,
) -> int:
    """How many blocks leave the free queue when a request gets slots for its next step, idle hits included."""
    num_slots = min(num_computed + num_new + num_lookahead, max_model_len)
    num_needed = max(0, -(-num_slots // block_size) - num_owned - len(hit_ref_counts))
    return num_needed + hit_ref_counts.count(0)


def judge_take(expected: int, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare two counts, and guess from the difference which rule was missed."""
    if type(got) is not int:
        return f"the answer is a {type(got).__name__} ({got!r}); blocks are counted, so it must be an int"
    if got == expected:
        return None
    if got < 0:
        return "a count cannot be negative: a request that owns more than it needs keeps the spare blocks"
    block_size, max_model_len, owned = inputs["block_size"], inputs["max_model_len"], inputs["num_owned"]
    hits, idle = len(inputs["hit_ref_counts"]), inputs["hit_ref_counts"].count(0)
    end = inputs["num_computed"] + inputs["num_new"]
    wanted = end + inputs["num_lookahead"]

    def take(num_slots: int, num_there: int = owned + hits, rounding: int = block_size - 1) -> int:
        return max(0, (num_slots + rounding) // block_size - num_there) + idle

    num_slots = min(wanted, max_model_len)
    others = {
        "of new blocks alone: a hit that nobody holds sits in the free queue, and leaves it when it is taken over": (
            expected - idle
        ),
        "with every hit: one that somebody holds (ref count above 0) is not in the free queue": expected - idle + hits,
        f"without the limit: no table grows beyond max_model_len = {max_model_len}": take(wanted),
        f"without the lookahead: {plural(inputs['num_lookahead'], 'draft slot')} must be there before the step": take(
            min(end, max_model_len)
        ),
        "rounded down: a block that is only partly filled is a whole block taken": take(num_slots, rounding=0),
        "one too many: the last block is exactly full, so no further one is begun": take(
            num_slots, rounding=block_size
        ),
        "with the hits counted twice: num_computed has their tokens, and the table has their blocks": take(
            num_slots, owned
        ),
        "all blocks of the request: what it owns is not taken again": take(num_slots, hits),
    }
    guess = next((f"; {got} is the count {why}" for why, other in others.items() if other == got), "")
    return (
        f"{plural(num_slots, 'token')} fill {plural(-(-num_slots // block_size), 'block')} of {block_size}, the "
        f"request owns {owned}, takes over {plural(hits, 'hit')}, {idle} of them idle{guess}"
    )


BLOCKS_TO_TAKE = Exercise(
    name="ps02.blocks_to_take",
    oracle=blocks_to_take,
    judge=judge_take,
    hint="tokens that need a slot (with the limit), blocks they fill, less owned and hits, not below 0; then idle hits",
    cases=(
        Case((13, 1, 7, 128, 4, [], 4), hint="13 + 1 + 7 = 21 tokens fill 6 blocks of 4, and 4 are there already"),
        Case((8, 5, 0, 128, 0, [1, 0], 4), hint="of the 2 hits only one is in the free queue"),
        Case((8, 5, 0, 128, 0, [1, 2], 4), hint="13 tokens fill 4 blocks, 2 of them are hits that others hold"),
        Case(
            (8, 5, 0, 128, 0, [0, 0], 4), hint="2 new blocks, and the 2 hits sit in the free queue until they are taken"
        ),
        Case((0, 10, 0, 128, 0, [], 4), hint="a fresh prompt: two full blocks and a half"),
        Case(
            (30, 1, 4, 32, 2, [], 16), hidden=True, hint="the drafts would reach 35, but no request is longer than 32"
        ),
        Case(
            (17, 1, 0, 128, 3, [], 16),
            hidden=True,
            hint="after rejected drafts a request may own more blocks than it needs: what is max(0, .) for?",
        ),
        Case((16, 16, 0, 128, 1, [], 16), hidden=True, hint="exactly two full blocks: no third is begun"),
        Case((16, 17, 0, 128, 1, [], 16), hidden=True, hint="one token past two blocks"),
        Case((8, 0, 0, 128, 0, [0, 0], 4), hidden=True, hint="no new tokens: only the hits leave the queue"),
        Case((0, 0, 0, 128, 0, [], 4), hidden=True, hint="nothing to do takes nothing"),
        Case((3, 2, 0, 128, 0, [0, 4, 0], 1), hidden=True, hint="with block_size 1 each token has a block of its own"),
        *(
            Case((block_size * len(refs), num_new, num_lookahead, 9, 0, refs, block_size), hidden=True)
            for block_size, refs, num_new, num_lookahead in product(
                (2, 3), ([], [0], [3], [0, 1], [2, 0, 0]), range(1, 6), (0, 2)
            )
            if block_size * len(refs) + num_new <= 9
        ),
        *(
            Case((num_computed, 1, num_lookahead, 9, num_owned, [], 2), hidden=True)
            for num_computed, num_lookahead, num_owned in product(range(1, 9), (0, 2), range(5))
            if 2 * num_owned >= num_computed
        ),
    ),
)

EXERCISES = (BLOCKS_TO_TAKE, BLOCK_NAMES, CACHED_PREFIX, FREE_ORDER, ALLOCATE, HAND_OUT)
