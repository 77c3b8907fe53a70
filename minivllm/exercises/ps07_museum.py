"""Set 7, from the bug museum: scales that were taken out of the loop over K, and a scale of zero.

block_product    the sum over K in steps of `block`, each with scales of its own
quantize_rows    a row of zeros needs a scale, too
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.exercises.checking import Case, Exercise
from minivllm.exercises.tensors import LazyCases, judge_tensor, not_a_tensor, numbers, wrong_shape

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_AMAX, LARGEST = 1e-4, 448.0


def show_matrix(tensor: "Tensor") -> str:
    """A matrix with its shape and dtype, one line a row."""
    lines = [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"]
    return "\n".join(lines + [numbers(row.float()) for row in tensor])


def block_product(a: "Tensor", b: "Tensor", sa: "Tensor", sb: "Tensor", block: int) -> "Tensor":
    """a [M, K], b [N, K], sa [M, K / block], sb [ceil(N / block), K / block] -> the product of what they stand for."""
    import torch

    out = torch.zeros(a.shape[0], b.shape[0])
    for n in range(b.shape[0]):
        for step in range(a.shape[1] // block):
            k = slice(step * block, (step + 1) * block)
            out[:, n] += a[:, k] @ b[n, k] * (sa[:, step] * sb[n // block, step])
    return out


def judge_blocks(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first number that is wrong, with the partial sums and scales that it is made of."""
    import torch

    why = judge_tensor(expected, got, "[M, N]")
    if why:
        return why
    a, b, sa, sb, block = (inputs[name] for name in ("a", "b", "sa", "sb", "block"))
    wrong = ~torch.isclose(got.float(), expected, rtol=1e-5, atol=1e-6)
    for m, n in wrong.nonzero().tolist():
        partial = (a[m] * b[n]).view(-1, block).sum(1)
        scales = sa[m] * sb[n // block]
        return (
            f"out[{m}, {n}]: the steps' sums are {numbers(partial)} and their scales {numbers(scales)}, together "
            f"{expected[m, n]:g}; got {got[m, n]:g}"
        )
    return None


def blocks_case(
    a: list[list[float]], b: list[list[float]], sa: list[list[float]], sb: list[list[float]], block: int, **about: Any
) -> Case:
    import torch

    return Case((*(torch.tensor(x) for x in (a, b, sa, sb)), block), **about)


ROW = [[1.0, 2.0, 3.0, 4.0]]
BLOCK_PRODUCT = Exercise(
    name="ps07.block_product",
    oracle=block_product,
    judge=judge_blocks,
    show=show_matrix,
    hint="a scale that changes along K can't leave the sum: apply it to each step's sum before that is added",
    cases=LazyCases(
        lambda: (
            blocks_case(ROW, [[1.0, 1.0, 1.0, 1.0]], [[1.0, 10.0]], [[1.0, 1.0]], 2, hint="3 x 1 + 7 x 10"),
            blocks_case(ROW, [[1.0, 1.0, 1.0, 1.0]], [[1.0, 10.0]], [[2.0, 0.5]], 2, hint="3 x 2 + 7 x 5"),
            blocks_case(
                [[1.0, 0.0, 2.0, 1.0], [0.0, 3.0, 1.0, 1.0]], [[1.0, 2.0, 1.0, 0.0], [4.0, 1.0, 0.0, 2.0]],
                [[1.0, 2.0], [0.5, 4.0]], [[1.0, 3.0]], 2, hint="two rows of b share a row of sb",
            ),
            blocks_case(
                [[1.0, 1.0, 1.0, 1.0]], [[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0], [2.0, 0.0, 0.0, 2.0]],
                [[1.0, 10.0]], [[1.0, 2.0], [3.0, 5.0]], 2, hidden=True,
                hint="N = 3 in blocks of 2: output 2 takes the second row of sb",
            ),
            blocks_case(
                [[1.0] * 6], [[1.0] * 6], [[1.0, 100.0, 1.0]], [[1.0, 1.0, 1.0]], 2, hidden=True,
                hint="neither the first nor the last step's scale tells of the one between",
            ),
            blocks_case([[2.0, 3.0]], [[4.0, 5.0]], [[0.5]], [[3.0]], 2, hidden=True, hint="a single step"),
            blocks_case(
                [[1.0, -1.0, 2.0, 2.0]], [[3.0, 3.0, 1.0, 1.0]] * 4, [[7.0, 0.5]], [[1.0, 2.0], [1.0, 4.0]], 2,
                hidden=True, hint="a step whose sum is 0 counts nothing, whatever its scale",
            ),
        )
    ),
)  # fmt: skip


def quantize_rows(x: "Tensor") -> "tuple[Tensor, Tensor]":
    """x [M, K] -> q [M, K] float8_e4m3fn and scale [M, 1] float32, so that x is about q * scale; no scale is 0."""
    import torch

    x = x.float()
    scale = x.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST_AMAX) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn), scale


def judge_rows(expected: "tuple[Tensor, Tensor]", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Scales first, since the numbers follow from them."""
    import torch

    if not isinstance(got, tuple) or len(got) != 2:
        return f"the answer is a {type(got).__name__}, not the pair (q, scale)"
    for name, want, have, meaning in zip(("q", "scale"), expected, got, ("[M, K]", "[M, 1]"), strict=True):
        why = not_a_tensor(have, name) or wrong_shape(want, have, meaning, name)
        if why:
            return why
        if have.dtype != want.dtype:
            return f"{name} has the dtype {have.dtype}, not {want.dtype}"
    for row in range(len(expected[0])):
        amax = inputs["x"][row].float().abs().max().item()
        (q, scale), (want_q, want_scale) = ((part[row].float() for part in pair) for pair in (got, expected))
        if not torch.isclose(scale, want_scale, rtol=1e-5, atol=0).all():
            counts = f"counts as {SMALLEST_AMAX:g}" if amax < SMALLEST_AMAX else "is its largest magnitude"
            return f"row {row}: {amax:g} {counts}, so its scale is {want_scale.item():.4g}, got {scale.item():.4g}"
        if not torch.equal(q, want_q):
            return f"row {row}, whose scale is {scale.item():.4g}: expected {numbers(want_q)}, got {numbers(q)}"
    return None


def show_pair(pair: "tuple[Tensor, Tensor]") -> str:
    return f"q = {show_matrix(pair[0])}\nscale = {numbers(pair[1])}"


def rows_case(x: list[list[float]], dtype: str = "float32", **about: Any) -> Case:
    import torch

    return Case((torch.tensor(x, dtype=getattr(torch, dtype)),), **about)


QUANTIZE_ROWS = Exercise(
    name="ps07.quantize_rows",
    oracle=quantize_rows,
    judge=judge_rows,
    show=show_pair,
    hint="0 / 0 is NaN: give the largest magnitude a floor before it becomes a scale",
    cases=LazyCases(
        lambda: (
            rows_case([[7.0, -3.5, 1.75]], hint="7 is mapped onto 448, so the scale is 1 / 64"),
            rows_case([[1.0, 448.0], [-7.0, 3.5]], hint="each row has its own scale"),
            rows_case([[7.0, 3.5], [0.0, 0.0]], hint="a row of zeros: zeros, and a scale of 1e-4 / 448"),
            rows_case([[1e-6, -5e-7]], hidden=True, hint="a row of tiny numbers has the same floor as one of zeros"),
            rows_case([[1e-43, 0.0]], hidden=True, hint="1e-43 / 448 is 0 in float32, and 1e-43 / 0 is infinite"),
            rows_case([[-448.0, 0.0], [-0.0, -0.0]], hidden=True, hint="the largest magnitude may be negative"),
            rows_case([[3.0, 1.5]], "bfloat16", hidden=True, hint="a scale in bfloat16 is rounded"),
            rows_case([[0.5, 0.0], [0.0, 3e-5], [0.0, 0.0]], hidden=True, hint="one row must not touch another"),
        )
    ),
)
