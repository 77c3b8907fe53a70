"""Set 3, FlashAttention: the three pieces that make attention run over tiles.

What does one more tile change (`online_step`)? Which tiles does a tile of queries have to look at, and which of them
need a mask (`tile_ranges`)? How do two partial results become one (`merge`)? One tile of queries, as a kernel sees
the keys under a causal mask:

    key     0                         full_end           end              s_k
            |--- whole tiles, no mask ---|--- masked ------|--- not read ---|
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from minivllm.exercises.checking import Case, Exercise
from minivllm.exercises.tensors import LazyCases, first_difference, judge_parts, show_parts

if TYPE_CHECKING:
    from torch import Tensor

INF = float("inf")


def online_step(
    s: "Tensor", v: "Tensor", m: "Tensor", l: "Tensor", acc: "Tensor"
) -> tuple["Tensor", "Tensor", "Tensor"]:
    """Fold one tile of keys into the running values of M rows: the new m [M], l [M] and acc [M, D].

    s [M, N] are the tile's scores, -inf where masked, v [N, D] its values. A row that has seen no key has
    m = -inf, l = 0, acc = 0.
    """
    import torch

    m_new = torch.maximum(m, s.amax(dim=1))
    m_safe = torch.where(m_new == -INF, 0.0, m_new)
    p = torch.exp(s - m_safe[:, None])
    alpha = torch.exp(m - m_safe)
    return m_new, l * alpha + p.sum(dim=1), acc * alpha[:, None] + p @ v


def judge_step(expected: Sequence["Tensor"], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare row by row, and recognise the factor that was forgotten."""
    names = ("m", "l", "acc")
    complaint = judge_parts(names, expected, got)
    if complaint is not None:
        return complaint
    for name, want, have in zip(names, expected, got, strict=True):
        index = first_difference(want, have)
        if index is None:
            continue
        row = index[0]
        old_m, new_m = inputs["m"][row].item(), expected[0][row].item()
        if have[index].isnan():
            if new_m == -INF:
                return f"row {row} has seen no key yet: expected m = -inf, l = 0 and zeros in acc, but {name} is NaN"
            return f"{name} is NaN in row {row}, whose maximum goes from {old_m:g} to {new_m:g}"
        if name == "m" and have[index].item() < old_m:
            fallen = have[index].item()
            return f"the maximum of row {row} fell from {old_m:g} to {fallen:g}: it is one over all keys so far"
        if name != "m" and _is_unscaled(inputs, expected, name, have, row):
            return (
                f"{name} of row {row} was not put right: its old part still stands under the maximum {old_m:g}, "
                f"the tile's under {new_m:g}"
            )
        place = f"row {row}" + (f", column {index[1]}" if len(index) > 1 else "")
        return f"{name} in {place} should be {want[index].item():.4f} and is {have[index].item():.4f}"
    return None


def _is_unscaled(inputs: Mapping[str, Any], expected: Sequence["Tensor"], name: str, have: "Tensor", row: int) -> bool:
    """Whether this row is the old sum plus the tile's, without the factor alpha."""
    import torch

    old_m, new_m = inputs["m"][row], expected[0][row]
    old = inputs[name][row]
    new = expected[1 if name == "l" else 2][row]
    careless = new - old * torch.exp(old_m - new_m) + old
    return bool(old.any()) and first_difference(careless, have[row]) is None


def _step_cases() -> list[Case]:
    import torch
    from torch import tensor

    ln = torch.log

    def case(s: Any, v: Any, m: Any, l: Any, acc: Any, **options: Any) -> Case:
        return Case(tuple(tensor(x, dtype=torch.float32) for x in (s, v, m, l, acc)), **options)

    ln2, ln4 = ln(tensor(2.0)).item(), ln(tensor(4.0)).item()
    cases = [
        case(
            [[0.0, ln2]], [[3.0], [6.0]], [-INF], [0.0], [[0.0]],
            hint="the first tile: m is -inf, so alpha = exp(-inf - m') = 0; the weights are exp(s - m')",
        ),
        case(
            [[ln4, 0.0]], [[1.0], [2.0]], [ln2], [3.0], [[5.0]],
            hint="the maximum rises from ln 2 to ln 4, so alpha is 1/2: l and acc both need it",
        ),
        case([[0.0, ln2]], [[4.0], [8.0]], [ln4], [2.0], [[1.0]], hint="the maximum stays: alpha is 1"),
        case(
            [[1.0, 3.0, 2.0], [0.0, -1.0, 0.5]],
            [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
            [2.0, 4.0], [1.5, 2.0], [[1.0, 2.0], [0.5, 0.5]],
            hint="each row has a maximum and an alpha of its own",
        ),
        case(
            [[-INF, 1.0], [2.0, -INF]], [[1.0], [2.0]], [0.0, 3.0], [1.0, 1.0], [[1.0], [1.0]],
            hint="a masked score is -inf: exp makes its weight 0 by itself",
        ),
        case(
            [[-INF, -INF], [1.0, 0.0]], [[1.0], [2.0]], [-INF, -INF], [0.0, 0.0], [[0.0], [0.0]], hidden=True,
            hint="row 0 sees none of these keys and saw none before: -inf - -inf is NaN, so subtract something finite",
        ),
        case(
            [[-INF, -INF]], [[1.0], [2.0]], [1.0], [2.0], [[3.0]], hidden=True,
            hint="a tile of which a row sees nothing changes nothing for that row",
        ),
        case(
            [[1000.0, 998.0]], [[1.0], [2.0]], [999.0], [1.0], [[1.0]], hidden=True,
            hint="exp(89) overflows: subtract the maximum before exp, never after",
        ),
        case(
            [[-20000.0, -20001.0]], [[1.0], [2.0]], [-INF], [0.0], [[0.0]], hidden=True,
            hint="very low scores are still scores: no finite number stands for -inf",
        ),
    ]  # fmt: skip
    g = torch.Generator().manual_seed(3)
    for rows, keys, columns in product((1, 3), (1, 4), (1, 2)):
        s, v = torch.randn(rows, keys, generator=g), torch.randn(keys, columns, generator=g)
        m, l = torch.randn(rows, generator=g), torch.rand(rows, generator=g) + 0.5
        cases.append(Case((s, v, m, l, torch.randn(rows, columns, generator=g)), hidden=True))
    return cases


ONLINE_STEP = Exercise(
    name="ps03.online_step",
    oracle=online_step,
    judge=judge_step,
    hint="m' = max(m, the tile's); alpha = exp(m - m'); everything that was summed before is multiplied by alpha",
    cases=LazyCases(_step_cases),
    show=show_parts(("m", "l", "acc")),
)


def tile_ranges(first: int, block_m: int, block_n: int, s_q: int, s_k: int) -> tuple[int, int]:
    """Which keys rows first .. first + block_m - 1 look at under a causal mask: (full_end, end).

    Tiles of keys begin at multiples of block_n. Keys below full_end lie in whole tiles that every row sees
    entirely; keys full_end .. end - 1 need the mask; no row sees a key from end on.
    """
    last = min(first + block_m, s_q) - 1
    seen_by_first = max(0, first + s_k - s_q + 1)
    seen_by_last = max(0, last + s_k - s_q + 1)
    return seen_by_first // block_n * block_n, seen_by_last


def judge_ranges(expected: tuple[int, int], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare the two borders, and say which row sees or misses which key."""
    if not isinstance(got, tuple) or len(got) != 2 or not all(type(border) is int for border in got):
        return f"the answer is {got!r}, not a tuple of two ints (full_end, end)"
    first, block_m, block_n, s_q, s_k = (inputs[name] for name in ("first", "block_m", "block_n", "s_q", "s_k"))
    last = min(first + block_m, s_q) - 1
    offset = s_k - s_q
    full_end, end = got
    if min(got) < 0:
        return "a border is negative: rows that come before every key see none of them, and both borders are 0"
    if end != expected[1]:
        if end > s_k:
            return f"end is {end}, but there are only {s_k} keys"
        verb = "sees no key past" if end > expected[1] else "still sees"
        key = max(0, last + offset) if end < expected[1] else last + offset
        if key < 0:
            return f"even the last row, {last}, comes before every key and sees none; end is {end}"
        return f"the last row, {last}, stands at key {last + offset} and {verb} key {key}; end is {end}"
    if full_end % block_n:
        return (
            f"full_end is {full_end}, in the middle of a tile of {block_n} keys: a tile is masked whole or not at all"
        )
    if full_end > expected[0]:
        sees = first + offset
        return f"row {first} sees keys up to {sees} only, so the tile that ends with key {full_end - 1} needs the mask"
    if full_end < expected[0]:
        return f"every row sees the tile {full_end} .. {full_end + block_n - 1} entirely: it needs no mask"
    return None


TILE_RANGES = Exercise(
    name="ps03.tile_ranges",
    oracle=tile_ranges,
    judge=judge_ranges,
    hint="row i sees keys up to i + s_k - s_q; the first row decides what is full, the last row where it ends",
    cases=(
        Case(
            (0, 4, 4, 8, 8), hint="row 0 sees key 0 only, so no tile is full; row 3 sees key 3, so four keys are read"
        ),
        Case((4, 4, 4, 8, 8), hint="row 4 sees keys 0 .. 4: the first tile is full, the second is not"),
        Case((4, 4, 2, 8, 8), hint="with tiles of 2, keys 0 .. 3 are two full tiles"),
        Case((0, 2, 4, 2, 10), hint="two queries at the end of 10 keys: row 0 stands at key 8, not at key 0"),
        Case((8, 4, 4, 10, 10), hidden=True, hint="the last tile of queries is short: rows 8 and 9 only"),
        Case((0, 4, 4, 6, 2), hidden=True, hint="rows 0 .. 3 come before the first key: what do they see?"),
        Case((4, 4, 4, 6, 2), hidden=True, hint="row 4 stands at key 0"),
        Case((0, 16, 4, 1, 9), hidden=True, hint="a decode: one row, which sees all keys; 8 of them in full tiles"),
        Case((3, 1, 4, 8, 8), hidden=True, hint="a row that stands on the last key of a tile sees the tile entirely"),
        Case((0, 4, 4, 4, 0), hidden=True, hint="no keys at all"),
        *(
            Case((first, block_m, block_n, s_q, s_k), hidden=True)
            for block_m, block_n, s_q, s_k in product((2, 3), (2, 4), (5, 6), (3, 6, 9))
            for first in range(0, s_q, block_m)
        ),
    ),
)


def merge(out_a: "Tensor", lse_a: "Tensor", out_b: "Tensor", lse_b: "Tensor") -> tuple["Tensor", "Tensor"]:
    """Attention over two disjoint sets of keys from that over each: out [R, D] and lse [R], natural log.

    A part without keys has lse = -inf, and its out may hold anything. A row without keys in either part gets
    out = 0 and lse = -inf.
    """
    import torch

    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(lse == -INF, 0.0, lse)
    out = torch.zeros_like(out_a)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(part_lse - safe)[:, None]
        out = out + torch.where(weight > 0, weight * part, 0.0)
    return out, lse


def judge_merge(expected: Sequence["Tensor"], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare row by row; a NaN is traced to the part that it came from."""
    complaint = judge_parts(("out", "lse"), expected, got)
    if complaint is not None:
        return complaint
    for name, want, have in zip(("out", "lse"), expected, got, strict=True):
        index = first_difference(want, have)
        if index is None:
            continue
        row, value = index[0], have[index].item()
        parts = {part: inputs[f"lse_{part}"][row].item() for part in "ab"}
        empty = [part for part, lse in parts.items() if lse == -INF]
        is_nan = "NaN" if value != value else f"{value:.4f}"
        if len(empty) == 2:
            wanted = "zeros" if name == "out" else "lse = -inf"
            return f"row {row} has no visible key in either part: expected {wanted}, got {is_nan}"
        if len(empty) == 1 and not (value == value and abs(value) < INF):
            return (
                f"row {row} has no key in part {empty[0]}, so out_{empty[0]} was never written and must not be "
                f"used: 0 * NaN is NaN; {name} is {is_nan}"
            )
        text = ", ".join(f"lse_{part} = {lse:.4g}" for part, lse in parts.items())
        column = f", column {index[1]}" if len(index) > 1 else ""
        return f"{name} in row {row}{column} should be {want[index].item():.4f} and is {is_nan} ({text})"
    return None


def _merge_cases() -> list[Case]:
    import torch
    from torch import tensor

    def case(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, **options: Any) -> Case:
        return Case(tuple(tensor(x, dtype=torch.float32) for x in (out_a, lse_a, out_b, lse_b)), **options)

    ln3 = torch.log(tensor(3.0)).item()
    nan = float("nan")
    cases = [
        case([[4.0]], [0.0], [[8.0]], [0.0], hint="equal lse: each part has half of the weight"),
        case([[4.0, 0.0]], [0.0], [[8.0, 4.0]], [ln3], hint="exp(lse) is 1 and 3: weights 1/4 and 3/4, lse = ln 4"),
        case([[4.0], [2.0]], [1.0, -INF], [[8.0], [6.0]], [-INF, 2.0], hint="a part without keys has weight 0"),
        case(
            [[1.0], [0.0]], [0.5, -INF], [[3.0], [0.0]], [0.5, -INF],
            hint="row 1 has no keys at all: which difference is -inf - -inf?",
        ),
        case(
            [[4.0], [nan]], [1.0, -INF], [[nan], [6.0]], [-INF, 2.0], hidden=True,
            hint="the buffer of a part without keys was never written: select with torch.where, don't multiply by 0",
        ),
        case([[nan]], [-INF], [[nan]], [-INF], hidden=True, hint="no keys in either part, and nothing written"),
        case(
            [[1.0], [1.0]], [500.0, -500.0], [[3.0], [3.0]], [500.0, -500.0], hidden=True,
            hint="exp(500) overflows and exp(-500) is 0: only differences of lse may go into exp",
        ),
        case([[1.0]], [300.0], [[3.0]], [-300.0], hidden=True, hint="one part outweighs the other completely"),
    ]  # fmt: skip
    g = torch.Generator().manual_seed(4)
    for rows, columns in product((1, 4), (1, 3)):
        out_a, out_b = torch.randn(2, rows, columns, generator=g)
        lse_a, lse_b = torch.randn(2, rows, generator=g)
        cases.append(Case((out_a, lse_a, out_b, lse_b), hidden=True))
    return cases


MERGE = Exercise(
    name="ps03.merge",
    oracle=merge,
    judge=judge_merge,
    hint="lse = ln(exp(lse_a) + exp(lse_b)), and each part's weight is exp(its lse - lse)",
    cases=LazyCases(_merge_cases),
    show=show_parts(("out", "lse")),
)

EXERCISES = (ONLINE_STEP, TILE_RANGES, MERGE)
