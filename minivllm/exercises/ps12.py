"""Set 12, pipeline parallelism: what a stage holds, what it is told, and what it makes of it.

    stage 0            embedding, its layers          told: new_token_ids, num_computed_tokens, new blocks
    stage 1 ...        its layers                     told the same
    the last stage     its layers, head, sampler      told the same, but has its own samples

Here are the layers of each stage (`layers_per_stage`) and a stage's own copy of a request (`apply_message`). Bytes on
the links and the batches in flight are in ps12_step.py (`traffic`, `next_batch`), the two pieces from the bug museum
in ps12_museum.py (`new_token_ids`, `engine_step`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from minivllm.exercises.checking import Case, Exercise, plural
from minivllm.exercises.ps12_museum import ENGINE_STEP, NEW_TOKEN_IDS
from minivllm.exercises.ps12_step import NEXT_BATCH, TRAFFIC


def layers_per_stage(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each stage gets; those left over go to the stages before the last, back to front."""
    share, rest = divmod(num_layers, num_stages)
    counts = [share] * num_stages
    for stage in range(num_stages - 1 - rest, num_stages - 1):
        counts[stage] += 1
    return counts


def judge_layers(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Layers may be missing, uneven, or in the wrong place."""
    if not isinstance(got, list) or not all(type(count) is int for count in got):
        return f"the answer is {got!r}, not a list of whole numbers, one for each stage"
    if got == expected:
        return None
    num_layers, num_stages = inputs["num_layers"], inputs["num_stages"]
    if len(got) != num_stages:
        return f"there are {plural(num_stages, 'stage')}, but the list has {plural(len(got), 'number')}"
    if sum(got) != num_layers:
        return f"the model has {plural(num_layers, 'layer')}, but the stages hold {sum(got)} together"
    if min(got) < 1:
        return f"stage {got.index(min(got))} has no layer: every stage needs one"
    if max(got) - min(got) > 1:
        return f"the stages hold between {min(got)} and {max(got)} layers; as even as can be, they differ by 1 at most"
    share, rest = divmod(num_layers, num_stages)
    if got[-1] > share:
        return f"the last stage has the head to compute as well, so it gets no layer on top: {share}, got {got[-1]}"
    first = num_stages - 1 - rest
    return (
        f"{plural(rest, 'layer')} left over: one each for the stages before the last, back to front, so from stage "
        f"{num_stages - 2} back to stage {first}"
    )


LAYERS_PER_STAGE = Exercise(
    name="ps12.layers_per_stage",
    oracle=layers_per_stage,
    judge=judge_layers,
    hint="divmod gives the share and the rest; the rest goes to stages num_stages - 2, num_stages - 3, …",
    cases=(
        Case((6, 3), hint="it divides: two layers each"),
        Case((6, 4), hint="one each, and the two left over go to stages 2 and 1"),
        Case((61, 8), hint="seven each, and five left over, for stages 6, 5, 4, 3 and 2"),
        Case((7, 2), hidden=True, hint="with two stages the one before the last is the first"),
        Case((11, 4), hidden=True, hint="three left over: all stages but the last get one, the first, too"),
        Case((9, 4), hidden=True, hint="one left over goes to stage 2, the one before the last"),
        Case((5, 5), hidden=True, hint="one layer each"),
        Case((4, 1), hidden=True, hint="a model in one piece"),
    ),
)


class StageCopy(NamedTuple):
    """A stage's own copy of one request."""

    token_ids: list[int]
    """Prompt and accepted outputs, as far as the stage has been told."""
    block_ids: list[int]
    """Its block table."""
    num_computed: int
    """Tokens whose K and V are in the cache when the step begins."""


class News(NamedTuple):
    """What a message says of one request that the stage knows."""

    num_computed: int
    new_token_ids: list[int]
    new_block_ids: list[int]
    is_resumed: bool
    """It comes back from a preemption: its old blocks belong to others now, and these are all it has."""


def apply_message(copy: StageCopy, news: News) -> StageCopy:
    """The stage's copy once the message has been applied."""
    blocks = news.new_block_ids if news.is_resumed else copy.block_ids + news.new_block_ids
    return StageCopy(copy.token_ids + news.new_token_ids, blocks, news.num_computed)


def judge_copy(expected: StageCopy, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Tokens, blocks, counter: the first one that differs from the scheduler's."""
    if not isinstance(got, tuple) or len(got) != 3:
        return f"the answer is a {type(got).__name__}, not a StageCopy(token_ids, block_ids, num_computed)"
    tokens, blocks, num_computed = got
    copy, news = inputs["copy"], inputs["news"]
    if not isinstance(tokens, list) or not isinstance(blocks, list) or type(num_computed) is not int:
        return "token_ids and block_ids are lists, num_computed is an int"
    if tokens != expected.token_ids:
        if tokens == copy.token_ids:
            return f"the stage has not taken up new_token_ids: {news.new_token_ids} belong behind what it knows"
        if len(tokens) < len(copy.token_ids):
            return "tokens were lost; a preempted request keeps its outputs, and a rejected draft was never sent"
        return f"token_ids is {tokens}; all of new_token_ids, in order, belong behind what it knows"
    if blocks != expected.block_ids:
        if news.is_resumed:
            return f"it is resumed, so its old table is void and {news.new_block_ids} are all its blocks; got {blocks}"
        return f"new blocks go to the end of its table: {expected.block_ids}, got {blocks}"
    if num_computed != expected.num_computed:
        return (
            f"num_computed comes anew with each message, {news.num_computed}; nothing is added to it or worked out "
            f"from it; got {num_computed}"
        )
    return None


APPLY_MESSAGE = Exercise(
    name="ps12.apply_message",
    oracle=apply_message,
    judge=judge_copy,
    hint="tokens are appended, blocks are appended or (resumed) replaced, the counter is taken as it comes",
    cases=(
        Case((StageCopy([5, 6, 7], [3], 0), News(3, [8], [], False)), hint="the first decode: token 8 was sampled"),
        Case((StageCopy([5, 6, 7, 8], [3], 3), News(4, [9], [7], False)), hint="a decode that opens block 7"),
        Case((StageCopy([5, 6, 7, 8], [3], 3), News(6, [9, 4, 1], [], False)), hint="two drafts were accepted"),
        Case(
            (StageCopy([5] * 10, [3, 1], 0), News(4, [], [], False)),
            hidden=True,
            hint="a chunk of the prompt: no news, and the counter moves",
        ),
        Case(
            (StageCopy([5, 6, 7, 8], [3, 2], 3), News(4, [9], [], False)),
            hidden=True,
            hint="three drafts were rejected: the counter moves by one, wherever the step had ended",
        ),
        Case(
            (StageCopy([5, 6, 7, 8], [3], 3), News(0, [], [9, 2], True)),
            hidden=True,
            hint="resumed: a new table, the old tokens, and everything to be computed again",
        ),
        Case(
            (StageCopy([5, 6, 7, 8], [3, 4], 3), News(4, [9], [6, 2], True)),
            hidden=True,
            hint="resumed with a prefix hit, and with a token that was on its way when it was preempted",
        ),
        Case((StageCopy([5], [3], 0), News(0, [], [], False)), hidden=True, hint="nothing new at all"),
    ),
)

EXERCISES = (LAYERS_PER_STAGE, APPLY_MESSAGE, TRAFFIC, NEXT_BATCH, NEW_TOKEN_IDS, ENGINE_STEP)
