"""Set 9, the scheduler: who is computed in a step, with how many tokens, and what becomes of the results.

One rule says how many tokens a request gets (`num_new_tokens`), another which of its drafts are among them
(`scheduled_drafts`), and when the step has run, its tokens are booked (`book_tokens`). One request, as they see it:

    0          computed      num_tokens      num_tokens + drafts
    |--- in cache ---|-- to compute --|--- drafts to verify ---|
                     |<---- n tokens, as the limits allow ---->|

The step as a whole is in ps09_step.py (`plan_step`), the two pieces from the bug museum are in ps09_victims.py
(`choose_victim`, `withdraw`).
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

from minivllm.exercises.checking import Case, Exercise, plural
from minivllm.exercises.ps09_step import PLAN_STEP
from minivllm.exercises.ps09_victims import CHOOSE_VICTIM, WITHDRAW


def num_new_tokens(
    num_tokens: int, num_drafts: int, num_computed: int, budget: int, threshold: int, max_model_len: int
) -> int:
    """How many tokens of a running request the step computes; 0 if it sits the step out."""
    wanted = num_tokens + num_drafts - num_computed
    if 0 < threshold < wanted:
        wanted = threshold
    return max(0, min(wanted, budget, max_model_len - 1 - num_computed))


def judge_count(expected: int, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare two counts, and name the limit that was missed."""
    if type(got) is not int:
        return f"the answer is a {type(got).__name__} ({got!r}); tokens are counted, so it must be an int"
    if got == expected:
        return None
    wanted = inputs["num_tokens"] + inputs["num_drafts"] - inputs["num_computed"]
    budget, threshold, max_model_len = inputs["budget"], inputs["threshold"], inputs["max_model_len"]
    room = max_model_len - 1 - inputs["num_computed"]
    if got < 0:
        return f"a count cannot be negative: {wanted} tokens are left to compute, so the request sits this step out (0)"
    if got > room:
        return (
            f"the last position of a request of max_model_len = {max_model_len} tokens, {max_model_len - 1}, is never "
            f"computed, since no token may follow it: {plural(room, 'token')} at most, got {got}"
        )
    if got > budget:
        return f"the step has {plural(budget, 'token')} left in its budget, got {got}"
    if threshold == 0 and got == 0:
        return "a threshold of 0 means that there is none"
    if 0 < threshold < got:
        return f"no request takes more than the threshold of {threshold} tokens in one step, got {got}"
    return (
        f"{plural(wanted, 'token')} of it (drafts included) are not in the cache yet, and the limits allow {expected} "
        f"of them: budget {budget}, threshold {threshold or 'none'}, length {room}"
    )


NUM_NEW_TOKENS = Exercise(
    name="ps09.num_new_tokens",
    oracle=num_new_tokens,
    judge=judge_count,
    hint="first what is missing, num_tokens + num_drafts - num_computed, then the smallest of the limits, then 0",
    cases=(
        Case((12, 0, 0, 100, 0, 128), hint="a fresh prompt: nothing is in the cache, all of it is to be computed"),
        Case((11, 0, 10, 100, 0, 128), hint="a decode: all but the newest token is in the cache"),
        Case((11, 3, 10, 100, 0, 128), hint="a decode with three drafts to verify computes four tokens"),
        Case((100, 0, 40, 30, 0, 128), hint="60 tokens are missing, the budget has room for 30: a chunk"),
        Case((100, 0, 0, 64, 16, 128), hint="a threshold of 16 leaves budget for others"),
        Case((11, 3, 10, 2, 0, 128), hidden=True, hint="the budget cuts drafts like any other token"),
        Case((11, 3, 10, 1, 0, 128), hidden=True, hint="a budget of one token: a plain decode"),
        Case((11, 3, 10, 100, 0, 13), hidden=True, hint="max_model_len 13: position 12 is the last, never computed"),
        Case((11, 3, 10, 100, 0, 12), hidden=True, hint="max_model_len 12: position 10 and no other"),
        Case((11, 0, 11, 100, 0, 128), hidden=True, hint="its newest token is still on its way: nothing to compute"),
        Case((11, 0, 14, 100, 0, 128), hidden=True, hint="three drafts are being verified: less than nothing to do"),
        Case((11, 3, 10, 100, 2, 128), hidden=True, hint="the threshold cuts drafts, too"),
        Case((5, 0, 0, 100, 8, 128), hidden=True, hint="a threshold is a limit, not a size"),
        Case((40, 0, 8, 0, 16, 128), hidden=True, hint="no budget, no tokens"),
        *(
            Case((num_tokens, num_drafts, num_computed, budget, threshold, 12), hidden=True)
            for num_tokens, num_drafts, num_computed, budget, threshold in product(
                (5, 11), (0, 3), (0, 4, 11), (1, 6), (0, 2)
            )
        ),
    ),
)


def scheduled_drafts(num_tokens: int, num_computed: int, n: int, drafts: list[int]) -> list[int]:
    """The drafts among the n tokens from num_computed on."""
    return drafts[: max(0, n + num_computed - num_tokens)]


def judge_drafts(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Say where the step ends, seen from the newest known token."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__}, not a list of drafts"
    if got == expected:
        return None
    num_tokens, end = inputs["num_tokens"], inputs["num_computed"] + inputs["n"]
    where = f"the step computes positions {inputs['num_computed']} to {end - 1}, and position {num_tokens - 1} is the"
    if end < num_tokens:
        return (
            f"{where} newest known token: the step ends before it, so no draft is among them (s = {end - num_tokens})"
        )
    if end == num_tokens:
        return f"{where} newest known token: the step ends with it, so no draft is among them (s = 0)"
    s = end - num_tokens
    return f"{where} newest known token: {plural(s, 'draft')} after it belong to the step, the first ones, in order"


SCHEDULED_DRAFTS = Exercise(
    name="ps09.scheduled_drafts",
    oracle=scheduled_drafts,
    judge=judge_drafts,
    hint="s = n + num_computed - num_tokens tokens of the step lie behind the newest known token; s may be negative",
    cases=(
        Case((11, 10, 4, [5, 6, 7]), hint="the newest token and all three drafts"),
        Case((11, 10, 2, [5, 6, 7]), hint="the newest token comes first, and then there is room for one draft"),
        Case((11, 10, 1, [5, 6, 7]), hint="only the newest token: a plain decode"),
        Case((100, 40, 30, [5, 6, 7]), hint="a chunk in the middle of a prompt reaches no draft"),
        Case((100, 68, 30, [5, 6, 7]), hidden=True, hint="the chunk ends two tokens before the end: s = -2"),
        Case((100, 69, 30, [5, 6, 7]), hidden=True, hint="s = -1: what does drafts[:-1] mean?"),
        Case((100, 70, 30, [5, 6, 7]), hidden=True, hint="the last chunk ends exactly with the prompt"),
        Case((12, 10, 3, [5, 6]), hidden=True, hint="two known tokens are to be computed before the first draft"),
        Case((11, 10, 1, []), hidden=True, hint="no drafts: an empty list"),
        Case((14, 0, 14, [8]), hidden=True, hint="a preempted request computes all its tokens again, and no draft"),
        *(
            Case((9, num_computed, n, [5, 6, 7]), hidden=True)
            for num_computed, n in product((4, 7, 8), range(1, 5))
            if num_computed + n <= 12
        ),
    ),
)


def book_tokens(
    num_computed: int,
    output_ids: list[int],
    drafts: list[int],
    sampled: list[int],
    eos_id: int,
    min_tokens: int,
    max_tokens: int,
) -> tuple[int, list[int], str | None]:
    """(num_computed, output_ids, reason) of a request after its step: what came back is settled."""
    if drafts:
        num_computed -= len(drafts) + 1 - len(sampled)
    output_ids = list(output_ids)
    for token in sampled:
        output_ids.append(token)
        if token == eos_id and len(output_ids) >= min_tokens:
            return num_computed, output_ids, "stop"
        if len(output_ids) >= max_tokens:
            return num_computed, output_ids, "length"
    return num_computed, output_ids, None


def judge_booking(expected: tuple, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Counters first, then tokens, then the reason."""
    if not isinstance(got, tuple) or len(got) != 3:
        return f"the answer is a {type(got).__name__}, not the tuple (num_computed, output_ids, reason)"
    drafts, sampled = inputs["drafts"], inputs["sampled"]
    (num_computed, output_ids, reason), (got_computed, got_ids, got_reason) = expected, got
    if got_computed != num_computed:
        if not drafts:
            return f"no drafts were scheduled, so none was rejected: num_computed stays {num_computed}"
        rejected = len(drafts) + 1 - len(sampled)
        return (
            f"{plural(len(drafts), 'draft')} went out and {plural(len(sampled), 'token')} came back, the last of which "
            f"is no draft: {rejected} rejected, so num_computed is {inputs['num_computed']} - {rejected} = "
            f"{num_computed}, got {got_computed}"
        )
    if got_ids != output_ids:
        count = len(output_ids)
        if reason is not None and isinstance(got_ids, list) and got_ids[:count] == output_ids:
            return f"the request ends with output {count} (token {output_ids[-1]}); what follows it is dropped"
        return f"output_ids should be {output_ids}: a token ends the request only where the rules say so"
    if got_reason != reason:
        asked = f"eos_id {inputs['eos_id']}, min_tokens {inputs['min_tokens']}, max_tokens {inputs['max_tokens']}"
        return f"with {plural(len(output_ids), 'output')} ({asked}) the reason is {reason!r}, got {got_reason!r}"
    return None


BOOK_TOKENS = Exercise(
    name="ps09.book_tokens",
    oracle=book_tokens,
    judge=judge_booking,
    hint="settle num_computed first (only if drafts went out), then append token by token and look after each",
    cases=(
        Case((11, [90], [], [7], 2, 0, 16), hint="a plain decode brings one token and moves no counter"),
        Case((14, [90], [5, 6, 7], [5, 9], 2, 0, 16), hint="one of three drafts was right, 9 stands for the second"),
        Case((14, [90], [5, 6, 7], [5, 6, 7, 8], 2, 0, 16), hint="all drafts were right: nothing is rejected"),
        Case((14, [90], [5, 6, 7], [5, 2, 7, 8], 2, 0, 16), hint="the request ends with the token 2, amid the drafts"),
        Case((14, [90], [5, 6, 7], [5, 6, 7, 8], 2, 0, 3), hidden=True, hint="max_tokens is reached amid the drafts"),
        Case((40, [], [], [], 2, 0, 16), hidden=True, hint="a chunk of a prompt brings no token, and rejects nothing"),
        Case((14, [90], [5, 6, 7], [9], 2, 0, 16), hidden=True, hint="no draft was right: three are rejected"),
        Case((11, [90], [], [2], 2, 3, 16), hidden=True, hint="before min_tokens outputs nothing stops a request"),
        Case((14, [90], [2, 2, 2], [2, 2, 2, 8], 2, 3, 16), hidden=True, hint="min_tokens is looked at for each token"),
        Case((11, [90], [], [2], 2, 0, 2), hidden=True, hint="a stop on the very last token is a stop"),
        Case((11, [90], [], [8], 2, 0, 2), hidden=True, hint="the last token that max_tokens allows"),
        Case(
            (12, [90], [2], [2, 8], 2, 3, 3), hidden=True, hint="the second output may not stop it, the third one must"
        ),
    ),
)

EXERCISES = (NUM_NEW_TOKENS, SCHEDULED_DRAFTS, PLAN_STEP, BOOK_TOKENS, CHOOSE_VICTIM, WITHDRAW)
