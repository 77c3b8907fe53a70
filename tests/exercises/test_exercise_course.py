"""The course as an instructor runs it: notebooks in step with each other, and grades that are deserved.

All of it holds for every set found in `notebooks/exercises/source/`. nbgrader runs in a copy of the course,
by the commands of the instructor's guide.
"""

import contextlib
import copy
import csv
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from classroom import COURSE, assignments, grade_cells, grade_id, read_notebook, set_of, wrong_answers
from nbclient import NotebookClient
from nbgrader.api import Gradebook

from minivllm.exercises import ExerciseFailure, check, exercises_of, set_names

pytestmark = pytest.mark.parametrize("assignment", assignments(), scope="session")

REPOSITORY = COURSE.parents[1]
STUDENTS = ("right", "careless", "wrong", "tampered")


def passes(name: str, fn: Callable, *, hidden: bool) -> bool:
    """Whether a check lets this answer through."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            check(name, fn, hidden=hidden)
        except ExerciseFailure:
            return False
    return True


def cell_of(notebook: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    """The cell with this grade_id."""
    (cell,) = (cell for cell in notebook.cells if grade_id(cell) == name)
    return cell


def answer_cells(assignment: str, notebook: nbformat.NotebookNode) -> dict[str, nbformat.NotebookNode]:
    """For each exercise of the set, the cell that a student fills in: its grade_id is the exercise's name."""
    names = [exercise.name for exercise in exercises_of(set_of(assignment))]
    return {name: cell_of(notebook, name.replace(".", "-")) for name in names}


def write_answer(cell: nbformat.NotebookNode, name: str, fn: Callable) -> None:
    """Fill a student's cell in with this function."""
    cell.source = f"{inspect.getsource(fn)}\n\n{name.partition('.')[2]} = {fn.__name__}"


def answers_of_the_wrong_student(assignment: str) -> dict[str, Callable]:
    """Half right in the first exercise (the visible cases pass), wrong in all others."""
    chosen: dict[str, Callable] = {}
    for name, answers in wrong_answers(set_of(assignment)).items():
        half_right = not chosen
        chosen[name] = next(fn for fn, _ in answers if passes(name, fn, hidden=False) == half_right)
    return chosen


def submission(student: str, assignment: str, release: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """What this student hands in."""
    notebook = copy.deepcopy(release)
    cells = answer_cells(assignment, notebook)
    if student in ("right", "careless"):
        for name, cell in answer_cells(assignment, read_notebook("source", assignment)).items():
            cells[name].source = cell.source
        if student == "careless":
            notebook.cells.remove(grade_cells(notebook)[-1])
        return notebook
    for name, fn in answers_of_the_wrong_student(assignment).items():
        write_answer(cells[name], name, fn)
    if student == "tampered":
        for cell in cells.values():
            cell.source += "\n\n\ndef check(name, fn, hidden=False):\n    print(name, 'passes')"
        first, *_, last = grade_cells(notebook)
        for cell in grade_cells(notebook):
            cell.source = "print('all cases pass')"
        first.metadata.nbgrader.points = 1000
        notebook.cells.remove(last)
    return notebook


@dataclass(frozen=True)
class GradedCourse:
    """A copy of the course in which one set was released, handed in, graded and exported."""

    folder: Path
    assignment: str

    def exported(self) -> dict[str, tuple[float, float]]:
        """student -> (score, best possible score), as the exported table has it."""
        with (self.folder / "grades.csv").open(newline="") as file:
            return {row["student_id"]: (float(row["score"]), float(row["max_score"])) for row in csv.DictReader(file)}

    def cell_scores(self, student: str) -> dict[str, float]:
        """grade_id -> points."""
        with Gradebook(f"sqlite:///{self.folder / 'gradebook.db'}") as gradebook:
            notebook = gradebook.find_submission_notebook(set_of(self.assignment), self.assignment, student)
            return {grade.name: grade.score for grade in notebook.grades}


@pytest.fixture(scope="session")
def graded(assignment, tmp_path_factory) -> GradedCourse:
    folder = tmp_path_factory.mktemp("course")
    home = tmp_path_factory.mktemp("home")  # a reader's own Jupyter settings must not decide a grade
    shutil.copy(COURSE / "nbgrader_config.py", folder)
    shutil.copytree(COURSE / "source" / assignment, folder / "source" / assignment)
    environment = os.environ | {
        # nbgrader calls `alembic` by its bare name to make the gradebook.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": str(REPOSITORY),
        "JUPYTER_CONFIG_DIR": str(home),
        "IPYTHONDIR": str(home / "ipython"),
    }

    def nbgrader(*arguments: str) -> None:
        command = [sys.executable, "-m", "nbgrader", *arguments]
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr

    nbgrader("generate_assignment", assignment, "--force")
    release = read_notebook("release", assignment, folder)
    for student in STUDENTS:
        path = folder / "submitted" / student / assignment / f"{set_of(assignment)}.ipynb"
        path.parent.mkdir(parents=True)
        nbformat.write(submission(student, assignment, release), path)
    nbgrader("autograde", assignment)
    nbgrader("export", "--to", "grades.csv")
    return GradedCourse(folder, assignment)


def test_a_set_has_a_module_of_its_own_name(assignment):
    assert set_of(assignment) in set_names()


def test_the_first_cell_says_what_the_set_is_for(assignment):
    first = read_notebook("source", assignment).cells[0].source
    assert first.startswith("# Set ")
    for heading in (
        "The question:",
        "What you will be able to do",
        "Prerequisites:",
        "Time:",
        "What it opens:",
    ):
        assert f"**{heading}**" in first
    abilities = first.partition("**What you will be able to do**")[2].partition("**Prerequisites")[0]
    assert len(re.findall(r"^- ", abilities, flags=re.MULTILINE)) == 3


@pytest.mark.parametrize("version", ["source", "release"])
def test_every_link_leads_somewhere(assignment, version):
    for cell in read_notebook(version, assignment).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)]+)\)", cell.source):
                assert (COURSE / version / assignment / target).exists(), target


def test_every_exercise_has_a_spec_an_example_a_hint_and_two_tests(assignment):
    notebook = read_notebook("source", assignment)
    sections = re.split(r"^## \d+\. ", "\n".join(cell.source for cell in notebook.cells), flags=re.MULTILINE)[1:]
    for exercise, section in zip(exercises_of(set_of(assignment)), sections, strict=True):
        assert all(f"**{part}" in section for part in ("Spec", "Shapes.", "Example.", "At the edges:"))
        assert "$$" in section
        assert "<details>" in section
        signature = inspect.signature(exercise.oracle)
        stub = section.partition(f"def {exercise.oracle.__name__}(")[2].partition(":\n")[0]
        assert all(f"{parameter}: " in stub for parameter in signature.parameters)
        assert " -> " in stub
        visible = cell_of(notebook, exercise.name.replace(".", "-") + "-visible").source
        edges = cell_of(notebook, exercise.name.replace(".", "-") + "-edges").source
        call = f'check("{exercise.name}", {exercise.oracle.__name__}'
        assert f"{call})" in visible
        assert "HIDDEN" not in visible
        assert f"### BEGIN HIDDEN TESTS\n{call}, hidden=True)\n### END HIDDEN TESTS" in edges


def test_every_test_cell_fetches_the_check_anew(assignment):
    for cell in grade_cells(read_notebook("source", assignment)):
        assert cell.source.startswith("from minivllm.exercises import check\n")


def test_a_set_has_a_piece_from_the_bug_museum_that_its_check_rejects(assignment):
    notebook = read_notebook("source", assignment)
    before_it = []
    exhibits = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and not cell.metadata.get("nbgrader", {}).get("grade"):
            before_it.append(cell.source)
            if "exhibit" in cell.metadata.get("tags", []):
                exhibits.append((grade_id(cell).removesuffix("-exhibit"), list(before_it)))
    assert exhibits
    for name, sources in exhibits:
        namespace: dict = {}
        for source in sources:
            exec(source, namespace)
        with pytest.raises(ExerciseFailure, match="why:"):
            check(name.replace("-", "."), namespace[name.partition("-")[2] + "_as_found"])


def test_the_committed_release_is_what_nbgrader_makes_of_the_source(assignment, graded):
    def content(notebook: nbformat.NotebookNode) -> list[tuple]:
        return [(cell.cell_type, cell.id, cell.source, cell.metadata) for cell in notebook.cells]

    committed = read_notebook("release", assignment)
    generated = read_notebook("release", assignment, graded.folder)
    assert content(committed) == content(generated), (
        f"out of step: run `nbgrader generate_assignment {assignment} --force` in notebooks/exercises"
    )


def test_the_release_gives_nothing_away(assignment):
    release = read_notebook("release", assignment)
    text = "\n".join(cell.source for cell in release.cells)
    assert "SOLUTION" not in text
    assert "HIDDEN" not in text
    for cell in answer_cells(assignment, release).values():
        assert cell.source.endswith("    # YOUR CODE HERE\n    raise NotImplementedError()")


@pytest.mark.parametrize("version", ["source", "release"])
def test_notebooks_are_kept_without_outputs(assignment, version):
    for cell in read_notebook(version, assignment).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_source_notebook_runs_from_top_to_bottom(assignment):
    notebook = read_notebook("source", assignment)
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    printed = [output for cell in grade_cells(notebook) for output in cell.outputs]
    assert all(output.output_type == "stream" and output.name == "stdout" for output in printed)


def test_every_test_cell_of_the_release_fails_until_its_exercise_is_solved(assignment):
    notebook = read_notebook("release", assignment)
    NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True).execute()
    for cell in grade_cells(notebook):
        (error,) = (output for output in cell.outputs if output.output_type == "error")
        assert error.ename == "ExerciseFailure"
        assert "is not written yet" in error.evalue
        assert len(error.traceback) == 1, "the reader sees the message, not the checker's frames"


def test_the_right_student_gets_every_point(assignment, graded):
    score, best = graded.exported()["right"]
    assert (
        score == best == sum(cell.metadata.nbgrader.points for cell in grade_cells(read_notebook("source", assignment)))
    )


def test_right_answers_get_every_point_even_if_a_test_cell_was_deleted_by_accident(assignment, graded):
    assert graded.exported()["careless"] == graded.exported()["right"]


def test_the_wrong_student_gets_the_points_of_the_cells_that_pass_and_no_others(assignment, graded):
    points = {
        grade_id(cell): cell.metadata.nbgrader.points for cell in grade_cells(read_notebook("source", assignment))
    }
    earned = {}
    for name, fn in answers_of_the_wrong_student(assignment).items():
        for suffix, hidden in (("-visible", False), ("-edges", True)):
            cell = name.replace(".", "-") + suffix
            earned[cell] = points[cell] if passes(name, fn, hidden=hidden) else 0
    assert graded.cell_scores("wrong") == earned
    assert 0 < graded.exported()["wrong"][0] == sum(earned.values()) < sum(points.values())


def test_the_student_who_tampered_with_the_tests_gets_what_the_same_answers_get_untampered(assignment, graded):
    assert graded.cell_scores("tampered") == graded.cell_scores("wrong")
    assert graded.exported()["tampered"] == graded.exported()["wrong"]


def test_the_instructors_guide_lists_every_exercise_with_its_points(assignment):
    guide = (COURSE / "INSTRUCTOR_GUIDE.md").read_text()
    notebook = read_notebook("source", assignment)
    for exercise in exercises_of(set_of(assignment)):
        cell = exercise.name.replace(".", "-")
        visible, edges = (
            cell_of(notebook, cell + suffix).metadata.nbgrader.points for suffix in ("-visible", "-edges")
        )
        assert re.search(rf"^\| `{re.escape(exercise.name)}` \| {visible} \+ {edges} \| \d+ \|", guide, re.MULTILINE)


def test_the_guide_quotes_the_checker_word_for_word(assignment):
    guide = (COURSE / "INSTRUCTOR_GUIDE.md").read_text()
    section = guide.partition(f"\n## {assignment}\n")[2].partition("\n## ")[0]
    quotes = re.findall(r'"([^"]+?)(?: …)?"', section)
    messages = []
    for name, answers in wrong_answers(set_of(assignment)).items():
        for fn, _ in answers:
            with pytest.raises(ExerciseFailure) as caught:
                check(name, fn, hidden=True)
            messages.append(str(caught.value))
    assert len(quotes) >= 3 * len(exercises_of(set_of(assignment)))
    for quote in quotes:
        assert any(quote in message for message in messages), quote
