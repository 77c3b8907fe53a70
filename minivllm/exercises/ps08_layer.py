"""Set 8, the rows' way back: results of tiles become results of tokens, and an operator says what it would return.

    rows [num_tiles * tile, H]  --`combine`-->  out [T, H]          padding belongs to no token
    shapes in                   --`moe_shared_fake`-->  shapes out   a fake implementation: no numbers

Inputs of the fake implementation are on the device "meta": tensors with shape, dtype and strides, but no numbers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.exercises.checking import Case, Exercise
from minivllm.exercises.tensors import LazyCases, first_difference, judge_tensor, numbers

if TYPE_CHECKING:
    from torch import Tensor

NAN = float("nan")


def combine(rows: "Tensor", pairs: "Tensor", weights: "Tensor") -> "Tensor":
    """out[t] = sum over the rows of token t's pairs of weight * row: [T, H]; padding rows are left out."""
    num_tokens, top_k = weights.shape
    out = rows.new_zeros(num_tokens, rows.shape[1])
    for row, pair in zip(rows, pairs.tolist(), strict=True):
        if pair < num_tokens * top_k:
            out[pair // top_k] += weights[pair // top_k, pair % top_k] * row
    return out


def judge_combined(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first token that is wrong, the rows it consists of, and whether padding got into it."""
    why = judge_tensor(expected, got, "[T, H]")
    if why:
        return why
    index = first_difference(expected, got)
    if index is None:
        return None
    token, pairs, weights = index[0], inputs["pairs"].tolist(), inputs["weights"]
    num_pairs, top_k = weights.numel(), weights.shape[1]
    parts = " + ".join(
        f"{weights.flatten()[pair]:.4g} x row {row}"
        for row, pair in enumerate(pairs)
        if pair // top_k == token < num_pairs
    )
    why = f"token {token} is {parts} = {numbers(expected[token])}, got {numbers(got[token])}"
    padding = [row for row, pair in enumerate(pairs) if pair >= num_pairs]
    if padding and got[token].isnan().any():
        return f"{why}: a padding row was read (rows {padding}), and 0 times NaN is NaN"
    if padding and token == len(weights) - 1:
        return f"{why}: rows {padding} are padding and belong to no token, not to the last one either"
    return why


def combine_case(pairs: list[int], weights: list[list[float]], garbage: float, **about: Any) -> Case:
    """Row r of a live pair is [10 r + 1, r + 1]; padding rows hold garbage."""
    import torch

    num_pairs = sum(map(len, weights))
    rows = [[10.0 * r + 1, r + 1.0] if pair < num_pairs else [garbage] * 2 for r, pair in enumerate(pairs)]
    shape = (len(weights), len(weights[0]) if weights else 2)
    tensors = torch.tensor(rows).view(-1, 2), torch.tensor(pairs, dtype=torch.int64)
    return Case((*tensors, torch.tensor(weights).view(shape)), **about)


COMBINE = Exercise(
    name="ps08.combine",
    oracle=combine,
    judge=judge_combined,
    show=lambda out: "\n".join([f"{list(out.shape)}", *map(numbers, out)]),
    hint="choose the live rows first (pairs < number of pairs), then add weight * row to token pair // top_k",
    cases=LazyCases(
        lambda: (
            combine_case(
                [1, 2, 5, 6, 3, 6, 0, 4], [[0.5, 0.5], [0.25, 0.75], [0.75, 0.25]], 9.0,
                hint="rows 3 and 5 hold padding: the number of pairs, 6, is no pair",
            ),
            combine_case([0, 1, 2, 3], [[0.5, 0.5], [2.0, 1.0]], 0.0, hint="no padding, and rows in order"),
            combine_case([3, 1, 0, 2], [[1.0], [2.0], [3.0], [4.0]], 0.0, hint="one expert a token: a permutation"),
            combine_case([1, 3, 0, 2], [[1.0, 2.0], [4.0, 8.0]], 0.0, hint="rows in the order of experts"),
            combine_case(
                [0, 2, 1, 2], [[0.5, 0.5]], NAN, hidden=True,
                hint="padding rows were never written and may hold NaN: leave them out, don't multiply them by 0",
            ),
            combine_case([1, 2, 2, 2, 0, 2, 2, 2], [[1.0], [1.0]], 7.0, hidden=True, hint="most rows are padding"),
            combine_case([2, 2, 0, 1], [[1.0], [3.0]], NAN, hidden=True, hint="padding may come first"),
            combine_case([], [], 0.0, hidden=True, hint="no tokens: [0, H]"),
            combine_case([0, 1, 2, 2], [[0.0, 1.0]], 5.0, hidden=True, hint="a weight of 0 is a weight"),
        )
    ),
)  # fmt: skip


def moe_shared_fake(hidden_states: "Tensor", router_logits: "Tensor", layer_name: str) -> "tuple[Tensor, Tensor]":
    """What moe_forward_shared would return: routed [T, H] and shared [T, H], contiguous, in hidden_states' dtype."""
    return hidden_states.new_empty(hidden_states.shape), hidden_states.new_empty(hidden_states.shape)


def judge_fake(expected: "tuple[Tensor, Tensor]", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Shapes, dtypes, devices and strides, and whether each output is a tensor of its own."""
    import torch

    if not isinstance(got, tuple) or len(got) != 2:
        return f"the answer is a {type(got).__name__}, not the pair (routed, shared)"
    for name, want, have in zip(("routed", "shared"), expected, got, strict=True):
        if not isinstance(have, torch.Tensor):
            return f"{name} is a {type(have).__name__}, not a torch tensor"
        if hasattr(have, "is_input") or have._base is not None:
            return f"{name} is an input, or a view of one: an operator that changes nothing returns tensors of its own"
        if have.shape != want.shape:
            return f"{name} has the shape {list(have.shape)}, not that of hidden_states, {list(want.shape)}"
        if have.device != want.device:
            return f"{name} is on the device {have.device}, hidden_states is on {want.device}"
        if have.dtype != want.dtype:
            return f"{name} has the dtype {have.dtype}, but the operator returns hidden_states' dtype, {want.dtype}"
        if have.stride() != want.stride():
            return f"{name} has the strides {have.stride()}, but the operator returns contiguous rows: {want.stride()}"
    if got[0] is got[1]:
        return "routed and shared are the same tensor twice; the real operator returns two"
    return None


def show_fake(pair: "tuple[Tensor, Tensor]") -> str:
    return "\n".join(f"{list(t.shape)} {t.dtype} on {t.device}, strides {t.stride()}" for t in pair)


def fake_case(num_tokens: int, size: int, num_experts: int, dtype: str, transposed: bool = False, **about: Any) -> Case:
    """Inputs without numbers; marked, so that an output that is an input can be told."""
    import torch

    shape = (size, num_tokens) if transposed else (num_tokens, size)
    x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    x = x.t() if transposed else x
    x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    logits = torch.empty(num_tokens, num_experts, device="meta")
    x.is_input = logits.is_input = True
    return Case((x, logits, "a layer that does not exist"), **about)


MOE_SHARED_FAKE = Exercise(
    name="ps08.moe_shared_fake",
    oracle=moe_shared_fake,
    judge=judge_fake,
    show=show_fake,
    hint="hidden_states.new_empty(shape) takes dtype and device from hidden_states, and is contiguous",
    cases=LazyCases(
        lambda: (
            fake_case(5, 8, 4, "float32", hint="two new tensors of hidden_states' shape"),
            fake_case(3, 16, 4, "float32", hint="an output is as wide as hidden_states, not as router_logits"),
            fake_case(1, 8, 8, "float32", hint="E may equal H"),
            fake_case(4, 8, 4, "bfloat16", hidden=True, hint="router_logits are float32, the model may not be"),
            fake_case(6, 8, 4, "float32", True, hidden=True, hint="hidden_states may be a transposed view: [T, H] with "
                      "strides (1, T); the operator's results are contiguous all the same"),
            fake_case(0, 8, 4, "float16", hidden=True, hint="no tokens: [0, H]"),
        )
    ),
)  # fmt: skip
