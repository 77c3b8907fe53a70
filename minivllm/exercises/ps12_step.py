"""A step of set 12: what crosses between devices, and who is in the batch.

pipeline   p - 1 sends of hidden and residual, 2 x tokens x hidden numbers each
tensor     two all-reduces a layer; a ring moves 2 (t - 1) / t x tokens x hidden numbers for each
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from minivllm.exercises.checking import Case, Exercise, plural


def traffic(
    kind: str, num_tokens: int, hidden_size: int, num_layers: int, num_ranks: int, bytes_per_element: int
) -> tuple[int, int]:
    """(exchanges, bytes over one rank's link) of a step; kind is "pipeline" or "tensor"."""
    if num_ranks == 1:
        return 0, 0
    payload = num_tokens * hidden_size * bytes_per_element
    if kind == "pipeline":
        return num_ranks - 1, 2 * payload
    return 2 * num_layers, 2 * num_layers * (2 * (num_ranks - 1) * payload // num_ranks)


def judge_traffic(expected: tuple[int, int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Exchanges first, then bytes."""
    if not isinstance(got, tuple) or len(got) != 2 or not all(type(number) is int for number in got):
        return f"the answer is {got!r}, not two whole numbers: (exchanges, bytes)"
    if got == expected:
        return None
    ranks, layers = inputs["num_ranks"], inputs["num_layers"]
    if ranks == 1:
        return f"one rank has nobody to talk to: (0, 0), got {got}"
    is_pipeline = inputs["kind"] == "pipeline"
    if got[0] != expected[0]:
        if is_pipeline:
            return f"{ranks} stages have {expected[0]} gaps between them, and each is crossed once; got {got[0]}"
        return f"two all-reduces in each of {layers} layers are {expected[0]}; got {got[0]}"
    payload = inputs["num_tokens"] * inputs["hidden_size"] * inputs["bytes_per_element"]
    if is_pipeline:
        return f"a link carries hidden and residual, {payload:,} bytes each, once: {expected[1]:,}; got {got[1]:,}"
    return (
        f"a ring of {ranks} moves 2 ({ranks} - 1) / {ranks} times the {payload:,} bytes of each all-reduce over a "
        f"rank's link; {expected[0]} times that is {expected[1]:,}; got {got[1]:,}"
    )


TRAFFIC = Exercise(
    name="ps12.traffic",
    oracle=traffic,
    judge=judge_traffic,
    hint="payload = tokens x hidden x bytes; the pipeline sends it twice at each gap, the ring 2 (t - 1) / t times, "
    "2 L times",
    cases=(
        Case(("pipeline", 64, 7168, 61, 8, 2), hint="7 gaps; a link carries 2 x 917,504 bytes"),
        Case(("pipeline", 1, 128, 6, 2, 4), hint="one gap, one token"),
        Case(("tensor", 1, 128, 6, 2, 4), hint="12 all-reduces; for two ranks 2 (t - 1) / t is 1"),
        Case(("tensor", 64, 7168, 61, 8, 2), hint="122 all-reduces, each moves 7 / 4 of 917,504 bytes"),
        Case(("tensor", 64, 7168, 61, 1, 2), hidden=True, hint="a single rank adds nothing up"),
        Case(("pipeline", 64, 7168, 61, 1, 2), hidden=True, hint="a single stage sends nothing"),
        Case(("tensor", 32, 4096, 32, 4, 2), hidden=True, hint="2 (4 - 1) / 4 is 3 / 2"),
        Case(("pipeline", 512, 4096, 32, 4, 2), hidden=True, hint="a prompt is many tokens, and still one send a gap"),
    ),
)


class Row(NamedTuple):
    """A running request; while its newest token is on its way, num_computed equals num_tokens."""

    name: str
    num_tokens: int
    num_computed: int


def next_batch(running: list[Row], num_stages: int, budget: int) -> dict[str, int]:
    """Tokens of each request in the next batch, by name, in the order of `running`."""
    max_decodes = -(-len(running) // num_stages)
    batch: dict[str, int] = {}
    num_decodes = 0
    for row in running:
        n = min(row.num_tokens - row.num_computed, budget)
        is_decode = row.num_tokens - row.num_computed == 1
        if n <= 0 or (is_decode and num_decodes == max_decodes):
            continue
        num_decodes += is_decode
        batch[row.name] = n
        budget -= n
    return batch


def judge_batch(expected: dict[str, int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Who must not be in it, then who is missing, then how much."""
    if not isinstance(got, dict) or not all(type(n) is int for n in got.values()):
        return f"the answer is {got!r}, not a dictionary from names to whole numbers"
    if got == expected and list(got) == list(expected):
        return None
    running, budget = inputs["running"], inputs["budget"]
    missing_tokens = {row.name: row.num_tokens - row.num_computed for row in running}
    stray = next((name for name in got if name not in missing_tokens), None)
    if stray is not None:
        return f"{stray!r} does not run"
    for name in got:
        if missing_tokens[name] <= 0:
            return f"the newest token of {name} is still on its way: it has nothing to compute, and is left out"
    if sum(got.values()) > budget:
        return f"the batch has {plural(sum(got.values()), 'token')}, but its budget is {budget}"
    share = -(-len(running) // inputs["num_stages"])
    num_decodes = sum(missing_tokens[name] == 1 for name in got)
    if num_decodes > share:
        return (
            f"{num_decodes} decodes in one batch, but {len(running)} running on {inputs['num_stages']} stages make "
            f"ceil({len(running)} / {inputs['num_stages']}) = {share} at most: the others are for the next batch"
        )
    for name, n in expected.items():
        if name not in got:
            what = "a decode, and the share is not used up" if missing_tokens[name] == 1 else "part of its prompt left"
            return f"{name} has {what}, and there is budget: it belongs in the batch"
        if got[name] != n:
            return f"{name} lacks {plural(missing_tokens[name], 'token')} and gets {n}; got {got[name]}"
    return f"in the order of running, with nobody else: {expected}, got {got}"


NEXT_BATCH = Exercise(
    name="ps12.next_batch",
    oracle=next_batch,
    judge=judge_batch,
    hint="n = min(num_tokens - num_computed, budget left); n <= 0 is skipped, and so is a decode beyond the share",
    cases=(
        Case(([Row(c, 5, 4) for c in "abcdef"], 3, 64), hint="six decodes on three stages: two of them"),
        Case(
            ([*[Row(c, 6, 6) for c in "ab"], *[Row(c, 5, 4) for c in "cdef"]], 3, 64),
            hint="a and b are on their way: the next two are c and d",
        ),
        Case(([Row("a", 5, 4), Row("b", 5, 4)], 1, 64), hint="one stage: everybody"),
        Case(([Row("a", 5, 4), Row("b", 5, 4), Row("c", 5, 4)], 2, 64), hint="ceil(3 / 2) = 2"),
        Case(
            ([Row("a", 20, 4), Row("b", 20, 8), Row("c", 5, 4), Row("d", 5, 4)], 4, 64),
            hidden=True,
            hint="prompts are not decodes: a and b take all they lack, and the share is 1 decode",
        ),
        Case(
            ([Row("a", 5, 4), Row("b", 5, 4), Row("c", 20, 4)], 3, 8),
            hidden=True,
            hint="b is beyond the share, but c behind it isn't: skip, don't stop",
        ),
        Case(([Row("a", 40, 4), Row("b", 5, 4)], 2, 16), hidden=True, hint="a takes the whole budget"),
        Case(([Row("a", 5, 5), Row("b", 6, 6)], 2, 16), hidden=True, hint="all are on their way: an empty batch"),
        Case(([Row("a", 5, 7), Row("b", 5, 4)], 2, 16), hidden=True, hint="a verifies drafts: less than nothing to do"),
        Case(([], 4, 16), hidden=True, hint="nobody runs"),
    ),
)
