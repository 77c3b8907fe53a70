"""Figures of chapter 12: what a stage holds, who works when, how busy a pipeline is, and what crosses between ranks."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import NullLocator, PercentFormatter

from minivllm.engine.stage_timeline import StageTimeline
from minivllm.plotting.style import FAINT, HIGHLIGHT, INK, KERNEL_COLOURS, MUTED, PLATE, request_colour

_ENDS = ("embedding", "norm, head", "sampler", "drafter")
_MARKERS = ("o", "s", "^", "D")


def stage_contents(contents: Sequence[Sequence[str]], feedback: str, title: str) -> tuple[Figure, Axes]:
    """A column a stage, a box for each thing it holds, in the order of a forward pass; the token's way back below.

    Args:
        contents: names, for each stage; "embedding", "norm, head", "sampler" and "drafter" are set apart from layers.
        feedback: what stands on the arrow from the last stage back to the first.
    """
    height = max(len(names) for names in contents)
    fig, ax = plt.subplots(figsize=(7.0, 1.7 + 0.34 * height))
    for stage, names in enumerate(contents):
        x = 1.5 * stage
        ax.text(x + 0.5, height + 0.45, f"stage {stage}", ha="center", va="center", weight="bold")
        ax.add_patch(Rectangle((x - 0.06, -0.08), 1.12, height + 0.16, facecolor="none", edgecolor=MUTED))
        for place, name in enumerate(names):
            look = {"facecolor": KERNEL_COLOURS["paged"]} if name in _ENDS else {"facecolor": FAINT}
            bottom = height - 1 - place
            ax.add_patch(Rectangle((x, bottom + 0.06), 1.0, 0.88, edgecolor="white", **look))
            ax.text(x + 0.5, bottom + 0.5, name, ha="center", va="center_baseline", size=9)
        if stage:
            middle = height / 2
            ax.add_patch(_arrow((x - 0.42, middle), (x - 0.08, middle), INK))
            ax.text(x - 0.25, middle + 0.25, "hidden", ha="center", va="bottom", size=8)
    end = 1.5 * (len(contents) - 1) + 0.5
    for start, stop, style in (((end, -0.12), (end, -0.75), "-"), ((end, -0.75), (0.5, -0.75), "-")):
        ax.plot(*zip(start, stop, strict=True), style, color=HIGHLIGHT, linewidth=2)
    ax.add_patch(_arrow((0.5, -0.77), (0.5, -0.1), HIGHLIGHT))
    ax.text((0.5 + end) / 2, -0.75, feedback, ha="center", va="center", color=HIGHLIGHT, weight="bold", bbox=PLATE)
    ax.set(xlim=(-0.15, end + 0.65), ylim=(-1.15, height + 0.8), title=title)
    ax.axis("off")
    return fig, ax


def _arrow(start: tuple[float, float], end: tuple[float, float], colour: str) -> FancyArrowPatch:
    return FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour, linewidth=1.5)


def stage_timelines(
    timelines: Mapping[str, StageTimeline], batches: Mapping[str, Mapping[int, str]], until: float, title: str
) -> tuple[Figure, Axes]:
    """A row a stage, a box for each step that it runs, coloured and named by its batch; hatched where it waits.

    Args:
        timelines: label -> timeline; times are shown as they are.
        batches: label -> the name of each step's batch; a batch keeps its colour.
        until: where the axis ends.
    """
    num_rows = sum(timeline.num_stages + 1.3 for timeline in timelines.values())
    fig, ax = plt.subplots(figsize=(7.0, 1.0 + 0.36 * num_rows))
    rows: dict[float, str] = {}
    top = 0.0
    for label, timeline in timelines.items():
        names = batches[label]
        order = list(dict.fromkeys(names.values()))
        ax.text(0, top + 0.5, label, ha="left", va="center", weight="bold")
        for stage in range(timeline.num_stages):
            bottom = top + 1 + stage
            rows[bottom + 0.5] = f"stage {stage}"
            end = min(until, max(run.end for run in timeline.runs))
            ax.add_patch(
                Rectangle(
                    (0, bottom + 0.06), end, 0.88, facecolor="white", edgecolor=MUTED, hatch="////", linewidth=0.6
                )
            )
            for run in timeline.runs:
                if run.stage == stage and run.start < until:
                    width, name = min(run.end, until) - run.start, names[run.step]
                    colour = request_colour(order.index(name))
                    ax.add_patch(
                        Rectangle(
                            (run.start, bottom + 0.06), width, 0.88, facecolor=colour, edgecolor="white", linewidth=1.2
                        )
                    )
                    ax.text(
                        run.start + width / 2, bottom + 0.5, name, ha="center", va="center_baseline", size=9, bbox=PLATE
                    )
        top += timeline.num_stages + 1.3
    ax.set_yticks(list(rows), list(rows.values()))
    ax.set(xlim=(0, until), ylim=(top - 0.2, -0.1), title=title)
    ax.set_xlabel("time, in seconds of the timeline (hatched: a bubble)")
    ax.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return fig, ax


def utilisation_lines(
    measured: Mapping[int, Mapping[int, float]], formula: Mapping[int, Mapping[int, float]], title: str
) -> tuple[Figure, Axes]:
    """The part of the time that stages work, over the batches in flight: points measured, lines by the formula.

    Args:
        measured, formula: stages -> batches in flight -> utilisation, 0 to 1.
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.6))
    for index, (num_stages, values) in enumerate(measured.items()):
        colour = request_colour(index)
        curve = formula[num_stages]
        ax.plot(list(curve), list(curve.values()), "-", color=colour, linewidth=2)
        ax.plot(list(values), list(values.values()), _MARKERS[index % 4], color=colour, markersize=8, zorder=3)
        first = min(curve)
        label = f"{num_stages} stages" if num_stages > 1 else "1 stage"
        ax.annotate(
            label, (first, curve[first]), (-8, 0), textcoords="offset points", ha="right", va="center", weight="bold"
        )
    most = max(max(curve) for curve in formula.values())
    ax.set_xticks(range(1, most + 1))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlim=(-0.4, most + 0.25), ylim=(0, 1.08), title=title)
    ax.set(xlabel="batches in flight (points: measured on the timeline; lines: formula)", ylabel="stages at work")
    return fig, ax


def traffic_lines(
    num_ranks: Sequence[int], lines: Mapping[str, Sequence[tuple[int, float]]], title: str
) -> tuple[Figure, Axes]:
    """Megabytes over one rank's link in a step, over the number of ranks; beside each point, how many exchanges.

    Args:
        lines: label -> for each number of ranks, (exchanges, megabytes).
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.6))
    for index, (label, points) in enumerate(lines.items()):
        colour = (KERNEL_COLOURS["paged"], KERNEL_COLOURS["flash"])[index % 2]
        values = [megabytes for _, megabytes in points]
        ax.plot(num_ranks, values, "-", marker=_MARKERS[index], color=colour, linewidth=2, markersize=8)
        for x, (exchanges, megabytes) in zip(num_ranks, points, strict=True):
            words = f"{exchanges} exchange{'s' * (exchanges != 1)}"
            ax.annotate(words, (x, megabytes), (0, 9), textcoords="offset points", ha="center", va="bottom", size=9)
        ax.annotate(
            label, (num_ranks[0], values[0]), (0, -11), textcoords="offset points", ha="center", va="top",
            weight="bold", color=colour,
        )  # fmt: skip
    smallest = min(megabytes for points in lines.values() for _, megabytes in points)
    largest = max(megabytes for points in lines.values() for _, megabytes in points)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(num_ranks, [str(n) for n in num_ranks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set(xlim=(num_ranks[0] / 1.5, num_ranks[-1] * 1.4), ylim=(smallest / 3, largest * 3.5), title=title)
    ax.set(xlabel="ranks", ylabel="megabytes a step over a rank's link")
    return fig, ax
