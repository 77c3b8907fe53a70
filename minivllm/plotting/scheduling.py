"""Figures of chapter 09: what chunks cost and save, stages at work, a step's cost, and latency over the load."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator

from minivllm.plotting.style import INK, MUTED, PLATE, TOKEN_LOOKS, request_colour

if TYPE_CHECKING:
    from minivllm.bench.result_file import Measurement

_MARKERS = ("o", "s", "^", "D")


def trade_off(points: Mapping[str, tuple[float, float]], title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """What one setting does to two latencies: a point a value, joined in the order given, on logarithmic axes.

    Args:
        points: label -> the two latencies in milliseconds, (x, y).
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.8))
    x, y = zip(*points.values(), strict=True)
    ax.plot(x, y, "-o", color=INK, markerfacecolor=TOKEN_LOOKS["decode"]["facecolor"], markersize=8)
    for label, place in points.items():
        ax.annotate(label, place, (9, 1), textcoords="offset points", va="bottom", size=9)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set(xlim=(min(x) / 1.15, max(x) * 1.5), ylim=(min(y) / 1.4, max(y) * 1.6))
    for axis, values in ((ax.xaxis, x), (ax.yaxis, y)):
        _round_ticks(axis, min(values), max(values))
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return fig, ax


def pipeline_stages(batch_sizes: Mapping[str, Sequence[int]], num_stages: int, title: str) -> tuple[Figure, Axes]:
    """A row a stage, a column for each pass through one: how many requests are in it; hatched where it has nothing.

    Args:
        batch_sizes: for each way of filling the pipeline, the requests of the steps in the order in which they were
            planned. Step i is in stage s at time i + s.
    """
    fig, ax = plt.subplots(figsize=(7.0, 1.0 + 0.4 * len(batch_sizes) * (num_stages + 1)))
    num_ticks = max(len(sizes) for sizes in batch_sizes.values())
    names: dict[float, str] = {}
    for group, (label, sizes) in enumerate(batch_sizes.items()):
        top = group * (num_stages + 1.3)
        ax.text(0, top + 0.45, label, ha="left", va="center", weight="bold")
        for stage in range(num_stages):
            row = top + 1 + stage
            names[row + 0.5] = f"stage {stage}"
            for tick in range(num_ticks):
                step = tick - stage
                size = sizes[step] if 0 <= step < len(sizes) else 0
                look = {"facecolor": request_colour(step % num_stages)} if size else {"facecolor": "white"}
                look |= {"edgecolor": "white"} if size else {"edgecolor": MUTED, "hatch": "////"}
                ax.add_patch(Rectangle((tick + 0.04, row + 0.06), 0.92, 0.88, linewidth=0.6, **look))
                if size:
                    ax.text(tick + 0.5, row + 0.5, size, ha="center", va="center_baseline", bbox=PLATE)
    ax.set_yticks(list(names), list(names.values()))
    ax.set_xticks([tick + 0.5 for tick in range(num_ticks)], range(num_ticks))
    ax.set(xlim=(0, num_ticks), ylim=(max(names) + 0.6, -0.1), title=title)
    ax.set_xlabel("time, in passes through one stage (hatched: the stage is idle)")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return fig, ax


def recorded_step_cost(measurements: "Sequence[Measurement]", title: str, subtitle: str) -> tuple[Figure, Axes]:
    """A bar a measurement, its median written beside it, with a line from the lower to the upper quartile.

    Args:
        measurements: all in one unit.
        subtitle: the provenance (`ResultFile.subtitle`); it stands under the axis.
    """
    fig, ax = plt.subplots(figsize=(7.0, 1.5 + 0.45 * len(measurements)))
    unit = measurements[0].unit
    longest = max(m.upper_quartile for m in measurements)
    for row, m in enumerate(measurements):
        ax.barh(row, m.median, height=0.6, color=TOKEN_LOOKS["decode"]["facecolor"])
        ax.plot([m.lower_quartile, m.upper_quartile], [row, row], color=INK, linewidth=1.5)
        text = f"{m.median:.2f} {unit}"
        ax.text(m.upper_quartile + 0.02 * longest, row, text, va="center_baseline", weight="bold")
    ax.set_yticks(range(len(measurements)), [m.name for m in measurements])
    ax.set(xlim=(0, longest * 1.2), ylim=(len(measurements) - 0.5, -0.5), title=title)
    provenance = textwrap.fill(subtitle, 66)
    ax.set_xlabel(f"{unit} a step, median and quartiles of {measurements[0].repeats:,} steps\n{provenance}")
    ax.tick_params(axis="y", length=0)
    return fig, ax


def latency_over_load(
    rates: Sequence[float],
    latencies: Mapping[str, Sequence[float]],
    capacities: Sequence[float],
    limit: float,
    title: str,
    ylabel: str,
) -> tuple[Figure, Axes]:
    """A latency over the rate of arrival, a labelled line a setting; a dotted line where that setting can no more.

    Args:
        rates: requests a second, rising.
        latencies: label -> milliseconds at each rate.
        capacities: for each line, the most requests a second that can be finished.
        limit: a line ends at its last point before the first one above so many milliseconds.
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.8))
    for number, (label, values) in enumerate(latencies.items()):
        colour, marker = request_colour(number), _MARKERS[number % len(_MARKERS)]
        shown = list(takewhile(lambda value: value <= limit, values))
        ax.plot(rates[: len(shown)], shown, marker=marker, color=colour, linewidth=2)
        ax.axvline(capacities[number], color=colour, linestyle=":", linewidth=1.8, zorder=0)
        place = {"ha": "right", "va": "center", "size": 9, "bbox": PLATE}
        ax.text(capacities[number] - 0.6, limit * 1.08, f"capacity {capacities[number]:.0f}/s", **place)
        if shown:
            end = (rates[len(shown) - 1], shown[-1])
            ax.annotate(label, end, (8, 0), textcoords="offset points", va="center", weight="bold", bbox=PLATE)
    ax.set(xlim=(0, max(*rates, *capacities) * 1.02), ylim=(0, limit * 1.15), title=title)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set(xlabel="requests that arrive each second, on average", ylabel=ylabel)
    return fig, ax


def _round_ticks(axis: Axis, lowest: float, highest: float) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, written out."""
    ticks = [base * 10**power for power in range(-3, 7) for base in (1, 2, 5)]
    ticks = [tick for tick in ticks if lowest / 1.5 <= tick <= highest * 1.5]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
