"""Figures of a trace over its steps: what each request did, and what the token budget went to."""

from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from minivllm.engine.trace_views import Cell, Timeline
from minivllm.plotting.style import FAINT, INK, MUTED, PLATE, TOKEN_LOOKS

LABELS = {
    "prefill": "prefill",
    "recompute": "recomputed",
    "decode": "decode",
    "accepted": "draft verified",
    "rejected": "draft rejected",
    "preempted": "preempted",
}
_WAITING = {"color": MUTED, "linewidth": 1.5, "solid_capstyle": "butt"}
_MAX_STEPS_WITH_NUMBERS = 40
_MAX_ROWS_WITH_NAMES = 40


def request_timeline(view: Timeline, title: str) -> tuple[Figure, Axes]:
    """One row a request, one column a step, coloured by what was computed; cells of several tokens say how many.

    A verification is split into its parts: the decoded token, accepted drafts, rejected ones. A thin line is a request
    that waits for its first step.
    """
    num_rows, num_steps = len(view.req_ids), view.end - view.first
    fig, ax = plt.subplots(figsize=(7.0, min(8.0, 1.4 + 0.3 * num_rows)))
    used: set[str] = set()
    for cell in view.cells:
        used |= _draw_cell(ax, cell, with_number=num_steps <= _MAX_STEPS_WITH_NUMBERS)
    for wait in view.waits:
        if wait.after_preemption:
            width = wait.end - wait.first
            ax.add_patch(Rectangle((wait.first, wait.row - 0.18), width, 0.36, **TOKEN_LOOKS["preempted"]))
            used.add("preempted")
        else:
            ax.plot([wait.first, wait.end], [wait.row, wait.row], **_WAITING)
            used.add("waiting")
    ax.set(xlim=(view.first, max(view.end, view.first + 1)), ylim=(max(num_rows, 1) - 0.5, -0.5), title=title)
    number_steps(ax, view.first, view.end)
    if num_rows <= _MAX_ROWS_WITH_NAMES:
        ax.set_yticks(range(num_rows), view.req_ids)
    else:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel("request" if num_rows <= _MAX_ROWS_WITH_NAMES else "request, in order of arrival")
    ax.tick_params(axis="y", length=0)
    _add_legend(fig, used)
    return fig, ax


def _draw_cell(ax: Axes, cell: Cell, with_number: bool) -> set[str]:
    """One request in one step; returns the parts that were drawn."""
    parts = {part: count for part, count in cell.tokens.parts().items() if count}
    left = float(cell.step)
    for part, count in parts.items():
        width = count / cell.tokens.num_tokens
        ax.add_patch(Rectangle((left, cell.row - 0.4), width, 0.8, linewidth=0.6, **TOKEN_LOOKS[part]))
        left += width
    if with_number and len(parts) == 1 and cell.tokens.num_tokens > 1:
        place = (cell.step + 0.5, cell.row)
        ax.text(*place, cell.tokens.num_tokens, ha="center", va="center_baseline", size=8, bbox=PLATE)
    return set(parts)


def token_budget(
    tokens_by_part: Mapping[str, Sequence[int]], budget: int, title: str, first: int = 0
) -> tuple[Figure, Axes]:
    """What the tokens of each step were, stacked, under the budget.

    Args:
        tokens_by_part: for each part, tokens in each step (`trace_metrics.tokens_by_part`).
        budget: max_num_batched_tokens.
        first: number of the first step shown.
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.6))
    num_steps = max(map(len, tokens_by_part.values()), default=0)
    steps = [first + index + 0.5 for index in range(num_steps)]
    tops = [0] * num_steps
    used = [part for part, counts in tokens_by_part.items() if any(counts)]
    for part in used:
        bars = [bar for bar in zip(steps, tokens_by_part[part], tops, strict=True) if bar[1]]
        places, counts, bottoms = zip(*bars, strict=True)
        ax.bar(places, counts, bottom=bottoms, width=1.0, linewidth=0.4, **TOKEN_LOOKS[part])
        tops = [top + count for top, count in zip(tops, tokens_by_part[part], strict=True)]
    highest = max(tops, default=0)
    label = f"budget: {budget} tokens"
    if highest >= budget / 4:
        ax.axhline(budget, color=INK, linestyle="--", linewidth=1.5)
        ax.text(first + num_steps, budget * 1.03, label, ha="right", va="bottom", bbox=PLATE)
        ax.set_ylim(0, budget * 1.18)
    else:
        ax.set_ylim(0, max(highest, 1) * 1.25)
        ax.text(first + num_steps, max(highest, 1) * 1.24, f"{label}, far above", ha="right", va="top", bbox=PLATE)
    ax.set(xlim=(first, first + max(num_steps, 1)), ylabel="tokens computed in the step", title=title)
    number_steps(ax, first, first + num_steps)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    _add_legend(fig, used)
    return fig, ax


def number_steps(ax: Axes, first: int, end: int) -> None:
    """A step is the interval from its number to the next; its number stands in the middle."""
    stride = next((n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if (end - first) / n <= 20), 1000)
    shown = [step for step in range(first, end) if step % stride == 0]
    ax.set_xticks([step + 0.5 for step in shown], shown)
    ax.set_xlabel("engine step")
    ax.set_axisbelow(True)
    ax.grid(axis="x", color=FAINT, linewidth=0.5)


def _add_legend(fig: Figure, parts: Collection[str]) -> None:
    handles: list[Artist] = [Patch(**TOKEN_LOOKS[part], label=LABELS[part]) for part in LABELS if part in parts]
    if "waiting" in parts:
        handles.append(Line2D([], [], **_WAITING, label="waiting"))
    if handles:
        num_columns = len(handles) if len(handles) <= 5 else (len(handles) + 1) // 2
        fig.legend(handles=handles, loc="outside lower left", ncols=num_columns, frameon=False, columnspacing=1.2)
