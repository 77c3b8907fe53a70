"""Rejection sampling, set 10: a draft from q is accepted or replaced, so that what comes out is distributed as p.

    p         .5   .3   .2       the target
    q         .2   .7   .1       what the draft was drawn from
    min       .2   .3   .1       accepted: .6 in all
    p - q     .3    -   .1       recovered, with the .4 that is left: .75, 0, .25 of it
    sum       .5   .3   .2

`recovered_law` is from the bug museum. Numbers in the cases are sums of powers of two, so that floats are exact.
"""

from collections.abc import Mapping
from typing import Any

from minivllm.exercises.checking import Case, Exercise

CLOSE = 1e-9


def recovered_law(p: list[float], q: list[float]) -> list[float]:
    """What the token in a rejected draft's place is drawn from: max(p - q, 0) over its sum; p if nothing is left."""
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    total = sum(left)
    return [value / total for value in left] if total > 0 else list(p)


def is_law(got: Any, size: int) -> str | None:
    """Whether the answer is a list of that many numbers; else what it is instead."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of probabilities"
    if len(got) != size:
        return f"there are {size} tokens, but {len(got)} probabilities"
    odd = next((value for value in got if isinstance(value, bool) or not isinstance(value, int | float)), None)
    return None if odd is None else f"{odd!r} is no probability"


def judge_law(expected: list[float], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first token whose probability is wrong, and what p and q say about it."""
    p, q = inputs["p"], inputs["q"]
    why = is_law(got, len(p))
    if why:
        return why
    if all(abs(want - have) < CLOSE for want, have in zip(expected, got, strict=True)):
        return None
    if p == q:
        return f"p and q are equal, so nothing of p - q is left, and the answer is p itself; got {got}"
    if min(got) < 0:
        return f"token {got.index(min(got))} has the probability {min(got):.4g}: where q is larger than p it must be 0"
    if all(abs(max(a - b, 0.0) - have) < CLOSE for a, b, have in zip(p, q, got, strict=True)):
        return f"these are max(p - q, 0), but they sum to {sum(got):.4g}: divide by that"
    token = next(i for i, (want, have) in enumerate(zip(expected, got, strict=True)) if not abs(want - have) < CLOSE)
    want, have = expected[token], got[token]
    if want == 0:
        return (
            f"token {token} has p = {p[token]:.4g} and q = {q[token]:.4g}: accepted drafts alone bring it as often as "
            f"p asks, so in a rejected draft's place it must not come; got {have:.4g}"
        )
    return (
        f"token {token} lacks p - q = {p[token] - q[token]:.4g}, a share of {want:.4g} of what is missing in all; "
        f"got {have:.4g}"
    )


RECOVERED_LAW = Exercise(
    name="ps10.recovered_law",
    oracle=recovered_law,
    judge=judge_law,
    hint="accepted drafts bring min(p, q) of each token; what is missing to p is max(p - q, 0)",
    cases=(
        Case(([0.5, 0.3, 0.2], [0.2, 0.7, 0.1]), hint="missing: .3 of token 0 and .1 of token 2, so .75, 0 and .25"),
        Case(([0.25, 0.75], [0.75, 0.25]), hint="only token 1 lacks anything"),
        Case(([0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.5, 0.25]), hint="missing: .375 and .125"),
        Case(([0.5, 0.3, 0.2], [0.0, 1.0, 0.0]), hidden=True, hint="a draft that was not drawn: q is 1 at it"),
        Case(([0.0, 0.5, 0.5], [1.0, 0.0, 0.0]), hidden=True, hint="p and q share no token: the answer is p"),
        Case(([0.5, 0.5], [0.5, 0.5]), hidden=True, hint="equal: nothing is missing, and 0 / 0 is no probability"),
        Case(([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]), hidden=True, hint="equal and one-hot"),
        Case(([0.5, 0.0, 0.5], [0.25, 0.5, 0.25]), hidden=True, hint="a token that p never gives must not come"),
        Case(([1.0, 0.0], [0.5, 0.5]), hidden=True),
    ),
)


def verify_sampled(
    p: list[list[float]], q: list[list[float]], drafts: list[int], u_accept: list[float], u_draw: list[float]
) -> list[int]:
    """Emitted tokens: drafts while they are accepted, then one drawn from the recovered law, or the bonus from p."""
    emitted = []
    for j, draft in enumerate(drafts):
        if q[j][draft] > 0 and u_accept[j] * q[j][draft] < p[j][draft]:
            emitted.append(draft)
            continue
        return [*emitted, draw(recovered_law(p[j], q[j]), u_draw[j])]
    return [*emitted, draw(p[-1], u_draw[-1])]


def draw(law: list[float], u: float) -> int:
    """The first token at which the running sum is above u."""
    total = 0.0
    for token, probability in enumerate(law):
        total += probability
        if total > u:
            return token
    return max(token for token, probability in enumerate(law) if probability > 0)


def judge_sample(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Say of the first wrong place what should have happened there, with its numbers."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of tokens"
    if got == expected:
        return None
    drafts, p, q = inputs["drafts"], inputs["p"], inputs["q"]
    end, shorter = len(expected) - 1, min(len(expected), len(got))
    place = next((j for j in range(shorter) if expected[j] != got[j]), shorter)
    if end == len(drafts) and place == end:
        return f"all drafts are accepted, so a bonus token is drawn from the last row of p: {expected[end]}"
    if end == len(drafts) and place > end:
        return f"there are {len(drafts)} drafts, so at most {end + 1} tokens, not {len(got)}"
    at = min(place, end)
    d = drafts[at]
    numbers = f"u q(d) = {inputs['u_accept'][at]:.4g} x {q[at][d]:.4g} and p(d) = {p[at][d]:.4g}"
    if at < end:
        return f"draft {at} (token {d}) is accepted: {numbers}"
    why = "q(d) = 0, so it cannot have been drawn" if q[at][d] == 0 else numbers
    law = [round(probability, 4) for probability in recovered_law(p[at], q[at])]
    return (
        f"draft {at} (token {d}) is rejected: {why}. In its place comes token {expected[at]}, drawn by u = "
        f"{inputs['u_draw'][at]:.4g} from {law}, and there it ends"
    )


_P, _Q = [0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.125, 0.125]
_ONE_HOT = [0.0, 1.0, 0.0, 0.0]
VERIFY_SAMPLED = Exercise(
    name="ps10.verify_sampled",
    oracle=verify_sampled,
    judge=judge_sample,
    hint="accept d if q(d) > 0 and u q(d) < p(d); else draw once from the recovered law and stop",
    cases=(
        Case(([_P, _P], [_Q], [1], [0.25], [0.0, 0.6]), hint="u q(d) = .125 < .25: accepted, then the bonus"),
        Case(([_P, _P], [_Q], [1], [0.75], [0.5, 0.6]), hint="u q(d) = .375 is not below .25: recovered"),
        Case(([_P] * 3, [_Q] * 2, [0, 2], [0.9, 0.9], [0.0, 0.0, 0.99]), hint="where p > q a draft is always accepted"),
        Case(([_P] * 3, [_Q] * 2, [1, 0], [0.9, 0.0], [0.9, 0.0, 0.0]), hint="the second draft is void"),
        Case(([_P, _P], [_Q], [3], [0.0], [0.0, 0.0]), hidden=True, hint="u = 0 and p(d) = 0: 0 is not below 0"),
        Case(([_P, _P], [[0.5, 0.0, 0.5, 0.0]], [1], [0.0], [0.0, 0.9]), hidden=True, hint="q(d) = 0: never drawn"),
        Case(([_P, _P], [_Q], [1], [0.5], [0.999, 0.0]), hidden=True, hint="u q(d) = p(d) exactly: not below"),
        Case(([_P, _P], [_ONE_HOT], [1], [0.25], [0.3, 0.5]), hidden=True, hint="one-hot: accepted with p(d) = .25"),
        Case(([_P, _P], [_ONE_HOT], [1], [0.26], [0.7, 0.5]), hidden=True, hint="one-hot: recovered from p without d"),
        Case(([_P], [], [], [], [0.6]), hidden=True, hint="no drafts: the bonus token is the ordinary sample"),
        Case(([_P, _P], [_P], [0], [0.999], [0.0, 0.8]), hidden=True, hint="q = p: every draft is accepted"),
        Case(([_P, _P], [_Q], [1], [0.75], [0.0, 0.6]), hidden=True, hint="u = 0 draws the first token that can come"),
        Case(([[0.0, 0.5, 0.5, 0.0]] * 2, [_Q], [0], [0.0], [0.0, 0.0]), hidden=True, hint="never token 0: p is 0"),
    ),
)
