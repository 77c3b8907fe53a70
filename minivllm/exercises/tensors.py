"""What the sets about tensors share: cases that load torch only when they are tried, and a judge of tensors."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minivllm.exercises.checking import Case

if TYPE_CHECKING:
    from torch import Tensor


class LazyCases(Sequence[Case]):
    """Cases made by `build` when they are first looked at, so that a set can be listed without torch."""

    def __init__(self, build: Callable[[], Sequence[Case]]) -> None:
        self._build = build

    @cached_property
    def _cases(self) -> tuple[Case, ...]:
        return tuple(self._build())

    def __getitem__(self, index: Any) -> Any:
        return self._cases[index]

    def __len__(self) -> int:
        return len(self._cases)


def not_a_tensor(got: Any, name: str = "the answer") -> str | None:
    """What the answer is instead of a torch tensor; None if it is one."""
    import torch

    return None if isinstance(got, torch.Tensor) else f"{name} is a {type(got).__name__}, not a torch tensor"


def wrong_shape(expected: "Tensor", got: "Tensor", meaning: str, name: str = "the answer") -> str | None:
    """The two shapes, the right one with its meaning such as "[H, D]"; None if they are the same."""
    if got.shape == expected.shape:
        return None
    return f"{name} has the shape {list(got.shape)}, not {meaning} = {list(expected.shape)}"


def judge_tensor(expected: "Tensor", got: Any, meaning: str) -> str | None:
    """Whether the answer is a float tensor of the right shape; else what it is instead."""
    why = not_a_tensor(got) or wrong_shape(expected, got, meaning)
    if why is None and not got.is_floating_point():
        return f"the answer has the dtype {got.dtype}; it must be a float"
    return why


def numbers(values: "Tensor") -> str:
    """A row as text: whole numbers without a point."""
    return "[" + ", ".join(f"{value:.4g}" for value in values.flatten().tolist()) + "]"


def judge_parts(names: Sequence[str], expected: Sequence["Tensor"], got: Any) -> str | None:
    """Whether the answer is a tuple of as many float tensors, each of the right shape; else what it is instead."""
    import torch

    listed = ", ".join(names)
    if not isinstance(got, tuple):
        return f"the answer is a {type(got).__name__}, not the tuple ({listed})"
    if len(got) != len(names):
        return f"the answer has {len(got)} parts, not {len(names)}: ({listed})"
    for name, want, have in zip(names, expected, got, strict=True):
        if not isinstance(have, torch.Tensor):
            return f"{name} is a {type(have).__name__}, not a torch tensor"
        if have.shape != want.shape:
            return f"{name} has the shape {list(have.shape)}, not {list(want.shape)}"
        if not have.is_floating_point():
            return f"{name} has the dtype {have.dtype}; it must be a float"
    return None


def first_difference(expected: "Tensor", got: "Tensor") -> tuple[int, ...] | None:
    """The index of the first number that is not what it should be, None if there is none; infinities are equal."""
    import torch

    close = torch.isclose(got.detach().cpu().double(), expected.double(), rtol=1e-4, atol=1e-5)
    return None if close.all() else tuple((~close).nonzero()[0].tolist())


def show_parts(names: Sequence[str]) -> Callable[[Any], str]:
    """Write a tuple of tensors as one line a part: `m = [2.0]`."""

    def show(result: Any) -> str:
        parts = zip(names, result, strict=True)
        return "\n".join(f"{name} = {rounded(part.tolist())}" for name, part in parts)

    return show


def rounded(value: Any) -> Any:
    """Numbers to four digits after the point, also in lists of lists."""
    return [rounded(item) for item in value] if isinstance(value, list) else round(value, 4)
