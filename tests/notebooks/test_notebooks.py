"""Every chapter keeps the rules, and the rules notice a chapter that does not."""

import configparser
import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_output
from notebook_rules import IGNORED, IGNORED_CELLS, RULES, chapters, read

TOUR = next(path for path in chapters() if path.stem == "00_tour")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", chapters(), ids=lambda path: path.stem)
def test_chapter_keeps_the_rule(path: Path, rule: Callable):
    assert list(rule(path, read(path))) == []


def test_only_existing_chapters_have_ignored_cells():
    assert set(IGNORED_CELLS) <= {path.stem for path in chapters()}


def replace_in_first(old: str, new: str) -> Callable[[NotebookNode], None]:
    def spoil(notebook: NotebookNode) -> None:
        assert re.search(old, notebook.cells[0].source), old
        notebook.cells[0].source = re.sub(old, new, notebook.cells[0].source)

    return spoil


def find(notebook: NotebookNode, text: str) -> NotebookNode:
    return next(cell for cell in notebook.cells if text in cell.source)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def drop(text: str) -> Callable[[NotebookNode], None]:
    return lambda notebook: notebook.cells.remove(find(notebook, text))


def replace_in_cell(text: str, new: str) -> Callable[[NotebookNode], None]:
    def spoil(notebook: NotebookNode) -> None:
        cell = find(notebook, text)
        cell.source = cell.source.replace(text, new)

    return spoil


def add_output(**fields: object) -> Callable[[NotebookNode], None]:
    return lambda notebook: code(notebook)[1].outputs.append(new_output(**fields))


SPOILED = [
    ("does not begin with the title", replace_in_first(r"# 00 · ", "# ")),
    ("no badge", replace_in_first(r"notebooks/00_tour\.ipynb", "notebooks/01_other.ipynb")),
    ("the question", replace_in_first(r"\*\*The question:\*\*", "We ask")),
    ("three bullets", replace_in_first(r"\n- [^\n]+\n\n", "\n\n")),
    ("lacks prerequisites", replace_in_first(r"Prerequisites", "Needs")),
    ("lacks minutes", replace_in_first(r"\d+ seconds", "some seconds")),
    ("lacks linked modules", replace_in_first(r"\*\*What it opens:\*\*", "It opens")),
    ("the first cell is not text", lambda notebook: notebook.cells.pop(0)),
    ("does not install the package", replace_in_cell("    %pip install", "    # %pip install")),
    ("does not call setup_notebook", replace_in_cell("\nsetup_notebook(", "\nset_up(")),
    ("no section '## Summary'", drop("## Summary")),
    ("not the last three", lambda notebook: notebook.cells.append(notebook.cells.pop(-2))),
    ("three folded answers", replace_in_cell("<details>", "<section>")),
    ("five numbered lines", replace_in_cell("\n5. ", "\n")),
    ("execution counts are", lambda notebook: notebook.cells.remove(code(notebook)[3])),
    ("no outputs are stored", lambda notebook: [cell.update(outputs=[]) for cell in code(notebook)]),
    ("stores an error", add_output(output_type="error", ename="E", evalue="", traceback=[])),
    ("something from stderr", add_output(output_type="stream", name="stderr", text="a warning")),
    ("stores when it ran", lambda notebook: code(notebook)[0].metadata.update(execution={})),
    ("lines of code", lambda notebook: code(notebook)[2].update(source="pass\n" * 17)),
    ("an absolute path", add_output(output_type="stream", name="stdout", text="in /home/me/x.py")),
    ("an absolute path", replace_in_cell("## Summary", "## Summary\n\nSee C:\\Users\\me")),
    ("leads nowhere", replace_in_cell("../minivllm/engine/core.py", "../minivllm/engine/hart.py")),
    ("at least two", lambda notebook: [c.update(outputs=[]) for c in code(notebook) if "plt.show()" in c.source]),
    ("does not end with '*Alt text", replace_in_cell("*Alt text: ", "*")),
    ("does not begin with '*What this figure", replace_in_cell("*What this figure shows:*", "It shows")),
    ("asserts nothing about its data", replace_in_cell("\nassert candidates", "\ncandidates")),
    ("are known", lambda notebook: code(notebook)[2].metadata.update(tags=[IGNORED])),
    ("asserts anything", replace_in_cell("\nassert (runner", "\n(runner")),
]


@pytest.mark.parametrize(("complaint", "spoil"), SPOILED, ids=[f"{i}-{s[0]}" for i, s in enumerate(SPOILED)])
def test_a_spoiled_chapter_is_noticed(complaint: str, spoil: Callable[[NotebookNode], None]):
    notebook = copy.deepcopy(read(TOUR))
    spoil(notebook)
    complaints = [text for rule in RULES for text in rule(TOUR, notebook)]
    assert any(complaint in text for text in complaints), complaints


def test_a_chapter_without_predictions_is_noticed():
    notebook = read(TOUR)
    for cell in notebook.cells:
        cell.source = cell.source.replace("**Predict", "**Guess")
    assert any("no prediction" in text for rule in RULES for text in rule(TOUR, notebook))


def test_neighbouring_chapters_must_be_linked(monkeypatch: pytest.MonkeyPatch):
    import notebook_rules

    monkeypatch.setattr(notebook_rules, "chapters", lambda: [TOUR, TOUR.with_name("01_next.ipynb")])
    assert any("neighbouring chapter 01_next" in text for text in notebook_rules.links(TOUR, read(TOUR)))


def test_a_large_notebook_is_noticed(tmp_path: Path):
    import notebook_rules

    path = tmp_path / "00_tour.ipynb"
    path.write_bytes(b" " * 1_000_000)
    assert "too many" in next(notebook_rules.size(path, read(TOUR)))


def sanitise(text: str) -> str:
    """What nbval does with the sanitising file."""
    config = configparser.RawConfigParser()
    config.read(Path(__file__).parents[1] / "nbval_sanitize.cfg")
    for section in config.sections():
        text = re.sub(config.get(section, "regex"), config.get(section, "replace"), text)
    return text


@pytest.mark.parametrize(
    ("one_run", "another"),
    [
        ("<Thing at 0x7f30a1b2c3d0>", "<Thing at 0x7f99f0e1d2c0>"),
        ("/tmp/ipykernel_12/345.py:3: Warning", "/tmp/ipykernel_99/345678.py:3: Warning"),
        ("`minivllm/engine/scheduler.py:157`", "`minivllm/engine/scheduler.py:160`"),
    ],
)
def test_what_differs_between_two_right_runs_is_sanitised(one_run: str, another: str):
    assert sanitise(one_run) == sanitise(another)


@pytest.mark.parametrize(
    "text", ["1024 bytes, 3.5 ms, 12.0 GB/s", "slots [0, 1, 2], 0x10", "block_table [7 2 9]", "minivllm/engine, 5:1"]
)
def test_numbers_and_results_are_not_sanitised(text: str):
    assert sanitise(text) == text
