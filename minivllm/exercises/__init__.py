"""The classroom: `check("ps00.slot_mapping", slot_mapping)` says whether a reader's function is right.

Each chapter of the course ends in a set of exercises (`notebooks/exercises/`) that rebuild what the chapter
showed. A set's inputs and oracle answers live here in a module of its own (`ps00.py`, `ps01.py`, ...), so
that the same check serves plain Jupyter, a hosted notebook and a graded course: a notebook's visible test
calls `check(name, fn)`, its hidden test `check(name, fn, hidden=True)`.

What holds for every check:

- the first input that fails is shown with what was expected, what came, why that is wrong, and a hint;
- each call gets inputs of its own, and a function that changes them is told so;
- nothing of the engine is imported, and torch only by the exercises that need it.

To add a set, write `psNN.py` with a tuple `EXERCISES`; it is found by its name.
"""

from minivllm.exercises.checking import Case, Exercise, ExerciseFailure
from minivllm.exercises.registry import check, exercise_names, exercises_of, find, set_names

__all__ = [
    "Case",
    "Exercise",
    "ExerciseFailure",
    "check",
    "exercise_names",
    "exercises_of",
    "find",
    "set_names",
]
