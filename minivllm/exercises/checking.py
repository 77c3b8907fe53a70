"""How an answer is examined: what an exercise is made of, and what a reader is told when the answer is wrong.

An exercise is an oracle (the right answer in a few readable lines), cases (inputs, the telling ones first)
and a judge, which compares two results and puts the difference into the reader's terms ("the token at
position 4 belongs in slot 8"). Everything that can go wrong *around* an answer is dealt with here, once for
all sets: a function that is not written yet, that raises, returns nothing, or changes its inputs.
"""

import copy
import inspect
import textwrap
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_SHOWN = 800  # characters of one value in a message; an answer may be wrong by being endless


class ExerciseFailure(AssertionError):
    """An answer is wrong; the message says on which input, what was expected, what came, why, and a hint."""

    def _render_traceback_(self) -> list[str]:
        # IPython calls this: a reader wants the message, not the way through the checker.
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Case:
    """One input of an exercise. A hidden one belongs to the edges; a hint replaces the exercise's own."""

    args: tuple
    hint: str = ""
    hidden: bool = False


@dataclass(frozen=True)
class Exercise:
    """A question with a known answer.

    `judge(expected, got, inputs)` returns None when `got` is right, else a sentence that says why it is not;
    `inputs` maps parameter names to values. `show` writes a result into a message.
    """

    name: str
    oracle: Callable
    judge: Callable[[Any, Any, Mapping[str, Any]], str | None]
    cases: tuple[Case, ...]
    hint: str
    show: Callable[[Any], str] = repr

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the inputs, as the oracle calls them."""
        return tuple(inspect.signature(self.oracle).parameters)


def examine(exercise: Exercise, fn: Callable, *, hidden: bool) -> str:
    """Run the cases in order: a line that says how many pass, or ExerciseFailure on the first fault."""
    if not callable(fn):
        raise ExerciseFailure(
            f"{exercise.name}: check takes the function itself, not a call of it; it got {clip(repr(fn))}"
        )
    cases = [case for case in exercise.cases if hidden or not case.hidden]
    for case in cases:
        _examine_case(exercise, case, fn)
    if hidden:
        return f"{exercise.name}: all {len(cases)} cases pass, the edges too"
    edges = len(exercise.cases) - len(cases)
    return f"{exercise.name}: {len(cases)} cases pass ({edges} more at the edges: hidden=True)"


def _examine_case(exercise: Exercise, case: Case, fn: Callable) -> None:
    expected = exercise.oracle(*copy.deepcopy(case.args))
    inputs = dict(zip(exercise.parameters, case.args, strict=True))
    given = copy.deepcopy(case.args)
    hint = case.hint or exercise.hint

    def failure(got: str, why: str) -> ExerciseFailure:
        return ExerciseFailure(_message(exercise, inputs, expected, got, why, hint))

    try:
        got = fn(*given)
    except Exception as error:
        if isinstance(error, NotImplementedError) and not error.args:  # torch raises it, too, but says why
            raise ExerciseFailure(f"{exercise.name} is not written yet: put your code in place of the stub") from None
        raise failure(f"{type(error).__name__}: {error}", f"it raised an error{_origin(error)}") from error
    for name, before, after in zip(exercise.parameters, case.args, given, strict=True):
        if not same_value(before, after):
            raise failure(
                _shown(exercise, got),
                f"it changed its input {name} to {clip(repr(after))}; the caller still needs the old one",
            )
    if got is None:
        raise failure("None", "it returned nothing; is the `return` missing?")
    why = exercise.judge(expected, got, inputs)
    if why is not None:
        raise failure(_shown(exercise, got), why)


def _shown(exercise: Exercise, got: Any) -> str:
    """A wrong answer may be of a kind that `show` cannot write."""
    try:
        return exercise.show(got)
    except Exception:
        return repr(got)


def _origin(error: Exception) -> str:
    """Where in the reader's function an error came up: the innermost frame below the checker's own."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f" in line {frames[-1].lineno}: {frames[-1].line}" if frames and frames[-1].line else ""


def _message(exercise: Exercise, inputs: Mapping[str, Any], expected: Any, got: str, why: str, hint: str) -> str:
    width = max(len(name) for name in inputs)
    lines = [f"{exercise.name} fails on this input:"]
    lines += [f"    {name:<{width}} = {clip(repr(value))}" for name, value in inputs.items()]
    for label, text in (("expected", exercise.show(expected)), ("got", got), ("why", why), ("hint", hint)):
        first, *more = clip(text).splitlines() or [""]
        lines.append(f"{label + ':':<10}{first}")
        lines += [textwrap.indent(line, " " * 10) for line in more]
    return "\n".join(lines)


def clip(text: str) -> str:
    """The text, or its beginning where it is too long to read."""
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + " ..."


def same_value(a: Any, b: Any) -> bool:
    """Whether two inputs are equal by value, inside containers too, and for tensors, whose == is a tensor."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if hasattr(a, "shape") and hasattr(a, "dtype"):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if getattr(a, "is_meta", False):
            return True  # a tensor without numbers has no more to compare
        both_nan = (a != a) & (b != b)
        return bool(((a == b) | both_nan).all())
    return bool(a == b)


def plural(count: int, noun: str) -> str:
    """1 block, 2 blocks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
