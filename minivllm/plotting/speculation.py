"""Figures of chapter 10: one verification, two distributions over each other, what was emitted, what it is worth."""

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minivllm.plotting.style import HIGHLIGHT, INK, KERNEL_COLOURS, MUTED, PLATE, REQUEST_COLOURS, TOKEN_LOOKS

MARKERS = "osD^v"
STYLES = ("-", "--", ":", "-.")


def verification(
    read: Sequence[str], says: Sequence[str], num_accepted: int, first_position: int, title: str
) -> tuple[Figure, Axes]:
    """One step of one request: the row of tokens that the target read, and below it what each row says.

    Args:
        read: the newest token and the drafts, as text.
        says: what the target says after each of them.
        num_accepted: drafts that were accepted; the row behind them gives the token of the target's own.
        first_position: of the newest token.
    """
    fig, ax = plt.subplots(figsize=(7.0, 2.6))
    looks = [TOKEN_LOOKS["decode"]] + [
        TOKEN_LOOKS["accepted" if index <= num_accepted else "rejected"] for index in range(1, len(read))
    ]
    for index, (token, said) in enumerate(zip(read, says, strict=True)):
        is_void = index > num_accepted
        said_look = {"facecolor": "white", "edgecolor": MUTED if is_void else INK}
        for y, text, look in ((1.6, token, looks[index]), (0.0, said, said_look)):
            ax.add_patch(Rectangle((index + 0.04, y), 0.92, 0.8, linewidth=1.2, **look))
            shade = MUTED if is_void and y == 0 else INK
            ax.text(index + 0.5, y + 0.4, text, ha="center", va="center", color=shade, bbox=PLATE, size=9)
        arrow = {"arrowstyle": "->", "color": MUTED if is_void else INK}
        ax.annotate("", (index + 0.5, 0.85), (index + 0.5, 1.55), arrowprops=arrow)
        own = "recovered" if num_accepted < len(read) - 1 else "bonus"
        fate = "void" if is_void else own if index == num_accepted else "draft is right"
        ax.text(index + 0.5, -0.3, fate, ha="center", va="center", size=9, color=MUTED if is_void else INK)
    ax.set_yticks([2.0, 0.4], ["the step reads", "its row says"])
    ticks = [index + 0.5 for index in range(len(read))]
    ax.set_xticks(ticks, [first_position + index for index in range(len(read))])
    ax.set(xlim=(0, len(read)), ylim=(-0.55, 2.5), title=title, xlabel="position of the token that is read")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return fig, ax


def two_laws(p: Sequence[float], q: Sequence[float], title: str) -> tuple[Figure, Axes]:
    """The target's p as bars, of which one part comes from accepted drafts and the rest is recovered; q as steps.

    What q has too much of is hatched: drafts that are rejected.
    """
    fig, ax = plt.subplots()
    tokens = range(len(p))
    accepted = [min(a, b) for a, b in zip(p, q, strict=True)]
    recovered = [a - b for a, b in zip(p, accepted, strict=True)]
    rejected = [a - b for a, b in zip(q, accepted, strict=True)]
    labels = {
        f"accepted: {sum(accepted):.2f}": (accepted, [0.0] * len(p), TOKEN_LOOKS["accepted"]),
        f"recovered: {sum(recovered):.2f}": (recovered, accepted, TOKEN_LOOKS["decode"]),
        f"rejected: {sum(rejected):.2f}": (rejected, accepted, TOKEN_LOOKS["rejected"]),
    }
    for heights, bottoms, look in labels.values():
        for bar in ax.bar(tokens, heights, bottom=bottoms, width=0.8, **look):
            bar.set_visible(bar.get_height() > 0)  # no edge where there is nothing
    handles = [Patch(label=label, **look) for label, (_, _, look) in labels.items()]
    ax.legend(handles=handles, frameon=False, loc="upper right")
    ax.set_xticks(list(tokens))
    ax.set(title=title, xlabel="token", ylabel="probability")
    return fig, ax


def emitted_shares(
    shares: Mapping[str, Sequence[float]], tokens: Sequence[str], title: str, wrong: str | None = None
) -> tuple[Figure, Axes]:
    """How often each token came out, a group of bars a token, a bar a way of sampling.

    Args:
        wrong: the way that is at fault, if any; it is drawn as what catches the eye.
    """
    fig, ax = plt.subplots()
    looks = [
        {"facecolor": MUTED},
        {"facecolor": KERNEL_COLOURS["mla"]},
        {"facecolor": REQUEST_COLOURS[0]},
    ]
    width = 0.8 / len(shares)
    for place, ((label, values), look) in enumerate(zip(shares.items(), looks, strict=False)):
        if label == wrong:
            look = {"facecolor": "white", "edgecolor": HIGHLIGHT, "hatch": "xxxx"}
        left = [index - 0.4 + (place + 0.5) * width for index in range(len(values))]
        ax.bar(left, values, width=width, label=label, **look)
    ax.legend(frameon=False, loc="upper right")
    ax.set_xticks(range(len(tokens)), list(tokens))
    ax.set(title=title, xlabel="token", ylabel="share of the emitted tokens")
    return fig, ax


def lines_over_k(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    subtitle: str = "",
    even: float | None = None,
    log_x: bool = False,
) -> tuple[Figure, Axes]:
    """Labelled lines through (x, y) points; the label stands at the right end of each.

    Args:
        subtitle: the provenance of measured points, a line a file; it stands under the axis.
        even: a level to compare with, such as a speed-up of 1.
        log_x: whether x doubles from tick to tick; ticks are the x of the first line.
    """
    provenance = [line for part in subtitle.splitlines() for line in textwrap.wrap(part, 74)]
    fig, ax = plt.subplots(figsize=(7.0, 3.6 + 0.2 * len(provenance)))
    if even is not None:
        ax.axhline(even, color=MUTED, linewidth=1, zorder=0)
    ends = sorted(((points[-1][1], label) for label, points in lines.items()), reverse=True)
    lowest = min(y for points in lines.values() for _, y in points)
    highest = max(y for points in lines.values() for _, y in points)
    at, gap = {}, 0.075 * (max(highest, even or highest) - min(lowest, even or lowest))
    for y, label in ends:
        at[label] = min(y, *(other - gap for other in at.values())) if at else y
    colours = (*REQUEST_COLOURS, KERNEL_COLOURS["mla"], INK)
    for index, (label, points) in enumerate(lines.items()):
        xs, ys = zip(*points, strict=True)
        marker, style = MARKERS[index % len(MARKERS)], STYLES[index % len(STYLES)]
        ax.plot(xs, ys, marker=marker, linestyle=style, color=colours[index % len(colours)])
        place = {"xytext": (1.02, at[label]), "textcoords": ("axes fraction", "data"), "va": "center"}
        ax.annotate(label, (xs[-1], ys[-1]), color=INK, annotation_clip=False, size=9, **place)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    if log_x:
        ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set(title=title, xlabel="\n".join([xlabel, *provenance]), ylabel=ylabel)
    return fig, ax
