"""Set 8, experts: from a router's scores to rows in tiles. What happens to the rows afterwards is in ps08_layer.py.

Which experts does a token visit, and with what weights (`route`)? How are groups closed without opening others
(`choose_experts`)? How many pairs has each expert (`count_experts`), and where do they lie (`sort_pairs`)?

    ids             [2 0] [0 1] [2 0]              3 tokens, top_k = 2; pair p belongs to token p // top_k
    sorted          1:0  2:0  5:0 | 3:1 | 0:2  4:2
    tiles of 2      1 2 | 5 * | 3 * | 0 4          * = padding, pair number 6

Nothing here needs torch: a token is a list of scores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.exercises.checking import Case, Exercise
from minivllm.exercises.ps08_layer import COMBINE, MOE_SHARED_FAKE

INF = float("inf")


def best(values: Sequence[float], count: int) -> list[int]:
    """Indices of the highest values, the highest first, ties in order of index."""
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def group_scores(ranked: Sequence[float], num_groups: int) -> list[float]:
    """The sum of the two best of each group."""
    size = len(ranked) // num_groups
    return [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]


def choose_experts(ranked: list[float], num_groups: int, topk_group: int, top_k: int) -> list[int]:
    """The top_k best experts, the best first, among those of the topk_group best groups."""
    kept = best(group_scores(ranked, num_groups), topk_group)
    size = len(ranked) // num_groups
    return best([b if e // size in kept else -INF for e, b in enumerate(ranked)], top_k)


def route(
    scores: list[float], bias: list[float], num_groups: int, topk_group: int, top_k: int, scaling: float
) -> tuple[list[int], list[float]]:
    """One token's experts, the best first, and their weights: chosen with the bias, weighted without it."""
    ids = choose_experts([s + b for s, b in zip(scores, bias, strict=True)], num_groups, topk_group, top_k)
    total = sum(scores[e] for e in ids)
    return ids, [scaling * scores[e] / total for e in ids]


def short(values: Sequence[Any]) -> str:
    """Numbers to four digits, in brackets."""
    return "[" + ", ".join(f"{v:.4g}" if isinstance(v, int | float) else repr(v) for v in values) + "]"


def are_close(expected: Sequence[float], got: Any) -> bool:
    return (
        isinstance(got, list)
        and len(got) == len(expected)
        and all(isinstance(b, int | float) for b in got)
        and all(abs(a - b) <= 1e-6 * max(1, abs(a)) for a, b in zip(expected, got, strict=True))
    )


def judge_choice(
    expected: list[int], got: Any, ranked: Sequence[float], num_groups: int, topk_group: int
) -> str | None:
    """Whether the experts are right; else which rule was broken."""
    if not isinstance(got, list) or not all(isinstance(e, int) and 0 <= e < len(ranked) for e in got):
        return f"the experts are {got!r}, not a list of numbers from 0 to {len(ranked) - 1}"
    if got == expected:
        return None
    if len(got) != len(expected):
        return f"{len(expected)} experts are chosen, got {len(got)}"
    if len(set(got)) < len(got):
        return f"a token visits an expert once; got {got}"
    groups, size = group_scores(ranked, num_groups), len(ranked) // num_groups
    kept = best(groups, topk_group)
    outside = [e for e in got if e // size not in kept]
    if outside:
        e = outside[0]
        return (
            f"expert {e} (b = {ranked[e]:.4g}) lies in group {e // size}, which is out: "
            f"the groups score {short(groups)}, and {sorted(kept)} stay"
        )
    if sorted(got) == sorted(expected):
        return f"the right experts in another order: the highest b comes first, {expected}"
    wrong, right = next((b, a) for a, b in zip(expected, got, strict=True) if a != b)
    if ranked[wrong] == ranked[right]:
        return f"experts {right} and {wrong} are equally good (b = {ranked[right]:.4g}): the lower number goes first"
    return f"expert {right} (b = {ranked[right]:.4g}) is better than expert {wrong} (b = {ranked[wrong]:.4g})"


def judge_route(expected: tuple, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """The choice first; a wrong weight is recognised if it follows from a known mistake."""
    if not isinstance(got, tuple) or len(got) != 2:
        return f"the answer is a {type(got).__name__}, not the pair (ids, weights)"
    scores, scaling = inputs["scores"], inputs["scaling"]
    ranked = [s + b for s, b in zip(scores, inputs["bias"], strict=True)]
    ids, weights = expected
    why = judge_choice(ids, got[0], ranked, inputs["num_groups"], inputs["topk_group"])
    if why or are_close(weights, got[1]):
        return why
    total = sum(scores[e] for e in ids)
    why = f"experts {ids} have the scores {short([scores[e] for e in ids])}, so the weights are {short(weights)}"
    known = {
        "the bias is in your weights: they are made from s, not from b": [
            scaling * ranked[e] / sum(ranked[e] for e in ids) for e in ids
        ],
        "they are not divided by their sum": [scaling * scores[e] for e in ids],
        "the factor `scaling` is missing": [scores[e] / total for e in ids],
        "they are divided by the sum over all experts, not over the chosen": [
            scaling * scores[e] / sum(scores) for e in ids
        ],
    }
    reasons = [reason for reason, mistaken in known.items() if are_close(mistaken, got[1])]
    return f"{why}; {reasons[0]}" if reasons else f"{why}; got {got[1]!r}"


_S = [0.95, 0.10, 0.60, 0.50, 0.80, 0.20, 0.30, 0.40]
_NONE = [0.0] * 8

ROUTE = Exercise(
    name="ps08.route",
    oracle=route,
    judge=judge_route,
    hint="b = s + bias ranks groups and experts; weights are s of the chosen, divided by their sum, times scaling",
    cases=(
        Case((_S, _NONE, 4, 2, 2, 2.5), hint="without a bias: groups 1 (1.1) and 0 (1.05) stay"),
        Case((_S, [0, 0, 0, 0, 0, 0.3, 0, 0], 4, 2, 2, 2.5), hint="the bias of expert 5 lifts group 2 to 1.3"),
        Case(
            (_S, [0, 0, 0.3, 0.3, 0, 0, 0, 0], 4, 2, 2, 2.5), hint="b of expert 2 is 0.9, but its weight uses s = 0.6"
        ),
        Case((_S, _NONE, 1, 1, 3, 1.0), hint="a single group: plain top 3"),
        Case(
            ([0.9, 0.8, 0.1, 0.1, 0.5, 0.6, 0.5, 0.4], _NONE, 2, 1, 2, 2.5),
            hint="groups of four: only the two best of each count for the group, 1.7 against 1.1",
        ),
        Case(
            (_S, [-1.0] * 8, 4, 2, 3, 2.5),
            hidden=True,
            hint="every b is negative here, and a group that is out must stay out: -inf, not 0",
        ),
        Case(([0.5] * 8, _NONE, 4, 2, 3, 1.0), hidden=True, hint="all are equal: groups 0 and 1, experts 0, 1, 2"),
        Case(
            ([0.2, 0.4, 0.3, 0.4], [0.0] * 4, 4, 3, 2, 2.0), hidden=True, hint="groups of one: their score is their b"
        ),
        Case((_S, _NONE, 4, 1, 2, 2.5), hidden=True, hint="one group stays, and both of its experts are chosen"),
        Case(
            ([0.9, 0.8, 0.1, 0.2], [-0.9, 0.0, 0.0, 0.5], 2, 1, 1, 3.0),
            hidden=True,
            hint="top 1: the weight is scaling",
        ),
    ),
)


def judge_experts(expected: list[int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    return judge_choice(expected, got, inputs["ranked"], inputs["num_groups"], inputs["topk_group"])


CHOOSE_EXPERTS = Exercise(
    name="ps08.choose_experts",
    oracle=choose_experts,
    judge=judge_experts,
    hint="the mark of a closed group must be lower than every b that can occur",
    cases=(
        Case(([0.3, -0.2, -0.1, -0.4], 2, 1, 2), hint="group 0 stays (0.1); its second expert is at -0.2"),
        Case(([0.95, 0.1, 0.6, 0.5, 0.8, 0.2, 0.3, 0.4], 4, 2, 2), hint="all positive: here 0 is low enough"),
        Case(([-0.1, -0.2, -0.9, -0.3], 2, 1, 1), hint="every b is negative"),
        Case(([0.5, -0.5, 0.1, 0.2, -0.3, 0.4], 3, 2, 4), hidden=True, hint="all four experts of the two groups"),
        Case(([-0.6, -0.6, -0.6, -0.6], 2, 1, 2), hidden=True, hint="equal and negative: the lower numbers"),
        Case(([-0.3, -0.2, 0.5, -0.9], 2, 1, 2), hidden=True, hint="the lowest b of all may lie in a group that stays"),
        Case(([-1.5, -2.5, -3.0, -1.2], 2, 1, 2), hidden=True, hint="-1 isn't low enough either"),
        Case(([-2e9, -1e9, -3e9, -3e9], 2, 1, 2), hidden=True, hint="no finite number is low enough for certain"),
    ),
)


def count_experts(ids: list[list[int]], num_experts: int) -> tuple[list[int], list[int]]:
    """Pairs of each expert, and how many pairs come before its first one in the sorted order."""
    flat = [expert for row in ids for expert in row]
    counts = [flat.count(expert) for expert in range(num_experts)]
    return counts, [sum(counts[:expert]) for expert in range(num_experts)]


def judge_counts(expected: tuple, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Counts first, since the starts follow from them."""
    if not isinstance(got, tuple) or len(got) != 2:
        return f"the answer is a {type(got).__name__}, not the pair (counts, starts)"
    for name, want, have in zip(("counts", "starts"), expected, got, strict=True):
        if not isinstance(have, list) or len(have) != len(want):
            return f"{name} must be a list of {len(want)} numbers, one an expert; got {have!r}"
        for expert, (a, b) in enumerate(zip(want, have, strict=True)):
            if a == b:
                continue
            if name == "counts":
                return f"expert {expert} has {a} pairs, got {b!r}"
            why = f"{a} pairs of experts below {expert} come before its first one, got {b!r}"
            ends = [s + c for s, c in zip(expected[1], expected[0], strict=True)]
            return f"{why}: these are the ends, the sums with its own pairs" if have == ends else why
    return None


COUNT_EXPERTS = Exercise(
    name="ps08.count_experts",
    oracle=count_experts,
    judge=judge_counts,
    hint="count pairs, not tokens; starts[e] is the sum of counts before e, so starts[0] = 0",
    cases=(
        Case(([[2, 0], [0, 1], [2, 0]], 3), hint="experts 0, 1, 2 have 3, 1, 2 pairs"),
        Case(([[1], [1], [0]], 2), hint="one expert a token"),
        Case(([[3, 1], [1, 3]], 4), hint="experts 0 and 2 have nothing, and still have an entry"),
        Case(([[0, 1]], 6), hidden=True, hint="experts behind the last one in use have entries, too"),
        Case(([], 3), hidden=True, hint="no tokens: zeros"),
        Case(([[4]], 5), hidden=True, hint="a single pair, for the last expert"),
        Case(([[0, 2], [0, 2], [0, 2], [0, 1]], 3), hidden=True),
    ),
)


def sort_pairs(ids: list[list[int]], num_experts: int, tile: int) -> tuple[list[int], list[int]]:
    """The rows of all tiles as pair numbers, padding as the number of pairs; and each tile's expert, -1 for none."""
    flat = [expert for row in ids for expert in row]
    sentinel, pairs, owners = len(flat), [], []
    for expert in range(num_experts):
        own = [pair for pair, e in enumerate(flat) if e == expert]
        own += [sentinel] * (-len(own) % tile)
        pairs += own
        owners += [expert] * (len(own) // tile)
    superfluous = min(sentinel, (sentinel + num_experts * (tile - 1)) // tile) - len(owners)
    return pairs + [sentinel] * (superfluous * tile), owners + [-1] * superfluous


def judge_sorted(expected: tuple, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Tiles first, then the first row that is wrong."""
    if not isinstance(got, tuple) or len(got) != 2 or not all(isinstance(part, list) for part in got):
        return f"the answer is {got!r}, not the pair of lists (pairs, expert_of_tile)"
    ids, tile = inputs["ids"], inputs["tile"]
    flat = [expert for row in ids for expert in row]
    (pairs, owners), (got_pairs, got_owners) = expected, got
    if got_owners != owners:
        used = sum(owner >= 0 for owner in owners)
        if len(got_owners) != len(owners):
            return (
                f"{len(flat)} pairs on {inputs['num_experts']} experts are bounded by {len(owners)} tiles of {tile}, "
                f"{used} of them in use; got {len(got_owners)}"
            )
        number = next(i for i, (a, b) in enumerate(zip(owners, got_owners, strict=True)) if a != b)
        what = f"belongs to expert {owners[number]}" if owners[number] >= 0 else "is not in use: -1"
        return f"tile {number} {what}, got {got_owners[number]!r}"
    if len(got_pairs) != len(pairs):
        return f"{len(owners)} tiles of {tile} have {len(pairs)} rows, got {len(got_pairs)}"
    for row, (a, b) in enumerate(zip(pairs, got_pairs, strict=True)):
        if a == b:
            continue
        where = f"row {row % tile} of tile {row // tile} (expert {owners[row // tile]})"
        if a == len(flat):
            return f"{where} is padding: it holds {a}, the number of pairs, got {b!r}"
        found = f"pair {b}, which wants expert {flat[b]}" if isinstance(b, int) and 0 <= b < len(flat) else f"{b!r}"
        return f"{where} holds pair {a}, got {found}"
    return None


SORT_PAIRS = Exercise(
    name="ps08.sort_pairs",
    oracle=sort_pairs,
    judge=judge_sorted,
    hint="expert by expert: its pairs in order, then padding up to a whole tile; superfluous tiles at the end",
    cases=(
        Case(([[2, 0], [0, 1], [2, 0]], 3, 2), hint="the example: 1 2 | 5 * | 3 * | 0 4"),
        Case(([[0, 1], [1, 0]], 2, 2), hint="both experts fill a tile exactly: no padding; the bound is 3 tiles"),
        Case(([[1], [0], [1]], 2, 1), hint="tiles of one row: sorted, never padded"),
        Case(([[0, 1], [0, 1], [0, 1]], 3, 4), hint="expert 2 has nothing: no tile, and one tile is superfluous"),
        Case(
            ([[3, 0]], 4, 16), hidden=True, hint="two pairs need two tiles at most, however large the bound's formula"
        ),
        Case(([], 3, 4), hidden=True, hint="no tokens: no tiles"),
        Case(([[0]] * 5, 2, 2), hidden=True, hint="5 pairs of one expert: two full tiles, a half one"),
        Case(([[1, 3], [3, 1], [1, 3]], 5, 3), hidden=True, hint="pairs of an expert stay in order"),
    ),
)

EXERCISES = (ROUTE, CHOOSE_EXPERTS, COUNT_EXPERTS, SORT_PAIRS, COMBINE, MOE_SHARED_FAKE)
