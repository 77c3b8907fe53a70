"""The shelf of exercise sets: each module `psNN.py` of this package, found by name, imported on demand."""

import difflib
import importlib
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

from minivllm.exercises.checking import Exercise, examine


def set_names() -> tuple[str, ...]:
    """The sets there are, in the order of the chapters: ("ps00", "ps01", ...)."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return tuple(sorted(module.name for module in modules if re.fullmatch(r"ps\d\d", module.name)))


def exercises_of(set_name: str) -> tuple[Exercise, ...]:
    """The exercises of one set, in the order of its notebook."""
    return importlib.import_module(f"minivllm.exercises.{set_name}").EXERCISES


def exercise_names() -> tuple[str, ...]:
    """Every name that `check` knows."""
    return tuple(exercise.name for set_name in set_names() for exercise in exercises_of(set_name))


def find(name: str) -> Exercise:
    """The exercise of this name; ValueError lists the known names when there is none."""
    set_name = name.partition(".")[0]
    if set_name in set_names():
        for exercise in exercises_of(set_name):
            if exercise.name == name:
                return exercise
    known = exercise_names()
    near = difflib.get_close_matches(name, known, n=1)
    question = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"there is no exercise {name!r}{question}; the exercises are: {', '.join(known)}")


def check(name: str, fn: Callable, *, hidden: bool = False) -> None:
    """Try `fn` on the exercise's inputs: one printed line if all is well, ExerciseFailure on the first fault.

    With `hidden=True` the edges come too: the inputs that a graded notebook adds out of sight.
    """
    print(examine(find(name), fn, hidden=hidden))
