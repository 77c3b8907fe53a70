"""Set 2, the prefix cache: how a block is named (`block_names`), and how far a lookup gets (`cached_prefix`).

tokens   |--- 0 ---|--- 1 ---|--- 2 ---|- tail      full blocks have names, the tail has none
names    root(salt) -> name 0 -> name 1 -> name 2    each from its parent and its own tokens
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from minivllm.exercises.checking import Case, Exercise, plural


def digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The engine's hash of a block: SHA-256 over the parent's bytes and the tokens, 8 bytes each; 32 bytes."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def root(salt: str | None) -> bytes:
    """What stands in for the parent of the first block; requests with other salts share nothing."""
    return f"salt:{salt!r}".encode()


def block_names(token_ids: list[int], block_size: int, salt: str | None) -> list[bytes]:
    """The names of a request's full blocks, in order: each the digest of its parent's name and its own tokens."""
    names, parent = [], root(salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = digest(parent, token_ids[start : start + block_size])
        names.append(parent)
    return names


def judge_names(expected: list[bytes], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare name by name, and recognise what else a wrong one was made of."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of names"
    for name in got:
        if not isinstance(name, bytes):
            return f"the list holds a {type(name).__name__} ({name!r}); a name is the bytes that digest returns"
    token_ids, block_size, salt = inputs["token_ids"], inputs["block_size"], inputs["salt"]
    if len(got) != len(expected):
        why = f"{plural(len(token_ids), 'token')} fill {plural(len(expected), 'block')} of {block_size}"
        tail = len(token_ids) % block_size
        if len(got) == len(expected) + 1 and tail:
            return f"{why}; the last {plural(tail, 'token')} are no full block, and only full ones are named"
        return f"{why}, but there are {plural(len(got), 'name')}"
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        if want == have:
            continue
        own = token_ids[i * block_size : (i + 1) * block_size]
        parent = expected[i - 1] if i else root(salt)
        others = {
            "made of its own tokens alone, so that the same block after another beginning has the same name": digest(
                root(salt), own
            ),
            "made without the salt, so that requests with other salts would share the block": digest(root(None), own),
            "made without any parent or salt": digest(b"", own),
            "made of all tokens up to its end: the parent's name stands for those before it": digest(
                root(salt), token_ids[: (i + 1) * block_size]
            ),
            "its grandparent's child: the parent is the name just before": digest(expected[i - 2], own)
            if i > 1
            else b"",
            "salted again: the salt is in the chain already, with the first block": digest(parent + root(salt), own),
        }
        guess = next((f": it is {why}" for why, other in others.items() if other == have), "")
        named = "root(salt)" if i == 0 else f"the name of block {i - 1}"
        return f"the name of block {i} should be the digest of {named} and {own}{guess}"
    return None


def show_names(names: list[bytes]) -> str:
    """The first four bytes of each are enough to tell them apart."""
    return "[" + ", ".join(f"{name.hex()[:8]}..." for name in names) + "]"


BLOCK_NAMES = Exercise(
    name="ps02.block_names",
    oracle=block_names,
    judge=judge_names,
    show=show_names,
    hint="start with parent = root(salt); each full block's digest becomes the parent of the next",
    cases=(
        Case(([1, 2, 3, 4], 4, None), hint="one full block: digest(root(None), [1, 2, 3, 4])"),
        Case(([1, 2, 3, 4, 5, 6, 7, 8], 4, None), hint="the second block's parent is the name of the first"),
        Case(([1, 2, 3, 4, 1, 2, 3, 4], 4, None), hint="the same tokens twice, but after another beginning: two names"),
        Case(([1, 2, 3, 4, 5, 6], 4, None), hint="the last two tokens fill no block"),
        Case(([5, 6, 7, 8], 4, None), hint="another first block"),
        Case(([1, 2, 3, 4, 5, 6, 7, 8], 4, "tenant"), hidden=True, hint="the salt enters with root(salt), once"),
        Case(([1, 2, 3, 4, 5, 6, 7, 8], 4, ""), hidden=True, hint="an empty salt is a salt, other than None"),
        Case(([1, 2, 3], 4, None), hidden=True, hint="no full block, no name"),
        Case(([], 4, "tenant"), hidden=True, hint="no tokens, no names"),
        Case(([7, 7, 7], 1, None), hidden=True, hint="with block_size 1 each token is a block"),
        Case(([0, 0, 0, 0, 0, 0, 2**40, 0], 2, None), hidden=True, hint="the parent is the block just before"),
        *(
            Case((list(range(3, 3 + num_tokens)), block_size, salt), hidden=True)
            for num_tokens, block_size, salt in product(range(1, 10), (2, 3), (None, "a"))
        ),
    ),
)  # fmt: skip


def cached_prefix(names: list[bytes], num_tokens: int, block_size: int, cached: dict[bytes, list[int]]) -> list[int]:
    """The blocks that hold the longest cached prefix, in order; at least one token is left to compute."""
    hits = []
    for name in names[: (num_tokens - 1) // block_size]:
        if name not in cached:
            break
        hits.append(cached[name][0])
    return hits


def judge_prefix(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare hit by hit; where several blocks carry a name, any of them will do."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of block ids"
    for block in got:
        if type(block) is not int:
            return f"the list holds a {type(block).__name__} ({block!r}); a hit is the id of one block"
    names, num_tokens, block_size = inputs["names"], inputs["num_tokens"], inputs["block_size"]
    cached = inputs["cached"]
    for i, block in enumerate(got[: len(expected)]):
        if block not in cached[names[i]]:
            return f"block {block} does not carry the name {names[i]!r} of table entry {i}; {expected[i]} does"
    if len(got) < len(expected):
        i = len(got)
        return f"block {expected[i]} carries the name of table entry {i} and leaves a token to compute: it is a hit"
    if len(got) == len(expected):
        return None
    i = len(expected)
    limit = (num_tokens - 1) // block_size
    if i < len(names) and i < limit:
        return (
            f"the walk ends at the first miss, table entry {i} ({names[i]!r}); block {got[i]} belongs to a later entry "
            f"and would be read at the wrong positions"
        )
    return (
        f"{plural(len(got), 'hit')} of {block_size} are {len(got) * block_size} of {num_tokens} tokens: one must be "
        f"left to compute, or there are no logits for the next one"
    )


A, B, C, D = b"A", b"B", b"C", b"D"

CACHED_PREFIX = Exercise(
    name="ps02.cached_prefix",
    oracle=cached_prefix,
    judge=judge_prefix,
    hint="at most (num_tokens - 1) // block_size names; stop at the first that is not in the map",
    cases=(
        Case(([A, B], 11, 4, {A: [5], B: [2]}), hint="both full blocks are cached, three tokens are left"),
        Case(([A, B, C], 13, 4, {A: [5], B: [2]}), hint="the third name is not in the map"),
        Case(([A, B], 9, 4, {C: [0], D: [1]}), hint="nothing is cached: an empty list"),
        Case(([A], 6, 4, {A: [3, 7]}), hint="two blocks carry the name: take one of them"),
        Case(
            ([A, B, C], 14, 4, {A: [5], C: [2]}),
            hidden=True,
            hint="B was evicted: the block of C can't stand in its place",
        ),
        Case(([B, C], 9, 4, {C: [2]}), hidden=True, hint="a miss at once"),
        Case(
            ([A, B], 8, 4, {A: [5], B: [2]}),
            hidden=True,
            hint="the whole prompt is cached: all but the last block can be taken",
        ),
        Case(([A], 4, 4, {A: [0]}), hidden=True, hint="a prompt of one block: hit nothing, compute everything"),
        Case(([A, B], 9, 4, {A: [0], B: [1]}), hidden=True, hint="one token behind two cached blocks is enough"),
        Case(([], 3, 4, {A: [0]}), hidden=True, hint="a prompt shorter than a block has no name"),
        Case(([A], 1, 1, {A: [0]}), hidden=True, hint="one token must always be computed"),
        Case(([A, B, A], 3, 1, {A: [4], B: [0]}), hidden=True, hint="block_size 1: two of three tokens"),
        *(
            Case(([A, B, C][: num_tokens // 2], num_tokens, 2, cached), hidden=True)
            for num_tokens, cached in product(range(1, 8), ({}, {A: [3]}, {A: [3], B: [1]}, {A: [3], B: [1], C: [0]}))
        ),
    ),
)
