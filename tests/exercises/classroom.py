"""The course as the tests see it: its sets, its notebooks, and the wrong answers collected for each."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat

COURSE = Path(__file__).parents[2] / "notebooks" / "exercises"


def assignments() -> list[str]:
    """The folders of the course, one a set: ["ps00_warm_up", ...]."""
    return sorted(path.name for path in (COURSE / "source").iterdir() if path.is_dir())


def set_of(assignment: str) -> str:
    """ps00_warm_up -> ps00, the name of its module, its notebook, and its exercises' prefix."""
    return assignment.partition("_")[0]


def read_notebook(version: str, assignment: str, course: Path = COURSE) -> nbformat.NotebookNode:
    """One notebook of the course; version is "source" or "release"."""
    return nbformat.read(course / version / assignment / f"{set_of(assignment)}.ipynb", as_version=4)


def grade_id(cell: nbformat.NotebookNode) -> str:
    """The name that nbgrader knows a cell by, "" where it does not."""
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def grade_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that earn points."""
    return [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade")]


def wrong_answers(set_name: str) -> dict[str, list[tuple[Callable, str]]]:
    """For each exercise of a set: typical wrong answers, and words of the message that each must get."""
    path = Path(__file__).parent / "wrong_answers" / f"{set_name}.py"
    spec = importlib.util.spec_from_file_location(f"wrong_answers_{set_name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG_ANSWERS


def solved_sheet(assignment: str) -> dict:
    """All that the instructor's sheet defines, graded cells aside."""
    namespace: dict = {}
    for cell in read_notebook("source", assignment).cells:
        if cell.cell_type == "code" and not cell.metadata.get("nbgrader", {}).get("grade"):
            exec(cell.source, namespace)
    return namespace


def checks_and_what_they_load(problem_set: str) -> tuple[list[str], str]:
    """Checks a set's oracles in a process of its own: what that printed, and what it loaded of torch and engine."""
    script = f"""
import sys
from minivllm.exercises import check, exercises_of
for exercise in exercises_of("{problem_set}"):
    check(exercise.name, exercise.oracle, hidden=True)
print(*(name for name in sys.modules if name == "torch" or name.startswith("minivllm.engine")))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *checked, loaded = run.stdout.splitlines()
    return checked, loaded
