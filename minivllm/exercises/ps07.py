"""Set 7, products in 8 bits: what is quantised, with which scales, how it is multiplied, and by whom.

Numbers to int8 (`quantize_int8`), one scale for each block of a row (`block_scales`), a product of whole numbers
(`int8_product`), and the row of the dispatch table that serves (`choose_backend`). Two pieces are from the bug museum
(`ps07_museum.py`): scales that were taken out of the loop over K, and rows of zeros.

Blocks are short here (2 or 4 numbers instead of 128), so that everything can be worked out by hand.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.exercises.checking import Case, Exercise
from minivllm.exercises.ps07_dispatch import CHOOSE_BACKEND
from minivllm.exercises.ps07_museum import BLOCK_PRODUCT, QUANTIZE_ROWS, show_matrix
from minivllm.exercises.tensors import LazyCases, judge_tensor, not_a_tensor, wrong_shape

if TYPE_CHECKING:
    from torch import Tensor

NAN, INF = float("nan"), float("inf")


def quantize_int8(x: "Tensor", scale: "Tensor") -> "Tensor":
    """x [M, K] over scale [M, 1], to the nearest whole number (ties to even) in -127 .. 127; NaN to 0; int8 [M, K]."""
    import torch

    return (x / scale).clamp(-127, 127).round().nan_to_num(0.0).to(torch.int8)


def judge_int8(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first number that is wrong, and which of the rules it breaks."""
    import torch

    why = not_a_tensor(got) or wrong_shape(expected, got, "[M, K]")
    if why:
        return why
    if got.dtype != torch.int8:
        return f"the dtype is {got.dtype}, not torch.int8"
    for row, column in (expected != got).nonzero().tolist():
        ratio = (inputs["x"] / inputs["scale"])[row, column].item()
        want, have = int(expected[row, column]), int(got[row, column])
        rule = "the nearest whole number is wanted"
        if ratio != ratio:
            rule = "int8 has no NaN, it becomes 0"
        elif abs(ratio) > 127:
            rule = "beyond the format, so it stays at its end"
        elif abs(ratio) % 1 == 0.5:
            rule = "half way between two, so the even one is wanted"
        return f"x[{row}, {column}] / scale is {ratio:g}: {rule}; expected {want}, got {have}"
    return None


def int8_case(x: list[list[float]], scale: list[float], **about: Any) -> Case:
    import torch

    return Case((torch.tensor(x), torch.tensor(scale)[:, None]), **about)


QUANTIZE_INT8 = Exercise(
    name="ps07.quantize_int8",
    oracle=quantize_int8,
    judge=judge_int8,
    show=show_matrix,
    hint="divide, clamp to -127 .. 127, round, and only then change the dtype",
    cases=LazyCases(
        lambda: (
            int8_case([[1.0, -2.0, 63.5]], [0.5], hint="1 / 0.5 = 2, and 63.5 / 0.5 = 127"),
            int8_case([[0.9, 1.1, -0.9, -1.6]], [1.0], hint="to the nearest: a cast alone cuts towards zero"),
            int8_case([[4.0, 8.0], [4.0, 8.0]], [1.0, 4.0], hint="each row has a scale of its own"),
            int8_case([[128.0, 300.0, -300.0]], [1.0], hidden=True, hint="a cast wraps around: 300 - 256 = 44"),
            int8_case([[-127.4, -127.8, -128.0]], [1.0], hidden=True, hint="symmetric: -128 is not used"),
            int8_case([[0.5, 1.5, 2.5, -0.5, -1.5]], [1.0], hidden=True, hint="ties go to the even number"),
            int8_case([[INF, -INF, 3.0]], [2.0], hidden=True, hint="an infinity stays at the end of the format"),
            int8_case([[NAN, 5.0]], [1.0], hidden=True, hint="NaN becomes 0; its neighbours keep their values"),
        )
    ),
)


def block_scales(x: "Tensor", block: int, largest: float) -> "Tensor":
    """x [M, K] -> [M, ceil(K / block)] float32: the largest magnitude of each 1 x block over `largest`."""
    import torch

    starts = range(0, x.shape[1], block)
    amax = [x[:, start : start + block].float().abs().amax(dim=1) for start in starts]
    return torch.stack(amax, dim=1) / largest


def judge_scales(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first block whose scale is wrong, with the numbers that it is made of."""
    import torch

    why = judge_tensor(expected, got, "[M, ceil(K / block)]")
    if why:
        return why
    if got.dtype != torch.float32:
        return f"the dtype is {got.dtype}; scales are torch.float32, whatever x is"
    wrong = ~torch.isclose(got, expected, rtol=1e-6, atol=0)
    for row, index in wrong.nonzero().tolist():
        block, k = inputs["block"], inputs["x"].shape[1]
        first, end = index * block, min((index + 1) * block, k)
        amax = expected[row, index].item() * inputs["largest"]
        return (
            f"row {row}, numbers {first} to {end - 1}: the largest magnitude is {amax:g}, so the scale is "
            f"{amax:g} / {inputs['largest']:g} = {expected[row, index]:g}, got {got[row, index]:g}"
        )
    return None


def scales_case(x: list[list[float]], block: int, largest: float, dtype: str = "float32", **about: Any) -> Case:
    import torch

    return Case((torch.tensor(x, dtype=getattr(torch, dtype)), block, largest), **about)


BLOCK_SCALES = Exercise(
    name="ps07.block_scales",
    oracle=block_scales,
    judge=judge_scales,
    show=show_matrix,
    hint="cut the columns into stretches of `block`; the last one may be shorter",
    cases=LazyCases(
        lambda: (
            scales_case([[1.0, 4.0, 2.0, 8.0]], 2, 4.0, hint="two blocks: 4 / 4 and 8 / 4"),
            scales_case(
                [[1.0, 2.0, 16.0, 3.0], [5.0, 2.0, 1.0, 1.0]], 2, 2.0, hint="an outlier is felt in its own block only"
            ),
            scales_case([[448.0, 1.0, 2.0, 224.0, 7.0, 7.0, 7.0, 7.0]], 4, 448.0),
            scales_case([[1.0, -8.0, 2.0, 3.0]], 2, 4.0, hidden=True, hint="the largest magnitude may be negative"),
            scales_case([[1.0, 2.0, 3.0, 4.0, 6.0]], 2, 2.0, hidden=True, hint="five numbers in twos: three blocks"),
            scales_case([[3.0, -6.0, 1.0]], 4, 2.0, hidden=True, hint="a block longer than the row: one scale"),
            scales_case(
                [[1.0, 3.0, 5.0, 7.0]], 2, 448.0, "bfloat16", hidden=True, hint="a scale in bfloat16 is rounded"
            ),
            scales_case(
                [[-1.0, -2.0, -3.0, -0.5, -7.0]], 3, 7.0, hidden=True, hint="zeros that fill up change nothing"
            ),
        )
    ),
)


def int8_product(a: "Tensor", b: "Tensor", sa: "Tensor", sb: "Tensor") -> "Tensor":
    """a [M, K], b [N, K] int8, sa [M, 1], sb [N, 1] -> a b^T times both scales, float32 [M, N]."""
    return (a.long() @ b.long().T).float() * sa * sb.T


def judge_product(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first sum that is wrong, and say when a short whole number has run over."""
    import torch

    why = judge_tensor(expected, got, "[M, N]")
    if why:
        return why
    if got.dtype != torch.float32:
        return f"the dtype is {got.dtype}, not torch.float32"
    wrong = ~torch.isclose(got, expected, rtol=1e-6, atol=1e-7)
    for m, n in wrong.nonzero().tolist():
        total = int((inputs["a"][m].long() * inputs["b"][n].long()).sum())
        sa, sb = inputs["sa"][m, 0].item(), inputs["sb"][n, 0].item()
        why = (
            f"out[{m}, {n}]: the sum is {total}, times {sa:g} (row {m} of a) and {sb:g} (row {n} of b) is "
            f"{expected[m, n]:g}, got {got[m, n]:g}"
        )
        sum_of_got = got[m, n].item() / (sa * sb)
        for bits in (8, 16):
            if sum_of_got == sum_of_got and round(sum_of_got) != total and (total - round(sum_of_got)) % 2**bits == 0:
                return f"{why}: {bits} bits have run over"
        return why
    return None


def product_case(a: list[list[int]], b: list[list[int]], sa: list[float], sb: list[float], **about: Any) -> Case:
    import torch

    matrices = (torch.tensor(x, dtype=torch.int8) for x in (a, b))
    return Case((*matrices, torch.tensor(sa)[:, None], torch.tensor(sb)[:, None]), **about)


INT8_PRODUCT = Exercise(
    name="ps07.int8_product",
    oracle=int8_product,
    judge=judge_product,
    show=show_matrix,
    hint="widen before you multiply: int8 times int8 is int8 in torch; the scales come after the sum",
    cases=LazyCases(
        lambda: (
            product_case([[1, 2]], [[3, 4]], [1.0], [0.5], hint="(1 x 3 + 2 x 4) x 1 x 0.5"),
            product_case([[1, 2], [0, 1]], [[3, 4], [1, 1]], [1.0, 2.0], [0.5, 4.0], hint="sa goes down, sb across"),
            product_case([[10, 20]], [[10, 20], [-10, 30]], [0.25], [1.0, 2.0], hint="500 is no int8"),
            product_case([[127] * 3], [[127] * 3], [1.0], [1.0], hidden=True, hint="3 x 127 x 127 is no int16"),
            product_case([[127] * 600], [[-127] * 600], [0.5], [0.5], hidden=True, hint="long sums need 32 bits"),
            product_case([[-127, 127, 5]], [[127, 127, 1]], [2.0], [1.0], hidden=True, hint="large parts may cancel"),
            product_case(
                [[1, -1], [2, 3], [4, 5]], [[1, 1], [2, -2]], [1.0, 2.0, 4.0], [0.5, 8.0], hidden=True,
                hint="M and N differ: a scale of b belongs to a column of the result",
            ),
        )
    ),
)  # fmt: skip

EXERCISES = (QUANTIZE_INT8, BLOCK_SCALES, INT8_PRODUCT, CHOOSE_BACKEND, BLOCK_PRODUCT, QUANTIZE_ROWS)
