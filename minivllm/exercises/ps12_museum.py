"""The bug museum of set 12: what a stage is told, and when the engine waits.

all_token_ids   |--- known to the stage ---|--- new_token_ids ---|
                0                      num_known             num_tokens

engine step     submit, submit, …  while there is room and something to plan;  then collect the oldest
"""

from collections.abc import Mapping
from typing import Any

from minivllm.exercises.checking import Case, Exercise, plural


def new_token_ids(
    all_token_ids: list[int], num_known: int, num_computed: int, num_scheduled: int, num_drafts: int
) -> list[int]:
    """What a stage appends to its copy, so that it has all token ids of the request."""
    return all_token_ids[num_known:]


def judge_tokens(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Say which tokens the stage lacks from now on, or has twice."""
    if not isinstance(got, list):
        return f"the answer is a {type(got).__name__} ({got!r}), not a list of token ids"
    if got == expected:
        return None
    num_known, num_tokens = inputs["num_known"], len(inputs["all_token_ids"])
    lost = [token for token in expected if token not in got]
    if lost:
        it, them = ("is", "it") if len(lost) == 1 else ("are", "them")
        return (
            f"the stage knows {plural(num_known, 'token')}, the scheduler {num_tokens}: {lost} {it} lost, and no later "
            f"message brings {them}"
        )
    if not expected:
        return f"the stage knows all {plural(num_tokens, 'token')} already; with {got} it would have tokens twice"
    return f"positions {num_known} to {num_tokens - 1}, in order, are news: {expected}"


NEW_TOKEN_IDS = Exercise(
    name="ps12.new_token_ids",
    oracle=new_token_ids,
    judge=judge_tokens,
    hint="what the stage lacks depends on what it knows and on nothing else",
    cases=(
        Case(([*range(10, 21)], 10, 10, 1, 0), hint="the first decode: one token was sampled"),
        Case(([*range(10, 20)], 10, 4, 4, 0), hint="a chunk of a prompt: the stage had all of it at once"),
        Case(([*range(10, 24)], 11, 13, 3, 2), hint="two drafts were accepted in the last step, and one token sampled"),
        Case(([*range(10, 18)], 7, 0, 8, 0), hint="resumed: it knows two of three outputs"),
        Case(([*range(10, 18)], 7, 0, 4, 0), hidden=True, hint="resumed in chunks: the chunk ends before the news"),
        Case(([*range(10, 30)], 16, 16, 4, 0), hidden=True, hint="several tokens at once, none of them a draft"),
        Case(([*range(10, 24)], 13, 13, 4, 3), hidden=True, hint="all drafts rejected, the next ones scheduled"),
        Case(([*range(10, 24)], 9, 13, 1, 0), hidden=True, hint="four drafts accepted, none scheduled now"),
        Case(([*range(10, 15)], 5, 3, 2, 0), hidden=True, hint="the last chunk: nothing sampled yet"),
    ),
)


def engine_step(num_in_flight: int, max_in_flight: int, num_ready: int) -> list[str]:
    """What the engine does in one step: "submit" for each batch that it sends off, "collect" to wait for a result."""
    num_new = min(max_in_flight - num_in_flight, num_ready)
    return ["submit"] * num_new + ["collect"] * (num_in_flight + num_new > 0)


def judge_actions(expected: list[str], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Too few batches, too many, in the wrong order, or waiting for what was never sent."""
    if not isinstance(got, list) or not all(action in ("submit", "collect") for action in got):
        return f'the answer is {got!r}, not a list of "submit" and "collect"'
    if got == expected:
        return None
    in_flight, most, ready = inputs["num_in_flight"], inputs["max_in_flight"], inputs["num_ready"]
    num_submitted, num_wanted = got.count("submit"), expected.count("submit")
    if num_submitted > ready:
        return f"batches submitted: {num_submitted}, but only {ready} can be planned"
    if num_submitted > num_wanted:
        return f"{in_flight} in flight and {num_submitted} more are over the {most} that are allowed"
    if num_submitted < num_wanted:
        return (
            f"{in_flight} of {most} places are taken and batches to be planned are {ready}, so {num_wanted} "
            f"should be submitted before anything is waited for; got {num_submitted}"
        )
    if not expected:
        return "nothing is in flight and nothing can be planned: waiting for a result would never end"
    if got.count("collect") != 1:
        return f'one result is collected a step, the oldest; "collect" stands {got.count("collect")} times'
    return "it waits before the queue is full: filling comes first, then the oldest is collected"


ENGINE_STEP = Exercise(
    name="ps12.engine_step",
    oracle=engine_step,
    judge=judge_actions,
    hint='first as many "submit" as there is room and work for, then one "collect" if anything is in flight',
    cases=(
        Case((0, 3, 3), hint="three stages, nothing in flight: fill the queue"),
        Case((2, 3, 1), hint="one place is free and one batch can be planned"),
        Case((3, 3, 5), hint="the queue is full"),
        Case((0, 3, 1), hidden=True, hint="one batch is all there is"),
        Case((2, 3, 0), hidden=True, hint="everybody's token is on its way: wait for the oldest"),
        Case((0, 3, 0), hidden=True, hint="no requests at all"),
        Case((0, 1, 4), hidden=True, hint="a single stage: one batch at a time"),
        Case((1, 4, 2), hidden=True, hint="two more, and a place stays free"),
    ),
)
