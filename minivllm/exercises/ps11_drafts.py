"""Set 11, drafts: where the passes write, what the next step reads, how acceptance is counted.

`pass_positions` and `next_reads` are from the bug museum. k = 3, five tokens known:

    passes at positions    3    4    5          3 is that of the newest hidden state; 4 and 5 hold drafts
    next step reads        t4   d5   d6   d7    at positions 4 .. 7; draft_token_ids is [d5 d6 d7]
"""

from collections.abc import Mapping
from typing import Any

from minivllm.exercises.checking import Case, Exercise, plural

CLOSE = 1e-9


def pass_positions(known: int, k: int, max_model_len: int) -> list[int]:
    """Position of the last row of each pass, for a request with `known` tokens, the newest not computed yet."""
    room = max_model_len - 1 - known
    return [known - 2 + index for index in range(min(k, max(room, 0)))]


def judge_positions(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Say which slot a wrong pass would write, or how many passes there are."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of positions"
    if got == expected:
        return None
    known, k, longest = (inputs[name] for name in ("known", "k", "max_model_len"))
    for number, (want, have) in enumerate(zip(expected, got, strict=False), 1):
        if type(have) is not int or want != have:
            if number > 1 and have == got[0]:
                return (
                    f"pass {number} reads at position {want}, not at {have} again: there it would overwrite what pass "
                    f"1 has stored of an accepted token"
                )
            return f"pass {number} reads at position {want}: that of its hidden state; got {have!r}"
    room = max(longest - 1 - known, 0)
    return (
        f"{plural(known, 'token')} known and max_model_len {longest}: a draft leaves room for one token after it, so "
        f"{plural(room, 'draft')} would fit, and k = {k}: number of passes {len(expected)}, got {len(got)}"
    )


PASS_POSITIONS = Exercise(
    name="ps11.pass_positions",
    oracle=pass_positions,
    judge=judge_positions,
    hint="pass 1 ends at known - 2; each pass goes one further; at most max_model_len - 1 - known of them",
    cases=(
        Case((5, 3, 64), hint="t4 is the newest of 5 tokens: passes at 3, 4 and 5"),
        Case((7, 3, 64), hint="d5 x6 were emitted: passes at 5, 6 and 7"),
        Case((5, 1, 64), hint="one draft"),
        Case((2, 2, 64), hint="a prompt of one token and its answer: pass 1 at position 0"),
        Case((5, 3, 8), hidden=True, hint="room for 8 tokens: drafts at positions 5 and 6, the token after them at 7"),
        Case((7, 3, 8), hidden=True, hint="no draft fits: the next token is the last one"),
        Case((8, 3, 8), hidden=True, hint="the text is full"),
        Case((5, 0, 64), hidden=True, hint="k = 0"),
        Case((5, 3, 9), hidden=True, hint="just enough room"),
    ),
)


def next_reads(emitted: list[int], guesses: list[int], room: int) -> tuple[list[int], list[int]]:
    """(ids that the next step reads, draft_token_ids sent with it), with room for so many drafts."""
    drafts = guesses[:room]
    return [emitted[-1], *drafts], drafts


def judge_reads(expected: tuple[list[int], list[int]], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Drafts first, since what is read follows from them."""
    if not isinstance(got, tuple) or len(got) != 2 or not all(isinstance(part, list) for part in got):
        return f"the answer is a {type(got).__name__}, not the pair (reads, drafts) of two lists"
    if got == expected:
        return None
    (reads, drafts), (want_reads, want_drafts) = got, expected
    newest, room = inputs["emitted"][-1], inputs["room"]
    if drafts != want_drafts:
        if drafts and drafts[0] == newest and drafts[1:] == want_drafts[: len(drafts) - 1]:
            return f"{newest} was emitted by the target itself: it is known, and not a draft to verify"
        if drafts[: len(want_drafts)] == want_drafts:
            return f"there is room for {plural(room, 'draft')}, not for {len(drafts)}"
        return f"drafts are the first of the layer's guesses, at most {room}: {want_drafts}; got {drafts}"
    if len(reads) == len(want_reads) + 1 and reads[-len(want_reads) :] == want_reads:
        return f"{reads[0]} was read by a step before: the next one begins with the newest token, {newest}"
    return f"the step reads the newest token, {newest}, and then the drafts: {want_reads}; got {reads}"


NEXT_READS = Exercise(
    name="ps11.next_reads",
    oracle=next_reads,
    judge=judge_reads,
    hint="drafts are guesses and nothing else; the step reads the newest emitted token in front of them",
    cases=(
        Case(([104], [205, 206, 207], 3), hint="after a prompt: t4 is read first, the three guesses are the drafts"),
        Case(([205, 306], [207, 208, 209], 3), hint="two tokens were emitted; the newest is 306"),
        Case(([205, 206, 207, 308], [209, 210, 211], 3), hint="a bonus token is emitted like any other"),
        Case(([104], [205, 206, 207], 2), hint="the budget has room for two drafts"),
        Case(([104], [], 3), hidden=True, hint="no guesses: a plain decode"),
        Case(([104], [205, 206], 0), hidden=True, hint="no room for drafts: a plain decode"),
        Case(([104], [104, 104], 2), hidden=True, hint="a guess may be equal to the newest token and is a draft still"),
        Case(([7, 7, 7], [7, 8], 1), hidden=True),
    ),
)


def acceptance(steps: list[tuple[int, int]]) -> tuple[list[float], float]:
    """(share of draft 1, 2, ... accepted where it was reached, tokens a step) of steps (drafts sent, accepted)."""
    shares = []
    for index in range(max((sent for sent, _ in steps), default=0)):
        reached, right = count(steps, index)
        shares.append(right / reached if reached else 0.0)
    return shares, sum(accepted + 1 for _, accepted in steps) / len(steps) if steps else 0.0


def count(steps: list[tuple[int, int]], index: int) -> tuple[int, int]:
    """Steps that had this draft with all before it accepted, and those of them that accepted it, too."""
    reached = sum(sent > index and accepted >= index for sent, accepted in steps)
    return reached, sum(accepted > index for _, accepted in steps)


def judge_acceptance(expected: tuple[list[float], float], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first share that is wrong with its two counts."""
    if not isinstance(got, tuple) or len(got) != 2 or not isinstance(got[0], list):
        return f"the answer is a {type(got).__name__}, not the pair (shares, tokens a step)"
    shares, tokens = got
    for value in (*shares, tokens):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{value!r} is no number"
    if len(shares) != len(expected[0]):
        return f"no step had more than {plural(len(expected[0]), 'draft')}: a share for each of them; got {len(shares)}"
    for index, (want, have) in enumerate(zip(expected[0], shares, strict=True)):
        if not abs(want - have) < CLOSE:
            reached, right = count(inputs["steps"], index)
            return (
                f"draft {index + 1} was looked at in {plural(reached, 'step')} (it was sent, and those before it were "
                f"accepted) and was right in {right}; got {have:.4g}"
            )
    if not abs(expected[1] - tokens) < CLOSE:
        return f"a step emits its accepted drafts and one token more: {expected[1]:.4g} on average; got {tokens:.4g}"
    return None


ACCEPTANCE = Exercise(
    name="ps11.acceptance",
    oracle=acceptance,
    judge=judge_acceptance,
    hint="draft j counts in a step if it was sent and j - 1 drafts were accepted; one token more than drafts comes out",
    cases=(
        Case(([(2, 2), (2, 1), (2, 0), (2, 2)],), hint="draft 1: 3 of 4; draft 2: 2 of those 3"),
        Case(([(3, 3), (3, 0)],), hint="draft 2 was looked at once, and was right"),
        Case(([(1, 1), (1, 0), (1, 1), (1, 1)],), hint="k = 1: 3 of 4, and 1.75 tokens a step"),
        Case(([(3, 1), (1, 1), (2, 2)],), hidden=True, hint="some steps had fewer drafts"),
        Case(([(3, 0), (3, 0)],), hidden=True, hint="draft 2 was never reached: 0.0"),
        Case(([(2, 2), (0, 0), (2, 1)],), hidden=True, hint="a step without drafts emits one token"),
        Case(([],), hidden=True, hint="no steps"),
        Case(([(0, 0)],), hidden=True, hint="no drafts at all"),
        Case(([(4, 4), (4, 3), (4, 2), (4, 4), (4, 1)],), hidden=True),
    ),
)
