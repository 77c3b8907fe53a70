"""Figures of chapter 05: what a cached row holds, when to decompress, who works on what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minivllm.plotting.style import INK, KERNEL_COLOURS, MUTED, REQUEST_COLOURS, request_colour

_FIELD_COLOURS = (KERNEL_COLOURS["mla"], MUTED, REQUEST_COLOURS[0])
_FIELD_INK = ("white", INK, INK)


@dataclass(frozen=True)
class RowField:
    """One part of a cached row."""

    label: str
    num_bytes: int


def row_layouts(layouts: Mapping[str, Sequence[RowField]], title: str) -> tuple[Figure, Axes]:
    """Cached rows of one token, to scale in bytes: a bar a layout, a segment a field, the total behind it.

    The fields are latent, scales and rotary key, in this order; one that a layout lacks has no bytes. A field that is
    too narrow for its label is named under the bar.
    """
    fig, ax = plt.subplots(figsize=(7.0, 0.8 + 0.85 * len(layouts)))
    widest = max(sum(field.num_bytes for field in fields) for fields in layouts.values())
    for y, fields in enumerate(layouts.values()):
        start = 0
        for field, colour, ink in zip(fields, _FIELD_COLOURS, _FIELD_INK, strict=True):
            if field.num_bytes == 0:
                continue
            ax.barh(y, field.num_bytes, left=start, height=0.5, color=colour, edgecolor="white")
            middle = start + field.num_bytes / 2
            if field.num_bytes > 0.2 * widest:
                ax.text(middle, y, field.label, ha="center", va="center", color=ink, weight="bold")
            else:
                at = "left" if start + field.num_bytes == sum(f.num_bytes for f in fields) else "right"
                ax.text(middle, y + 0.3, field.label, ha=at, va="top", size=9)
            start += field.num_bytes
        ax.text(start + 0.01 * widest, y, f"{start:,} bytes", va="center", weight="bold")
    ax.set_yticks(range(len(layouts)), list(layouts))
    ax.set(xlim=(0, widest * 1.17), ylim=(len(layouts) - 0.3, -0.5), title=title)
    ax.set(xlabel="bytes from the beginning of the row")
    ax.tick_params(axis="y", length=0)
    return fig, ax


def crossover(
    queries: Sequence[int], lines: Mapping[str, Sequence[float]], crossing: float, ylabel: str, title: str
) -> tuple[Figure, Axes]:
    """Cost over the number of queries for two ways, on logarithmic axes, and where they cross."""
    fig, ax = plt.subplots()
    places = ({"xytext": (10, -4), "va": "top"}, {"xytext": (0, 9), "va": "bottom"})
    for (label, costs), style, place in zip(lines.items(), ("-", "--"), places, strict=True):
        ax.plot(queries, costs, style, color=KERNEL_COLOURS["mla"], linewidth=2)
        ax.annotate(label, (queries[0], costs[0]), textcoords="offset points", weight="bold", **place)
    ax.axvline(crossing, color=MUTED, linewidth=1, zorder=0)
    ax.text(crossing * 1.1, min(min(costs) for costs in lines.values()), f"{crossing:.1f}", va="bottom")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(queries[::2], [f"{n:,}" for n in queries[::2]])
    ax.set(xlabel="new tokens (queries) of the request in this step", ylabel=ylabel, title=title)
    ax.margins(y=0.15)
    return fig, ax


@dataclass(frozen=True)
class Piece:
    """What one part of the plan does with one request: its blocks first .. end - 1, from `start` on in the part."""

    part: int
    request: int
    first: int
    end: int
    start: int


def plan_map(pieces: Sequence[Piece], loads: Sequence[int], title: str) -> tuple[Figure, Axes]:
    """A row a part, a segment a piece of a request with its blocks inside; what else the part is charged is hatched.

    Args:
        loads: for each part, all that the plan charges it, in blocks.
    """
    fig, ax = plt.subplots(figsize=(7.0, 1.1 + 0.42 * len(loads)))
    for part, load in enumerate(loads):
        ax.add_patch(Rectangle((0, part - 0.4), load, 0.8, facecolor="none", edgecolor=MUTED, hatch="////"))
    for piece in pieces:
        width = piece.end - piece.first
        colour = request_colour(piece.request)
        ax.add_patch(Rectangle((piece.start, piece.part - 0.4), width, 0.8, facecolor=colour, edgecolor=INK))
        blocks = f"blocks {piece.first} to {piece.end - 1}"
        label = f"request {piece.request}, {blocks}" if width > 0.3 * max(loads) else str(piece.request)
        ax.text(piece.start + width / 2, piece.part, label, ha="center", va="center", size=9)
    ax.set_yticks(range(len(loads)), [f"part {part}" for part in range(len(loads))])
    ax.set(xlim=(0, max(loads)), ylim=(len(loads) - 0.5, -0.5), title=title)
    ax.set(xlabel="work in blocks of keys (hatched: what starting a request is charged)")
    ax.tick_params(axis="y", length=0)
    return fig, ax
