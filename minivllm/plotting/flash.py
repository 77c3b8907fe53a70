"""Figures of chapter 03: what the scores would fill, a softmax run online, which tiles are worked on, the roofs."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from minivllm.plotting.style import FAINT, HIGHLIGHT, INK, KERNEL_COLOURS, MUTED

SKIPPED, MASKED, FULL = 0, 1, 2
"""What a kernel does with a tile of the score matrix: nothing, compute and mask, compute."""


def memory_by_context(
    contexts: Sequence[int], scores: Sequence[float], inputs: Sequence[float], limit: tuple[str, float], title: str
) -> tuple[Figure, Axes]:
    """Two curves over the length of the context, both axes logarithmic, and a limit.

    Args:
        contexts: tokens.
        scores: bytes of the score matrix for each context.
        inputs: bytes of q, k, v and out for each context.
        limit: what the bytes have to fit into, its name and its bytes.
    """
    fig, ax = plt.subplots()
    name, capacity = limit
    ax.plot(contexts, scores, color=KERNEL_COLOURS["reference"], marker="s")
    ax.plot(contexts, inputs, color=KERNEL_COLOURS["flash"], marker="o")
    ax.axhline(capacity, color=HIGHLIGHT, linestyle="--")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.text(contexts[0], capacity * 1.4, name, color=INK)
    middle = len(contexts) // 2
    above = {"textcoords": "offset points", "ha": "right"}
    ax.annotate("scores, naive", (contexts[middle], scores[middle]), (-10, 4), **above)
    ax.annotate("q, k, v and out", (contexts[middle], inputs[middle]), (4, -16), textcoords="offset points", ha="left")
    ax.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    ax.set_ylim(min(inputs) / 3, capacity * 30)
    ax.set(xlabel="tokens in the context", ylabel="memory for one layer", title=title)
    return fig, ax


def online_softmax_trace(
    scores: Sequence[float],
    tile: int,
    running_max: Sequence[float],
    estimates: Mapping[str, Sequence[float]],
    exact: Sequence[float],
    title: str,
) -> tuple[Figure, tuple[Axes, Axes]]:
    """One row of scores read tile by tile: above the scores and their running maximum, below the output so far.

    Args:
        scores: one a key.
        tile: keys in a tile.
        running_max: after each tile.
        estimates: label -> output after each tile, the right way first.
        exact: what attention over the keys so far gives, after each tile.
    """
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(7.0, 4.8), sharex=True)
    edges = np.arange(0, len(scores) + 1, tile)
    for ax in (top, bottom):
        for edge in edges[1:-1]:
            ax.axvline(edge - 0.5, color=FAINT, linewidth=1)
    top.bar(range(len(scores)), scores, color=MUTED, width=0.7)
    top.step(edges - 0.5, [*running_max, running_max[-1]], where="post", color=KERNEL_COLOURS["flash"], linewidth=2.5)
    top.text(edges[-1] - 0.6, running_max[-1] * 1.04, "running maximum m", ha="right", va="bottom")
    top.set_ylim(0, max(scores) * 1.25)
    top.set(ylabel="score of the key", title=title)
    ends = edges[1:] - 0.5
    bottom.plot(ends, exact, "o", markersize=13, fillstyle="none", color=INK)
    styles = ((KERNEL_COLOURS["flash"], "o", "-"), (HIGHLIGHT, "x", "--"))
    for (label, values), (colour, marker, line) in zip(estimates.items(), styles, strict=True):
        bottom.plot(ends, values, color=colour, marker=marker, linestyle=line, linewidth=2)
        bottom.annotate(label, (ends[-1], values[-1]), (12, 0), textcoords="offset points", va="center")
    bottom.set_xlim(-0.6, len(scores) + 4.2)
    bottom.set_xticks(range(len(scores)))
    bottom.margins(y=0.2)
    bottom.set(xlabel="key (lines part the tiles)", ylabel="acc / l after the tile")
    return fig, (top, bottom)


def tile_map(kinds: np.ndarray, block_m: int, block_n: int, title: str) -> tuple[Figure, Axes]:
    """The score matrix as the kernel sees it: one square a tile, SKIPPED, MASKED or FULL.

    Args:
        kinds: [query tiles, key tiles].
        block_m, block_n: queries and keys in a tile.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.6))
    colour = KERNEL_COLOURS["flash"]
    looks = {
        SKIPPED: {"facecolor": "white", "edgecolor": FAINT},
        MASKED: {"facecolor": "white", "edgecolor": colour, "hatch": "////"},
        FULL: {"facecolor": colour, "edgecolor": "white"},
    }
    rows, columns = kinds.shape
    for row in range(rows):
        for column in range(columns):
            ax.add_patch(Rectangle((column + 0.04, row + 0.04), 0.92, 0.92, **looks[int(kinds[row, column])]))
    names = {FULL: "computed, no mask", MASKED: "computed and masked", SKIPPED: "never touched"}
    for line, (kind, name) in enumerate(names.items()):
        top = rows * (0.12 + 0.2 * line)
        ax.add_patch(Rectangle((columns + 0.7, top), 0.92, 0.92, **looks[kind]))
        ax.text(columns + 2.0, top + 0.5, f"{name}:\n{int((kinds == kind).sum())} tiles", va="center")
    ax.set(xlim=(0, columns * 1.55), ylim=(rows, 0), aspect="equal", title=title)
    ax.set_xticks(range(0, columns + 1, 4), [block_n * i for i in range(0, columns + 1, 4)])
    ax.set_yticks(range(0, rows + 1, 4), [block_m * i for i in range(0, rows + 1, 4)])
    ax.set_xlabel("key", loc="left")
    ax.set_ylabel("query")
    ax.spines["bottom"].set_visible(False)
    ax.spines["left"].set_visible(False)
    return fig, ax


def roofline(
    peak_flops: float, bandwidth: float, points: Sequence[tuple[str, float, str]], title: str
) -> tuple[Figure, Axes]:
    """The most that a GPU can do with so many FLOPs for each byte, and where some ways of computing lie: a model.

    Args:
        peak_flops: FLOP/s of the compute roof.
        bandwidth: byte/s of the memory roof.
        points: label, FLOPs for each byte, colour.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.0))
    ridge = peak_flops / bandwidth
    intensities = [intensity for _, intensity, _ in points]
    left, right = min([ridge, *intensities]) / 3, max([ridge, *intensities]) * 3
    ax.plot([left, ridge, right], [left * bandwidth / 1e12, peak_flops / 1e12, peak_flops / 1e12], color=INK)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for label, intensity, colour in points:
        height = min(intensity * bandwidth, peak_flops) / 1e12
        ax.plot([intensity, intensity], [1e-9, height], color=colour, linestyle=":", linewidth=1.5)
        ax.plot(intensity, height, "o", color=colour, markersize=10)
        ax.annotate(label, (intensity, height), (9, -13), textcoords="offset points", va="top")
    ax.annotate(
        f"ridge: {ridge:.0f} FLOPs for each byte",
        (ridge, peak_flops / 1e12),
        (0, 7),
        textcoords="offset points",
        ha="center",
    )
    lowest = min(left * bandwidth, peak_flops) / 1e12
    ax.set(xlim=(left, right * 2), ylim=(lowest, peak_flops / 1e12 * 2))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="FLOPs for each byte moved", ylabel="attainable TFLOP/s (modelled)", title=title)
    return fig, ax


def bytes_text(value: float) -> str:
    """1.5e9 -> "1.5 GB", in powers of 1000."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if value >= 1000**power:
            return f"{value / 1000**power:g} {unit}"
    return f"{value:g} B"
