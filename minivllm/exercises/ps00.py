"""Set 0, warm-up: the three small sums behind every step of the engine.

Where do a chunk's K and V go (`slot_mapping`)? How many blocks must be taken for them (`blocks_needed`)?
Which keys may each query of the chunk see (`chunk_mask`)? One request, drawn as the engine sees it:

    position     0                num_computed          num_tokens
                 |--- in the cache ---|--- this chunk ---|
    table entry  |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---|     block_size slots each, anywhere in the pool
"""

from collections.abc import Mapping
from itertools import product
from numbers import Integral
from typing import TYPE_CHECKING, Any

from minivllm.exercises.checking import Case, Exercise, plural

if TYPE_CHECKING:
    from torch import Tensor


def is_int(value: Any) -> bool:
    """An int or what behaves like one; True and 1.0 do not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    """The cache slots of positions start .. start + num_tokens - 1, one each, in order."""
    positions = range(start, start + num_tokens)
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def judge_slots(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare slot by slot, and name the token whose slot is wrong."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of ints"
    for entry in got:
        if not is_int(entry):
            return f"the list holds a {type(entry).__name__} ({entry!r}); a slot is an int"
    if len(got) != len(expected):
        return f"{plural(len(expected), 'token')}, but {plural(len(got), 'slot')}: each token has exactly one"
    block_table, start, block_size = inputs["block_table"], inputs["start"], inputs["block_size"]
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        if want != have:
            position = start + i
            block, stray = want // block_size, have // block_size
            where = "" if stray in block_table else ", which this request does not own"
            return (
                f"the token at position {position} belongs in slot {want} "
                f"(table entry {position // block_size} is block {block}, offset {position % block_size}); "
                f"slot {have} lies in block {stray}{where}"
            )
    return None


SLOT_MAPPING = Exercise(
    name="ps00.slot_mapping",
    oracle=slot_mapping,
    judge=judge_slots,
    hint="take each position p by itself: p // block_size is its table entry, p % block_size its offset",
    cases=(
        Case(([7], 0, 3, 4), hint="block 7 begins at slot 7 * block_size"),
        Case(
            ([7, 2, 5], 0, 8, 4),
            hint="at position 4 the second table entry takes over, wherever its block lies",
        ),
        Case(
            ([7, 2, 5], 3, 6, 4),
            hint="the range begins at `start`, in the middle of a block, and crosses two borders",
        ),
        Case(([3, 9], 16, 2, 16), hint="the range begins exactly at the second block"),
        Case(([7, 2, 5], 5, 0, 4), hidden=True, hint="a range of no tokens has no slots: an empty list"),
        Case(([], 0, 0, 4), hidden=True, hint="a request that owns nothing and writes nothing is a valid input"),
        Case(([4, 0, 6], 0, 3, 1), hidden=True, hint="with block_size 1 a slot is a block"),
        Case(([0], 15, 1, 16), hidden=True, hint="the last slot of a block belongs to that block"),
        Case(
            ([8, 3, 11, 6], 2, 4, 4),
            hidden=True,
            hint="the table may be longer than the range (lookahead blocks)",
        ),
        *(
            Case(([5, 1, 8, 3, 0, 6], start, num_tokens, block_size), hidden=True)
            for block_size, start, num_tokens in product((2, 3), range(6), range(1, 7))
        ),
    ),
)


def blocks_needed(num_tokens: int, num_owned: int, block_size: int) -> int:
    """How many new blocks a request that owns num_owned must take so that num_tokens tokens have slots."""
    return max(0, -(-num_tokens // block_size) - num_owned)


def judge_blocks(expected: int, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare two counts, and guess from the difference which rule was missed."""
    if not is_int(got):
        return f"the answer is a {type(got).__name__} ({got!r}); blocks are counted, so it must be an int"
    if got == expected:
        return None
    num_tokens, num_owned, block_size = inputs["num_tokens"], inputs["num_owned"], inputs["block_size"]
    if got < 0:
        return "a count cannot be negative: a request that owns more than it needs keeps the spare blocks"
    total = -(-num_tokens // block_size)
    tokens, blocks = plural(num_tokens, "token"), plural(total, "block")
    why = f"{tokens} fill {blocks} of {block_size}, and the request owns {num_owned}"
    if got == expected + 1 and num_tokens % block_size == 0:
        return f"{why}; the last block is exactly full, so no further one is begun"
    if got == expected - 1 and num_tokens % block_size != 0:
        return f"{why}; a block that is only partly filled is a whole block taken"
    return why


BLOCKS_NEEDED = Exercise(
    name="ps00.blocks_needed",
    oracle=blocks_needed,
    judge=judge_blocks,
    hint="first how many blocks num_tokens fill in all (rounded up), then what is missing",
    cases=(
        Case((10, 0, 4), hint="10 tokens in blocks of 4: two full ones and a half"),
        Case((34, 2, 16), hint="34 tokens fill 3 blocks of 16, and 2 are there already"),
        Case((33, 3, 16), hint="the third block still has room: nothing to take"),
        Case((32, 1, 16), hidden=True, hint="try a number of tokens that is a multiple of block_size"),
        Case((17, 1, 16), hidden=True, hint="try a number of tokens one past a multiple of block_size"),
        Case(
            (20, 5, 16),
            hidden=True,
            hint="after rejected drafts a request may own more blocks than it needs: what is max(0, .) for?",
        ),
        Case((0, 0, 16), hidden=True, hint="no tokens, no blocks"),
        Case((5, 1, 1), hidden=True, hint="with block_size 1 each token has a block of its own"),
        *(
            Case((num_tokens, num_owned, block_size), hidden=True)
            for block_size, num_tokens, num_owned in product((1, 2, 3, 4), range(10), range(5))
        ),
    ),
)


def chunk_mask(num_computed: int, q_len: int, k_len: int) -> "Tensor":
    """Which keys each query of a chunk may see: bool [q_len, k_len], True where it may.

    Query i stands at position num_computed + i, key j at position j.
    """
    import torch

    query_positions = torch.arange(num_computed, num_computed + q_len)
    key_positions = torch.arange(k_len)
    return key_positions[None, :] <= query_positions[:, None]


def judge_mask(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare two masks, and name the first query and key on which they differ."""
    import torch

    if not isinstance(got, torch.Tensor):
        return f"the answer is a {type(got).__name__}, not a torch tensor"
    got = got.cpu()
    if got.dtype != torch.bool:
        return f"the dtype is {got.dtype}, not torch.bool (True: the query may see the key)"
    if got.shape != expected.shape:
        return f"the shape is {list(got.shape)}, not [q_len, k_len] = {list(expected.shape)}"
    if torch.equal(got, expected):
        return None
    if torch.equal(got, ~expected):
        return "every entry is the wrong way round: True must mean that the query may see the key"
    query, key = (got != expected).nonzero()[0].tolist()
    position = inputs["num_computed"] + query
    if key > position:
        kind = "lies in its future" if key < inputs["num_computed"] + inputs["q_len"] else "is padding"
        return f"query {query} (position {position}) sees key {key}, which {kind}"
    kind = "is its own" if key == position else "is in its past"
    return f"query {query} (position {position}) does not see key {key}, which {kind}"


def show_mask(mask: "Tensor") -> str:
    """One line a query: 1 for a key that it sees, . for one that it does not."""
    import torch

    if mask.dtype != torch.bool or mask.ndim != 2 or mask.numel() == 0:
        return repr(mask)
    return "\n".join(" ".join("1" if seen else "." for seen in row) for row in mask.tolist())


CHUNK_MASK = Exercise(
    name="ps00.chunk_mask",
    oracle=chunk_mask,
    judge=judge_mask,
    show=show_mask,
    hint="compare positions: query i is at num_computed + i, key j at j; a query sees what is not after it",
    cases=(
        Case((0, 4, 4), hint="a whole prompt in one chunk: the lower triangle"),
        Case((4, 3, 7), hint="the second chunk sees everything that the first one stored"),
        Case(
            (7, 1, 8),
            hint="a decode: one query, at the last position, and every key is in its past or its own",
        ),
        Case((0, 1, 1), hidden=True, hint="the first token of all sees itself"),
        Case(
            (2, 2, 6),
            hidden=True,
            hint="k_len is longer than num_computed + q_len: the rest is padding, never seen",
        ),
        Case(
            (5, 1, 9),
            hidden=True,
            hint="a decode in a batch padded to its longest row: not every key is its own",
        ),
        Case((3, 0, 3), hidden=True, hint="no queries: a mask of shape [0, k_len]"),
        *(
            Case((num_computed, q_len, num_computed + q_len + padding), hidden=True)
            for num_computed, q_len, padding in product(range(5), range(1, 5), range(3))
        ),
    ),
)

EXERCISES = (SLOT_MAPPING, BLOCKS_NEEDED, CHUNK_MASK)
