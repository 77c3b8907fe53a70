"""Set 11, multi-token prediction: what the MTP layer reads, pass by pass.

The layer reads token p + 1 with the target's hidden state of position p (`first_pass`), of the accepted rows alone
(`kept_rows`, from the bug museum), and then its own output (`draft`). How positions go on, what the next step reads
and how acceptance is counted is in ps11_drafts.py.

    target   reads t4 d5 d6 d7 at positions 4 .. 7; d5 is right, d6 is not: it emits d5 x6
    pass 1   reads d5 x6 at positions 4 5, with the target's hidden states of t4 and d5
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.exercises.checking import Case, Exercise, plural
from minivllm.exercises.ps11_drafts import ACCEPTANCE, NEXT_READS, PASS_POSITIONS


def first_pass(tokens: list[int], computed: int, scheduled: int, rejected: int) -> tuple[list[int], list[int]]:
    """(ids, positions) that the MTP layer's first pass reads after a step of the target."""
    positions = list(range(computed, computed + scheduled - rejected))
    return [tokens[position + 1] for position in positions], positions


def judge_first_pass(expected: tuple[list[int], list[int]], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Positions first, then the first id that is wrong."""
    if not isinstance(got, tuple) or len(got) != 2 or not all(isinstance(part, list) for part in got):
        return f"the answer is a {type(got).__name__}, not the pair (ids, positions) of two lists"
    (ids, positions), (want_ids, want_positions) = got, expected
    computed, scheduled, rejected = (inputs[name] for name in ("computed", "scheduled", "rejected"))
    if positions != want_positions:
        if positions == [position + 1 for position in want_positions]:
            return "positions are those of the hidden states, not of the tokens: one less"
        return (
            f"of the {plural(scheduled, 'row')} from position {computed} on the last {rejected} are rejected, so "
            f"positions are {want_positions}"
        )
    if len(ids) != len(want_ids):
        return f"{plural(len(ids), 'id')} for {plural(len(positions), 'position')}"
    for position, want, have in zip(positions, want_ids, ids, strict=True):
        if type(have) is not int or want != have:
            return f"at position {position} the layer reads token {position + 1} of the text, {want}; got {have!r}"
    return None


_TEXT = [100, 101, 102, 103, 104]
FIRST_PASS = Exercise(
    name="ps11.first_pass",
    oracle=first_pass,
    judge=judge_first_pass,
    hint="positions of the accepted rows, computed on; at position p the token p + 1",
    cases=(
        Case((_TEXT, 0, 4, 0), hint="a prompt of 4: the sampled 104 goes with the hidden state of position 3"),
        Case(([*_TEXT, 205, 306], 4, 4, 2), hint="three drafts sent, one accepted: two rows"),
        Case(([*_TEXT, 205], 4, 1, 0), hint="no drafts: one row, the newest token at the position before it"),
        Case(([*_TEXT, 205, 206, 207, 308], 4, 4, 0), hint="all accepted: the bonus goes with the last draft's row"),
        Case((_TEXT, 0, 3, 0), hidden=True, hint="a chunk: the next token of the prompt takes the sampled one's place"),
        Case((_TEXT, 1, 2, 0), hidden=True, hint="a chunk in the middle of a prompt"),
        Case(([*_TEXT, 305], 4, 4, 3), hidden=True, hint="all drafts are rejected: one row is left"),
        Case(([7, 7, 7, 7, 7, 9], 3, 3, 1), hidden=True, hint="equal tokens: only the last one tells"),
        Case(([5, 6], 0, 1, 0), hidden=True, hint="a prompt of one token"),
        Case((_TEXT, 2, 2, 0), hidden=True, hint="a prompt whose beginning was in the prefix cache"),
    ),
)


def kept_rows(scheduled: list[int], rejected: list[int]) -> list[int]:
    """Flat rows of the target's output whose hidden states the MTP layer's first pass gets."""
    rows, start = [], 0
    for count, wrong in zip(scheduled, rejected, strict=True):
        rows += range(start, start + count - wrong)
        start += count
    return rows


def judge_rows(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Say of the first row that differs whose it is, and what became of it."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of rows"
    if got == expected:
        return None
    start, fate = 0, {}
    for request, (count, wrong) in enumerate(zip(inputs["scheduled"], inputs["rejected"], strict=True)):
        for index in range(count):
            place = f"row {index} of the {count} of request {request}"
            fate[start + index] = place, index >= count - wrong
        start += count
    for row in got:
        if type(row) is not int or row not in fate:
            return f"{row!r} is none of the {plural(start, 'row')} of the step"
        place, is_void = fate[row]
        if is_void:
            return f"row {row} ({place}) has read a rejected draft: its hidden state is of a text that there is not"
    missing = next((row for row in expected if row not in got), None)
    if missing is not None:
        return f"row {missing} ({fate[missing][0]}) has read an accepted token and is missing"
    return f"each row once, in order: {expected}"


KEPT_ROWS = Exercise(
    name="ps11.kept_rows",
    oracle=kept_rows,
    judge=judge_rows,
    hint="of a request's rows the first scheduled - rejected; the next request begins behind all of its rows",
    cases=(
        Case(([4], [2]), hint="t4 d5 d6 d7, of which d6 and d7 are rejected: rows 0 and 1"),
        Case(([3, 3], [1, 0]), hint="two requests: rows 0 and 1 of the first, all of the second"),
        Case(([1, 5], [0, 0]), hint="a plain decode and a prompt: all rows"),
        Case(([4, 4, 4], [3, 0, 1]), hidden=True, hint="all, none and one rejected"),
        Case(([2, 1, 3], [1, 0, 2]), hidden=True, hint="each request starts behind all rows of the one before"),
        Case(([1], [0]), hidden=True),
        Case(([], []), hidden=True, hint="nobody was scheduled"),
        Case(([6, 4], [0, 3]), hidden=True, hint="a chunk of a prompt has nothing rejected"),
    ),
)


@dataclass(frozen=True)
class ToyLayer:
    """An MTP layer of whole numbers: layer(token, position, hidden) -> (its own hidden state, its guess)."""

    key: int = 3

    def __call__(self, token: int, position: int, hidden: int) -> tuple[int, int]:
        own = (11 * hidden + self.key * token + position) % 997
        return own, (own * self.key + position) % 89


def draft(layer: ToyLayer, ids: list[int], positions: list[int], hidden: list[int], k: int) -> list[int]:
    """k drafts from one layer: a first pass over all rows, then its own guess and its own hidden state."""
    passes = run_passes(layer, ids, positions, hidden, k)
    return [guess for *_, guess in passes]


def run_passes(
    layer: ToyLayer, ids: list[int], positions: list[int], hidden: list[int], k: int
) -> list[tuple[int, int, int, int]]:
    """For each pass (token, position, hidden, guess) of its last row."""
    token, position, state = ids[-1], positions[-1], hidden[-1]
    passes = []
    for _ in range(k):
        own, guess = layer(token, position, state)
        passes.append((token, position, state, guess))
        token, position, state = guess, position + 1, own
    return passes


def judge_drafts(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first draft that is wrong, and what its pass reads."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of drafts"
    if got == expected:
        return None
    if got and got == [inputs["ids"][-1], *expected][: len(got)]:
        return f"{inputs['ids'][-1]} is the last token that pass 1 reads: it is known, and no draft"
    passes = run_passes(*(inputs[name] for name in ("layer", "ids", "positions", "hidden", "k")))
    for number, (have, (token, position, state, guess)) in enumerate(zip(got, passes, strict=False), 1):
        if type(have) is not int or have != guess:
            whose = "the target's hidden state" if number == 1 else f"the output of pass {number - 1}"
            return (
                f"draft {number}: pass {number} reads token {token} at position {position} with {whose}, {state}, and "
                f"guesses {guess}; got {have!r}"
            )
    return f"k = {inputs['k']}, so {plural(inputs['k'], 'draft')}; got {len(got)}"


DRAFT = Exercise(
    name="ps11.draft",
    oracle=draft,
    judge=judge_drafts,
    hint="pass 1 guesses from its last row; each later pass reads that guess, one position on, with the layer's output",
    cases=(
        Case((ToyLayer(), [5, 6], [4, 5], [40, 50], 1), hint="one pass: the guess of the last row"),
        Case((ToyLayer(), [5, 6], [4, 5], [40, 50], 3), hint="three passes of the one layer"),
        Case((ToyLayer(5), [1, 2, 3, 4], [0, 1, 2, 3], [10, 20, 30, 40], 2), hint="a prompt"),
        Case((ToyLayer(), [9], [12], [77], 2), hidden=True, hint="a single row"),
        Case((ToyLayer(), [5, 6], [4, 5], [40, 50], 0), hidden=True, hint="k = 0: there is no room for a draft"),
        Case((ToyLayer(11), [8, 8, 8], [0, 1, 2], [1, 1, 1], 6), hidden=True, hint="many passes"),
        Case((ToyLayer(2), [0], [0], [0], 4), hidden=True, hint="zeros are numbers like others"),
    ),
)

EXERCISES = (FIRST_PASS, KEPT_ROWS, DRAFT, PASS_POSITIONS, NEXT_READS, ACCEPTANCE)
