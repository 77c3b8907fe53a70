"""Figures of chapter 07: errors of formats, products under the roofline, and what a format costs a whole model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.plotting.style import HIGHLIGHT, INK, KERNEL_COLOURS, MUTED, PLATE, REQUEST_COLOURS

if TYPE_CHECKING:
    from minivllm.bench.kv_calculator import Device

FORMAT_COLOURS = {
    "float32": INK,
    "bf16": MUTED,
    "fp8_tensor": REQUEST_COLOURS[2],
    "fp8_token": REQUEST_COLOURS[0],
    "fp8_block": KERNEL_COLOURS["flash"],
    "int8_tensor": HIGHLIGHT,
    "int8": REQUEST_COLOURS[1],
}
"""The colour of a format in every figure. `quantization="fp8"` of a model is the format fp8_token."""
FORMAT_MARKERS = {"bf16": "o", "fp8_block": "D", "fp8_token": "s", "int8": "^"}
_LINE_STYLES = ("-", "--", "-.", ":")


def format_of(scheme: str) -> str:
    """The format whose colour a scheme of `bench perplexity` has."""
    return {"fp8": "fp8_token", "bfloat16": "bf16"}.get(scheme, scheme)


def error_curves(
    x: Sequence[float],
    curves: Mapping[str, tuple[str, Sequence[float]]],
    xlabel: str,
    ylabel: str,
    title: str,
    label_shifts: Mapping[str, float] | None = None,
) -> tuple[Figure, Axes]:
    """Errors over x, both logarithmic; each curve's label stands behind its last point.

    Args:
        curves: label -> (a format, errors). Curves of one format get dashes, so that they are told apart.
        label_shifts: points by which a label is moved up, where curves end close to each other.
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.6))
    seen: list[str] = []
    for label, (format, errors) in curves.items():
        style = _LINE_STYLES[seen.count(format)]
        seen.append(format)
        colour = FORMAT_COLOURS[format]
        ax.plot(x, errors, style, color=colour, linewidth=2)
        shift = (label_shifts or {}).get(label, 0)
        ax.annotate(
            label, (x[-1], errors[-1]), xytext=(6, shift), textcoords="offset points", va="center", size=9,
            color=INK, annotation_clip=False,
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
    return fig, ax


def format_errors(errors: Mapping[str, Mapping[str, float]], title: str) -> tuple[Figure, Axes]:
    """Bars of relative error of a product in per cent: a group an input, a bar a format.

    Args:
        errors: label of a group -> format -> relative error.
    """
    formats = list(next(iter(errors.values())))
    fig, ax = plt.subplots(figsize=(7.0, 0.9 + 0.24 * len(errors) * (len(formats) + 1)))
    y, ticks = 0.0, []
    largest = max(max(group.values()) for group in errors.values())
    for group in errors.values():
        ticks.append(y + (len(formats) - 1) / 2)
        for format in formats:
            error = 100 * group[format]
            ax.barh(y, error, color=FORMAT_COLOURS[format], height=0.85)
            ax.text(error + largest, y, f"{format}: {error:.2f} %", va="center", size=9)
            y += 1
        y += 0.8
    ax.set_yticks(ticks, list(errors))
    ax.set(xlim=(0, 130 * largest), ylim=(y - 0.6, -0.7), title=title)
    ax.set(xlabel="relative error of the product, %")
    ax.tick_params(axis="y", length=0)
    return fig, ax


@dataclass(frozen=True)
class GemmPoint:
    """A product as it was measured, or as the data sheet lets it be."""

    format: str
    intensity: float
    """FLOP for each byte of operands and result."""
    flops_per_second: float
    is_measured: bool


def gemm_roofline(
    points: Sequence[GemmPoint], device: "Device", peak_8bit: float, title: str, subtitle: str
) -> tuple[Figure, Axes]:
    """One slope, two ceilings: 16-bit and 8-bit tensor cores. A recorded point is filled, a modelled one hollow.

    Args:
        peak_8bit: FLOP/s of the data sheet in fp8 and int8.
        subtitle: the provenance of the measured points.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.6))
    low, high = 0.5 * min(p.intensity for p in points), 2 * max(p.intensity for p in points)
    for peak, name in ((device.flops_per_second, "16 bits"), (peak_8bit, "8 bits")):
        balance = peak / device.bytes_per_second
        ax.plot([low, balance, high], [low * device.bytes_per_second / 1e12, peak / 1e12, peak / 1e12], color=INK)
        ax.text(low * 1.1, peak / 1e12 * 1.04, f"{name}: {peak / 1e12:,.0f} TFLOP/s", size=9, va="bottom")
    memory = f"memory: {device.bytes_per_second / 1e12:.1f} TB/s\n(all three are modelled)"
    ax.text(low * 2, low * 1.3 * device.bytes_per_second / 1e12, memory, size=9, va="top")
    for format, marker in FORMAT_MARKERS.items():
        for is_measured in (False, True):
            own = [p for p in points if p.format == format and p.is_measured == is_measured]
            if own:
                colour = FORMAT_COLOURS[format]
                ax.plot(
                    [p.intensity for p in own],
                    [p.flops_per_second / 1e12 for p in own],
                    marker,
                    color=colour,
                    markerfacecolor=colour if is_measured else "white",
                    markeredgewidth=1.5,
                    markersize=8,
                    label=format if is_measured or not any(p.is_measured for p in points) else None,
                )
    ax.legend(loc="lower right", frameon=False)
    ax.set(xscale="log", yscale="log", xlim=(low, high), title=title, ylabel="TFLOP/s")
    lines = "\n".join(line.replace(", PyTorch", ",\nPyTorch") for line in subtitle.splitlines())
    ax.set(xlabel="\n".join(filter(None, ["FLOP for each byte of operands and result", lines])))
    return fig, ax


@dataclass(frozen=True)
class Cost:
    """Perplexity of a model under a scheme, relative to bfloat16, with its standard error."""

    model: str
    scheme: str
    increase: float
    standard_error: float


def perplexity_costs(costs: Sequence[Cost], limit: float, title: str, subtitle: str) -> tuple[Figure, Axes]:
    """A row a model and scheme: the relative increase in per cent, its standard error as a bar, the limit as a line."""
    fig, ax = plt.subplots(figsize=(7.0, 1.4 + 0.27 * len(costs)))
    y, labels, last = 0.0, {}, None
    for cost in costs:
        y += 0.5 if last not in (None, cost.model) else 0
        last = cost.model
        ax.errorbar(
            100 * cost.increase, y, xerr=100 * cost.standard_error, fmt=FORMAT_MARKERS[format_of(cost.scheme)],
            color=FORMAT_COLOURS[format_of(cost.scheme)], markersize=7, capsize=3, linewidth=1.5,
        )  # fmt: skip
        right = 100 * (cost.increase + cost.standard_error) + 0.06
        ax.text(right, y, f"{100 * cost.increase:+.2f} %", va="center", size=9, bbox=PLATE)
        labels[y] = f"{cost.model}, {cost.scheme}"
        y += 1
    ax.axvline(0, color=MUTED, linewidth=1, zorder=0)
    ax.axvline(100 * limit, color=HIGHLIGHT, linewidth=1.5, linestyle="--", zorder=0)
    ax.text(100 * limit - 0.04, -0.9, f"limit: {100 * limit:g} %", ha="right", va="bottom", size=9, color=INK)
    ax.set_yticks(list(labels), list(labels.values()))
    lowest = min(100 * (cost.increase - cost.standard_error) for cost in costs)
    ax.set(xlim=(min(lowest, 0) - 0.2, max(115 * limit, 3.6)), ylim=(y - 0.4, -1.4), title=title)
    lines = "\n".join(line.replace(", PyTorch", ",\nPyTorch") for line in subtitle.splitlines())
    ax.set(xlabel="perplexity above that of bfloat16, %\n" + lines)
    ax.tick_params(axis="y", length=0)
    return fig, ax
