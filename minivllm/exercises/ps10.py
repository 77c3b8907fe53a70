"""Set 10, speculative decoding: guesses, their verification, and what both are worth.

Drafts are looked up in a request's own tokens (`propose_ngram`) and verified, greedily (`verify_greedy`) or by
rejection sampling (`recovered_law`, from the bug museum, and `verify_sampled`: ps10_rejection.py). How many are worth
their price says `best_k`, and which blocks of the cache may be named while they are verified `blocks_to_name`, from
the bug museum again (ps10_engine.py).

    positions     T - 1      T       T + 1     T + 2       T = num_tokens, k = 3
    computed     newest     d_0      d_1       d_2         k + 1 rows: row j is what the target says behind draft j - 1
    emitted                 d_0      x_1                   d_0 was right, x_1 stands in d_1's place, d_2 is void
"""

from collections.abc import Mapping
from typing import Any

from minivllm.exercises.checking import Case, Exercise, plural
from minivllm.exercises.ps10_engine import BEST_K, BLOCKS_TO_NAME
from minivllm.exercises.ps10_rejection import RECOVERED_LAW, VERIFY_SAMPLED


def propose_ngram(tokens: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    """At most k tokens that followed the longest suffix, of min_n to max_n tokens, where it stood first."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + k]
    return []


def judge_drafts(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Say which suffix counts, where it stands first, and what follows it there."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of drafts"
    if got == expected:
        return None
    tokens, min_n, max_n, k = (inputs[name] for name in ("tokens", "min_n", "max_n", "k"))
    for n in range(max_n, min_n - 1, -1):
        starts = [start for start in range(len(tokens) - n) if tokens[start : start + n] == tokens[len(tokens) - n :]]
        if starts:
            return (
                f"the longest suffix that stands earlier, too, has {plural(n, 'token')}: {tokens[len(tokens) - n :]}; "
                f"it stands first at {starts[0]}, and what follows it there, {plural(k, 'token')} at most, is "
                f"{expected}; got {got}"
            )
    return f"no suffix of {min_n} to {max_n} tokens stands anywhere earlier, so there is nothing to propose; got {got}"


PROPOSE_NGRAM = Exercise(
    name="ps10.propose_ngram",
    oracle=propose_ngram,
    judge=judge_drafts,
    hint="try suffixes from max_n down to min_n; for each, places from the left; the suffix itself is no earlier place",
    cases=(
        Case(([1, 2, 3, 4, 2, 3], 2, 3, 4), hint="[2, 3] stands at 1, and [4, 2, 3] follows"),
        Case(([1, 2, 3, 4, 2, 3], 2, 3, 2), hint="k = 2: no more than two drafts"),
        Case(([1, 2, 3, 4, 5, 6], 1, 3, 4), hint="nothing is repeated"),
        Case(([2, 7, 1, 2, 9, 8, 1, 2], 1, 2, 2), hint="[2] stands first at 0, but [1, 2] is longer"),
        Case(([1, 2, 3, 4, 2, 3], 3, 3, 4), hidden=True, hint="a suffix of two tokens is too short for min_n = 3"),
        Case(([7, 7, 7, 7], 1, 3, 4), hidden=True, hint="the two may overlap: [7, 7, 7] stands at 0 and at 1"),
        Case(([5, 1, 5, 2, 5], 1, 2, 2), hidden=True, hint="of two places the earliest counts"),
        Case(([4], 1, 3, 3), hidden=True, hint="a single token: there is nothing earlier"),
        Case(([4, 4], 1, 5, 3), hidden=True, hint="fewer tokens than max_n"),
        Case(([3, 9, 3], 1, 4, 9), hidden=True, hint="what follows may be shorter than k"),
        Case(([1, 2, 3, 1, 2, 3, 1, 2, 3], 2, 3, 5), hidden=True),
        Case(([6, 1, 6, 1, 6], 1, 2, 1), hidden=True),
    ),
)


def verify_greedy(drafts: list[int], rows: list[list[float]]) -> list[int]:
    """Emitted tokens: the target's choice row by row, up to and including the first that is not the draft."""
    emitted = []
    for j, row in enumerate(rows):
        emitted.append(max(range(len(row)), key=lambda token: (row[token], -token)))
        if j == len(drafts) or emitted[-1] != drafts[j]:
            break
    return emitted


def judge_emitted(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first row that was read wrongly, or the place where it should have ended."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of tokens"
    if got == expected:
        return None
    drafts = inputs["drafts"]
    if not got:
        return "nothing is emitted: a verification always yields at least one token, the target's own"
    for j, (want, have) in enumerate(zip(expected, got, strict=False)):
        if want != have:
            row = inputs["rows"][j]
            tie = row.count(max(row)) > 1
            return f"row {j} is largest at token {want}{', the lowest of equals' if tie else ''}; got token {have}"
    last = len(expected) - 1
    if len(got) < len(expected):
        if last == len(drafts):
            return f"all {plural(len(drafts), 'draft')} are right, so the last row gives a token more (the bonus)"
        return f"draft {last} is {drafts[last]}, but the target says {expected[last]}: that token is emitted, too"
    if last == len(drafts):
        return f"there are {len(drafts) + 1} rows, so at most {plural(len(drafts) + 1, 'token')}"
    return (
        f"draft {last} is {drafts[last]}, but the target says {expected[last]}: the rows after it have read a wrong "
        f"token and are void, so it ends here"
    )


def one_hot_rows(*choices: int) -> list[list[float]]:
    """Rows of logits over 8 tokens, largest where they are told to be; all are negative."""
    return [[-1.0 if token == choice else -4.0 - token for token in range(8)] for choice in choices]


VERIFY_GREEDY = Exercise(
    name="ps10.verify_greedy",
    oracle=verify_greedy,
    judge=judge_emitted,
    hint="row j chooses the token at draft j's place: emit it, and go on only if it is the draft",
    cases=(
        Case(([5, 6, 7], one_hot_rows(5, 3, 7, 2)), hint="5 is right, 3 stands in the place of 6, and then it ends"),
        Case(([5, 6, 7], one_hot_rows(5, 6, 7, 2)), hint="all right: three drafts and the bonus token 2"),
        Case(([5, 6, 7], one_hot_rows(1, 6, 7, 2)), hint="the first is wrong: a plain decode's single token"),
        Case(([5], one_hot_rows(5, 0)), hint="one draft, two rows"),
        Case(([], one_hot_rows(4)), hidden=True, hint="no drafts: a plain decode, one row and one token"),
        Case(([0, 0], [[2.0, 2.0, 1.0], [0.0, 1.0, 1.0], [5.0, 0.0, 0.0]]), hidden=True, hint="ties: the lowest id"),
        Case(
            ([5, 6, 7, 4], one_hot_rows(5, 6, 1, 4, 3)), hidden=True, hint="a later draft that happens to fit is void"
        ),
        Case(([3, 3, 3], one_hot_rows(3, 3, 3, 3)), hidden=True, hint="the same token throughout, the bonus too"),
        Case(([2], [[float("-inf"), -7.0, float("-inf")], [0.0, 0.0, 1.0]]), hidden=True, hint="forbidden: -inf"),
    ),
)

EXERCISES = (PROPOSE_NGRAM, VERIFY_GREEDY, RECOVERED_LAW, VERIFY_SAMPLED, BEST_K, BLOCKS_TO_NAME)
