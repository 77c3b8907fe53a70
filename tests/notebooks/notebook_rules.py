"""What every chapter has to have. A rule takes a notebook and returns complaints, in words, none if all is well."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
IGNORED = "nbval-ignore-output"

IGNORED_CELLS = {
    "00_tour": 1,
    "01_attention_and_the_kv_cache": 1,
    "02_paged_kv_cache": 1,
    "03_flash_attention": 1,
    "04_paged_attention": 1,
    "05_mla_and_flash_mla": 1,
    "06_three_kernels_side_by_side": 1,
    "07_gemm_backends": 1,
    "08_moe_and_custom_ops": 1,
    "09_scheduler": 1,
    "10_speculative_decoding": 1,
    "11_deepseek_mtp": 1,
    "12_pipeline_parallelism": 1,
}
"""Cells whose output is not compared, for each chapter: those that print times, memory or versions, and no others."""

MOST_LINES = 16
MOST_BYTES = 1_000_000

_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])/(?:home|root|Users|work|tmp|usr|opt|mnt|var)/|\b[A-Za-z]:\\\\?\w")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def chapters() -> list[Path]:
    """All chapters, in the order of the course."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def first_cell(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Title, badge, question, three abilities, prerequisites, times, modules."""
    cell = notebook.cells[0]
    if cell.cell_type != "markdown":
        yield "the first cell is not text"
        return
    number = path.stem[:2]
    if not re.match(rf"# {number} · \S", cell.source):
        yield f"the first cell does not begin with the title '# {number} · …'"
    if not re.search(rf"\[!\[[^]]+\]\([^)]+\)\]\(https://\S+/notebooks/{path.name}\)", cell.source):
        yield "no badge that opens this notebook in a hosted one"
    if not re.search(r"^\*\*The question:\*\* .+\?$", cell.source, re.MULTILINE):
        yield "the question is not one sentence with a question mark"
    abilities = re.search(r"^\*\*What you will be able to do\*\*\n\n((?:- .+\n)+)", cell.source, re.MULTILINE)
    if not abilities or abilities[1].count("\n") != 3:
        yield "what the reader will be able to do is not three bullets"
    for pattern, what in (
        (r"^\*\*Prerequisites:\*\* \S", "prerequisites"),
        (r"^\*\*Time:\*\* .*\d+ minutes to read.*\d+ seconds to run", "minutes to read and seconds to run"),
        (r"^\*\*What it opens:\*\* \[`.+\]\(\.\./minivllm/", "linked modules that it opens"),
    ):
        if not re.search(pattern, cell.source, re.MULTILINE):
            yield f"the first cell lacks {what}"


def setup_cell(_: Path, notebook: NotebookNode) -> Iterator[str]:
    """The first code cell installs the package where it is missing, and calls setup_notebook."""
    source = _code_cells(notebook)[0].source
    if not re.search(r'if importlib\.util\.find_spec\("minivllm"\) is None:.*\n +%pip install ', source):
        yield "the first code cell does not install the package, guarded, in a hosted notebook"
    if not re.search(r"^setup_notebook\(", source, re.MULTILINE):
        yield "the first code cell does not call setup_notebook"


def closing_sections(_: Path, notebook: NotebookNode) -> Iterator[str]:
    """Three questions with folded answers, a summary in five lines, where to read on: last, in this order."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    heads = ("## Check yourself", "## Summary", "## Where to read on")
    sections = [next((text for text in texts if text.startswith(head)), None) for head in heads]
    for head, section in zip(heads, sections, strict=True):
        if section is None:
            yield f"no section {head!r}"
    if None in sections:
        return
    if texts[-3:] != sections:
        yield "the closing sections are not the last three cells of text, in order"
    check, summary, _ = sections
    if len(re.findall(r"<details>\s*<summary>.*?</details>", check, re.DOTALL)) != 3:
        yield "'Check yourself' does not have three folded answers"
    if len(re.findall(r"^\d\. ", summary, re.MULTILINE)) != 5:
        yield "the summary is not five numbered lines"


def predictions(_: Path, notebook: NotebookNode) -> Iterator[str]:
    """The reader is asked to predict before something is measured."""
    if not any("**Predict" in cell.source for cell in notebook.cells if cell.cell_type == "markdown"):
        yield "no prediction before a measurement ('**Predict …**')"


def stored_outputs(_: Path, notebook: NotebookNode) -> Iterator[str]:
    """Run once, from top to bottom, without errors or warnings, and stored without times of its own."""
    cells = _code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        yield f"execution counts are {counts}: run it from top to bottom"
    if not any(cell.outputs for cell in cells):
        yield "no outputs are stored"
    for cell in cells:
        if any(output.output_type == "error" for output in cell.outputs):
            yield f"{cell.id} stores an error"
        if any(output.get("name") == "stderr" for output in cell.outputs):
            yield f"{cell.id} stores something from stderr"
        if "execution" in cell.metadata:
            yield f"{cell.id} stores when it ran: execute with --ExecutePreprocessor.record_timing=False"


def short_cells(_: Path, notebook: NotebookNode) -> Iterator[str]:
    for cell in _code_cells(notebook):
        num_lines = len(cell.source.splitlines())
        if num_lines > MOST_LINES:
            yield f"{cell.id} has {num_lines} lines of code, more than {MOST_LINES}"


def relative_paths(_: Path, notebook: NotebookNode) -> Iterator[str]:
    """Nothing that exists on one machine only, neither in the text nor in the outputs."""
    for cell in notebook.cells:
        outputs = [_text_of(output) for output in cell.get("outputs", [])]
        for text in (cell.source, *outputs):
            found = _ABSOLUTE_PATH.search(text)
            if found:
                yield f"{cell.id} holds an absolute path: …{text[found.start() : found.start() + 40]!r}"


def links(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Relative links lead to files; neighbours in the course that exist are linked."""
    targets = [target for cell in notebook.cells for target in _LINK.findall(_prose(cell))]
    local = [target.partition("#")[0] for target in targets if not re.match(r"\w+:|#", target)]
    for target in local:
        if not (path.parent / target).exists():
            yield f"the link to {target} leads nowhere"
    course = chapters()
    index = course.index(path)
    for neighbour in course[max(index - 1, 0) : index] + course[index + 1 : index + 2]:
        if neighbour.name not in local:
            yield f"no link to the neighbouring chapter {neighbour.name}"


def figures(_: Path, notebook: NotebookNode) -> Iterator[str]:
    """At least two, each with its alt text in the cell before and a sentence under it."""
    drawn = [i for i, cell in enumerate(notebook.cells) if any(_has_image(o) for o in cell.get("outputs", []))]
    if len(drawn) < 2:
        yield f"{len(drawn)} figures are stored; a chapter has at least two"
    for index in drawn:
        cell_id = notebook.cells[index].id
        if not re.search(r"\*Alt text: .{40,}\*$", _prose(notebook.cells[index - 1]), re.DOTALL):
            yield f"the cell before {cell_id} does not end with '*Alt text: …*'"
        after = notebook.cells[index + 1] if index + 1 < len(notebook.cells) else None
        if after is None or not re.match(r"\*What this figure shows:\* \S", _prose(after)):
            yield f"the cell after {cell_id} does not begin with '*What this figure shows:* …'"
        if "assert " not in notebook.cells[index].source:
            yield f"{cell_id} draws a figure, which is not compared, and asserts nothing about its data"


def ignored_outputs(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """As many as are known, each followed by a cell that asserts something."""
    cells = _code_cells(notebook)
    ignored = [index for index, cell in enumerate(cells) if IGNORED in cell.metadata.get("tags", [])]
    allowed = IGNORED_CELLS.get(path.stem, 0)
    if len(ignored) != allowed:
        yield f"{len(ignored)} cells carry {IGNORED}, {allowed} are known: is each of them needed?"
    for index in ignored:
        if not any("assert " in cell.source for cell in cells[index : index + 2]):
            yield f"{cells[index].id} is not compared, and neither it nor the next code cell asserts anything"


def size(path: Path, _: NotebookNode) -> Iterator[str]:
    num_bytes = path.stat().st_size
    if num_bytes >= MOST_BYTES:
        yield f"{num_bytes} bytes are too many: keep it under {MOST_BYTES}"


RULES = (
    first_cell,
    setup_cell,
    closing_sections,
    predictions,
    stored_outputs,
    short_cells,
    relative_paths,
    links,
    figures,
    ignored_outputs,
    size,
)


def _code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _prose(cell: NotebookNode) -> str:
    return cell.source if cell.cell_type == "markdown" else ""


def _has_image(output: NotebookNode) -> bool:
    return "image/png" in output.get("data", {})


def _text_of(output: NotebookNode) -> str:
    texts = [text for mime, text in output.get("data", {}).items() if mime.startswith("text/")]
    return "\n".join([output.get("text", ""), *texts, *output.get("traceback", [])])
