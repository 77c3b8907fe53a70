"""Figures of chapter 08: a choice between experts, their load, what padding wastes, recorded times of a layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from minivllm.plotting.style import FAINT, HIGHLIGHT, INK, KERNEL_COLOURS

_SCORE = KERNEL_COLOURS["flash"]
_LOADS = LinearSegmentedColormap.from_list("loads", ["white", _SCORE])
_PEERS = {"vllm_fused_moe": ("vLLM", "D"), "torch_grouped": ("PyTorch", "x")}


def routing_bars(
    scores: Sequence[float],
    bias: Sequence[float],
    kept: Sequence[bool],
    group_scores: Sequence[float],
    chosen: Sequence[int],
    title: str,
) -> tuple[Figure, Axes]:
    """A bar an expert: its score, and hatched on top of it the bias; groups side by side, their score above them.

    Args:
        kept: for each group, whether it stays in the race; the others are pale.
        chosen: experts that the token goes to; their names are set apart.
    """
    size = len(scores) // len(kept)
    fig, ax = plt.subplots(figsize=(7.0, 3.2))
    top = max(score + max(extra, 0.0) for score, extra in zip(scores, bias, strict=True))
    for expert, (score, extra) in enumerate(zip(scores, bias, strict=True)):
        group = expert // size
        x = expert + 0.5 * group
        ax.bar(x, score, color=_SCORE if kept[group] else FAINT, width=0.8)
        if extra:
            ax.bar(x, extra, bottom=score, color="white", edgecolor=INK, hatch="////", width=0.8)
        label = f"{score:.2f}" + (f"{extra:+.2f}" if extra else "")
        ax.text(x, score + max(extra, 0.0) + 0.02 * top, label, ha="center", va="bottom", size=9)
    for group, (is_kept, score) in enumerate(zip(kept, group_scores, strict=True)):
        middle = group * size + (size - 1) / 2 + 0.5 * group
        words = f"group {group}: {score:.2f}\n{'kept' if is_kept else 'out'}"
        ax.text(middle, 1.3 * top, words, ha="center", va="top", size=9, weight="bold" if is_kept else "normal")
    places = [expert + 0.5 * (expert // size) for expert in range(len(scores))]
    ax.set_xticks(places, [f"expert {e}\nchosen" if e in chosen else f"expert {e}" for e in range(len(scores))], size=9)
    for expert, label in enumerate(ax.get_xticklabels()):
        label.set(color=HIGHLIGHT if expert in chosen else INK, weight="bold" if expert in chosen else "normal")
    ax.set(ylim=(0, 1.32 * top), ylabel="score (bias hatched)", title=title)
    ax.tick_params(axis="x", length=0)
    return fig, ax


def load_map(loads: Sequence[Sequence[int]], rows: Sequence[str], title: str) -> tuple[Figure, Axes]:
    """How many tokens each expert got: a row a layer, a column an expert, the darker the more; the count inside."""
    fig, ax = plt.subplots(figsize=(7.0, 1.2 + 0.36 * len(rows)))
    most = max(max(row) for row in loads)
    ax.imshow(loads, cmap=_LOADS, vmin=0, vmax=most, aspect="auto")
    for y, row in enumerate(loads):
        for x, count in enumerate(row):
            ax.text(x, y, count, ha="center", va="center", size=9)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(loads[0])))
    ax.set(xlabel="expert; the number is how many tokens it got", title=title)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return fig, ax


def padding_lines(num_tokens: Sequence[int], waste: Mapping[int, Sequence[float]], title: str) -> tuple[Figure, Axes]:
    """Share of the rows of all tiles that are padding, over the tokens of a step; a line a size of tile."""
    fig, ax = plt.subplots(figsize=(7.0, 3.4))
    for index, (tile, shares) in enumerate(sorted(waste.items(), reverse=True)):
        ax.plot(num_tokens, shares, ("-", "--", "-.", ":")[index % 4], color=_SCORE, linewidth=2)
        # The largest tile's line is the rightmost: its label has room behind it, the others have it in front.
        nearest = min(range(len(shares)), key=lambda i: abs(shares[i] - 0.5))
        place = {"xytext": (6, 0), "ha": "left"} if index == 0 else {"xytext": (-6, 0), "ha": "right"}
        ax.annotate(
            f"tiles of {tile}", (num_tokens[nearest], shares[nearest]), textcoords="offset points", va="center",
            weight="bold", size=9, **place,
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xticks(num_tokens[::2], [f"{n:,}" for n in num_tokens[::2]])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel="tokens of a step", ylabel="rows that are padding", ylim=(0, 1.02), title=title)
    return fig, ax


@dataclass(frozen=True)
class LayerTime:
    """One layer at one number of tokens: our time and the peers', in microseconds."""

    label: str
    ours: float
    peers: Mapping[str, float]
    """Names as `bench moe` gives them: vllm_fused_moe, torch_grouped."""
    fp8: float | None = None
    """Our time with block-scaled fp8 weights, where it was measured."""


def layer_times(times: Sequence[LayerTime], title: str, subtitle: str) -> tuple[Figure, Axes]:
    """A row a layer: a disc and a triangle for minivllm's times, other marks for the peers', on a logarithmic axis.

    On the right, how many times as long the fastest peer took as minivllm did in the same format.
    """
    fig, ax = plt.subplots(figsize=(7.0, 1.9 + 0.36 * len(times)))
    seen: set[str] = set()

    def mark(x: float, y: float, marker: str, label: str, **look: object) -> None:
        ax.plot(x, y, marker, linestyle="none", label=label if label not in seen else None, **look)
        seen.add(label)

    for y, time in enumerate(times):
        ends = [time.ours, *time.peers.values()]
        ax.plot([min(ends), max(ends)], [y, y], color=FAINT, linewidth=2, zorder=1)
        mark(time.ours, y, "o", "minivllm", color=_SCORE, markersize=9, zorder=3)
        if time.fp8 is not None:
            mark(time.fp8, y, "^", "minivllm, fp8", color=_SCORE, markersize=8, markerfacecolor="white", zorder=4)
        for name, value in time.peers.items():
            label, marker = _PEERS[name]
            mark(value, y, marker, label, color=INK, markerfacecolor="none", markersize=8, markeredgewidth=1.8)
        if time.peers:
            ratio = f"{min(time.peers.values()) / time.ours:.2f}"
            ax.text(1.02, y, ratio, va="center", transform=ax.get_yaxis_transform(), size=9, weight="bold")
    ax.text(1.02, -1.0, "best peer\n/ minivllm", va="center", transform=ax.get_yaxis_transform(), size=9)
    ax.set_yticks(range(len(times)), [time.label for time in times], size=9)
    ax.set_xscale("log")
    xlabel = "microseconds for a layer's experts, sort and sum included (less is better)"
    lines = [line.replace(", PyTorch", ",\nPyTorch") for line in subtitle.splitlines()]
    ax.set(ylim=(len(times) - 0.4, -1.4), title=title, xlabel="\n".join([xlabel, *lines]))
    ax.grid(axis="x", color=FAINT, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="upper left", ncols=4, frameon=False, fontsize=9, labelcolor=INK, borderaxespad=0.1)
    return fig, ax
