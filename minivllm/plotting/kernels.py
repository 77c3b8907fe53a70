"""Figures of chapter 06: what the caches of one model would weigh, the roofline, and recorded speeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from minivllm.plotting.style import INK, KERNEL_COLOURS, MUTED

if TYPE_CHECKING:
    from minivllm.bench.kv_calculator import Device

MARKERS = {"flash": "o", "paged": "s", "mla": "D"}


def cache_sizes(per_token: Mapping[str, int], context: Mapping[str, int], title: str) -> tuple[Figure, Axes]:
    """One bar a way of storing, bytes a token; behind it the same in words, and what a long context takes.

    Args:
        per_token: label -> bytes; labels that begin with MLA have the colour of that kernel.
        context: label -> bytes of the long context.
    """
    fig, ax = plt.subplots(figsize=(7.0, 0.9 + 0.42 * len(per_token)))
    colours = [KERNEL_COLOURS["mla" if label.startswith("MLA") else "paged"] for label in per_token]
    kib = [num_bytes / 2**10 for num_bytes in per_token.values()]
    ax.barh(range(len(kib)), kib, color=colours)
    for y, (label, size) in enumerate(zip(per_token, kib, strict=True)):
        text = f"{size:,.0f} KiB a token, {context[label] / 2**30:,.1f} GiB"
        inside = size > 0.6 * max(kib)
        place = {"ha": "right", "x": size - 0.01 * max(kib)} if inside else {"ha": "left", "x": size + 0.01 * max(kib)}
        ax.text(y=y, s=text, va="center", weight="bold", **place)
    ax.set_yticks(range(len(kib)), list(per_token))
    ax.invert_yaxis()
    ax.set(xlabel="KV cache of one token in all layers, KiB", title=title)
    ax.tick_params(axis="y", length=0)
    return fig, ax


@dataclass(frozen=True)
class RooflinePoint:
    """A kernel at one shape: where it stands under the roof."""

    label: str
    family: str
    intensity: float
    flops_per_second: float
    is_measured: bool
    """A recorded speed is filled, a modelled one hollow."""
    label_at: tuple[int, int] = (8, -4)
    """Offset of the label in points; to the left of the point if negative."""


def roofline(points: Sequence[RooflinePoint], device: "Device", title: str, subtitle: str = "") -> tuple[Figure, Axes]:
    """Operations a second over operations a byte: a slope that is the memory, a ceiling that is the arithmetic.

    Args:
        subtitle: the provenance of the measured points, one line a result file.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.2))
    flops_per_second, bytes_per_second, balance = device.flops_per_second, device.bytes_per_second, device.balance
    low, high = 0.5 * min(p.intensity for p in points), 4 * max(max(p.intensity for p in points), balance)
    roof = [low * bytes_per_second / 1e12, flops_per_second / 1e12, flops_per_second / 1e12]
    ax.plot([low, balance, high], roof, color=INK, linewidth=1.5, zorder=1)
    ax.text(balance * 0.75, roof[-1], f"{roof[-1]:,.0f} TFLOP/s (modelled)", ha="right", va="center")
    memory = f"{bytes_per_second / 1e12:.1f} TB/s (modelled)"
    ax.text(balance / 24, flops_per_second / 1e12 / 18, memory, ha="right", va="bottom")
    ax.axvline(balance, color=MUTED, linewidth=1, linestyle=":", zorder=0)
    for point in points:
        colour = KERNEL_COLOURS[point.family]
        ax.plot(
            point.intensity,
            point.flops_per_second / 1e12,
            MARKERS[point.family],
            color=colour,
            markersize=9,
            markerfacecolor=colour if point.is_measured else "white",
            markeredgewidth=2,
        )
        ax.annotate(
            point.label,
            (point.intensity, point.flops_per_second / 1e12),
            xytext=point.label_at,
            textcoords="offset points",
            ha="left" if point.label_at[0] > 0 else "right",
            size=9,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set(xlim=(low, high), ylim=(roof[0] * 0.5, roof[-1] * 2.5), title=title)
    ax.set(xlabel=_with_subtitle("FLOP for each byte read or written", subtitle), ylabel="TFLOP/s")
    return fig, ax


@dataclass(frozen=True)
class SpeedBar:
    """One shape: our share of the ceiling, and that of the best peer."""

    label: str
    family: str
    share: float
    speed: str
    peer: str | None
    peer_share: float | None


def recorded_speeds(bars: Sequence[SpeedBar], title: str, subtitle: str) -> tuple[Figure, Axes]:
    """A bar a shape, in the colour of its kernel, as a share of what the machine can; a tick where the best peer is."""
    fig, ax = plt.subplots(figsize=(7.0, 1.3 + 0.34 * len(bars)))
    for y, bar in enumerate(bars):
        ax.barh(y, bar.share, color=KERNEL_COLOURS[bar.family], height=0.7)
        # A halo keeps the words readable on every colour, and where they are longer than their bar.
        halo = [withStroke(linewidth=2.5, foreground="white")]
        ax.text(0.01, y, bar.speed, va="center", size=9, color=INK, weight="bold", path_effects=halo)
        if bar.peer_share is not None:
            ax.plot([bar.peer_share] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=2)
        if bar.peer is not None:
            ax.text(1.12, y, bar.peer, va="center", size=9)
    ax.text(1.12, -0.9, "best peer (tick)", va="center", size=9, weight="bold")
    ax.set_yticks(range(len(bars)), [bar.label for bar in bars], size=9)
    ax.set(xlim=(0, 1.1), ylim=(len(bars) - 0.4, -1.2), title=title)
    ax.set(
        xlabel=_with_subtitle("share of what this GPU reached in the same run (reads, or a large product)", subtitle)
    )
    ax.tick_params(axis="y", length=0)
    return fig, ax


def _with_subtitle(xlabel: str, subtitle: str) -> str:
    """The provenance of recorded numbers stands under the axis, one line a file, each cut in two to fit the figure."""
    lines = [line.replace(", PyTorch", ",\nPyTorch") for line in subtitle.splitlines()]
    return "\n".join([xlabel, *lines])
