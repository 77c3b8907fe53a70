"""Figures of chapter 01: work with and without a cache, who reads whose keys, bytes a token, what a step reads."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from minivllm.plotting.style import FAINT, HIGHLIGHT, INK, KERNEL_COLOURS, MUTED, REQUEST_COLOURS

LATENT = "MLA"
"""The kind of attention that stores a latent, and has the colour of its kernel."""


def work_by_step(flops: Mapping[str, Sequence[float]], title: str) -> tuple[Figure, Axes]:
    """FLOPs of each step, a line a way of computing: the wasteful one first.

    Args:
        flops: label -> FLOPs of step 0, 1, ...
    """
    fig, ax = plt.subplots()
    for (label, values), colour, marker in zip(flops.items(), (HIGHLIGHT, INK), ("x", "o"), strict=True):
        giga = [value / 1e9 for value in values]
        ax.plot(range(len(giga)), giga, color=colour, marker=marker)
        middle = len(giga) * 2 // 3
        ax.annotate(label, (middle, giga[middle]), (0, 10), textcoords="offset points", ha="right")
    ax.set_ylim(0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="step (one output token each)", ylabel="GFLOPs of the step", title=title)
    return fig, ax


def head_sharing(reads: Mapping[str, Sequence[int]], title: str) -> tuple[Figure, Axes]:
    """Which stored head each query head reads, a block of two rows a kind of attention.

    Args:
        reads: label -> for each query head, the number of the stored head that it reads.
    """
    fig, ax = plt.subplots(figsize=(7.0, 0.7 + 1.15 * len(reads)))
    num_heads = max(len(heads) for heads in reads.values())
    for block, (label, heads) in enumerate(reads.items()):
        top, bottom = 2.6 * block, 2.6 * block + 1.4
        stored = KERNEL_COLOURS["mla"] if label.startswith(LATENT) else REQUEST_COLOURS[0]
        for stored_head in sorted(set(heads)):
            readers = [h for h, read in enumerate(heads) if read == stored_head]
            centre = sum(readers) / len(readers)
            for h in readers:
                ax.plot([h, centre], [top, bottom], color=MUTED, linewidth=1, zorder=1)
            _head(ax, centre, bottom, stored_head, stored, "white" if label.startswith(LATENT) else INK)
        for h in range(len(heads)):
            _head(ax, h, top, h, FAINT, INK)
        ax.text(-1.0, top, "queries", ha="right", va="center")
        ax.text(-1.0, bottom, "stored", ha="right", va="center")
        ax.text(num_heads - 0.2, (top + bottom) / 2, label, va="center")
    ax.set(xlim=(-2.6, num_heads + 3.4), ylim=(2.6 * len(reads) - 0.7, -0.5), title=title)
    ax.axis("off")
    return fig, ax


def bytes_per_token(models: Sequence[tuple[str, str, int]], title: str) -> tuple[Figure, Axes]:
    """A row a model: the bytes that one token takes in its cache, on a logarithmic axis.

    Args:
        models: name, kind of attention ("MHA", "GQA", "MQA" or "MLA"), bytes.
    """
    fig, ax = plt.subplots(figsize=(7.0, 0.9 + 0.34 * len(models)))
    for row, (_, kind, num_bytes) in enumerate(models):
        colour = KERNEL_COLOURS["mla"] if kind == LATENT else KERNEL_COLOURS["reference"]
        ax.plot(num_bytes / 1024, row, "D" if kind == LATENT else "o", color=colour, markersize=9)
        text = f"{num_bytes / 1024:,.1f}".removesuffix(".0")
        label = ax.annotate(
            f"{kind}  {text} KiB", (num_bytes / 1024, row), (10, 0), textcoords="offset points", va="center"
        )
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
        ax.axhline(row, color=FAINT, linewidth=0.8, zorder=0)
    ax.set_xscale("log")
    smallest, largest = min(model[2] for model in models), max(model[2] for model in models)
    ax.set_xlim(smallest / 1024 / 1.6, largest / 1024 * 10)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_yticks(range(len(models)), [model[0] for model in models])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(xlabel="KiB of cache for one token, 2 bytes a number", title=title)
    return fig, ax


def read_for_each_token(
    batches: Sequence[int], weights: Sequence[float], cache: Sequence[float], title: str
) -> tuple[Figure, Axes]:
    """A bar a batch size: the bytes that are read for each token that comes out, weights on top of the cache.

    Args:
        batches: requests in the step, which gives one token each.
        weights: bytes of weights for each token.
        cache: bytes of cache for each token.
    """
    fig, ax = plt.subplots()
    places = range(len(batches))
    in_gb = [[value / 1e9 for value in values] for values in (cache, weights)]
    ax.bar(places, in_gb[0], color=KERNEL_COLOURS["paged"], edgecolor="white")
    ax.bar(places, in_gb[1], bottom=in_gb[0], color=MUTED, edgecolor="white", hatch="//")
    for place, kept, shared in zip(places, *in_gb, strict=True):
        ax.text(place, kept + shared, f"{kept + shared:.1f}", ha="center", va="bottom")
    middle, highest = len(batches) * 2 // 3, in_gb[0][0] + in_gb[1][0]
    ax.annotate("weights, shared by the batch", (0, highest * 0.8), (0.7, highest * 0.8), **_BESIDE)
    ax.annotate("the request's own cache", (middle + 0.36, in_gb[0][middle] / 2), (middle, highest * 0.4), **_BESIDE)
    ax.set_xticks(places, batches)
    ax.set(xlabel="requests in the step", ylabel="GB read for each token", title=title)
    return fig, ax


_BESIDE = {
    "va": "center",
    "arrowprops": {"arrowstyle": "-", "color": INK, "linewidth": 0.8},
}


def _head(ax: Axes, x: float, y: float, number: int, colour: str, ink: str) -> None:
    ax.add_patch(Rectangle((x - 0.38, y - 0.3), 0.76, 0.6, facecolor=colour, edgecolor=INK, zorder=2))
    ax.text(x, y, number, ha="center", va="center", color=ink, zorder=3)
