"""Figures of chapter 11: what each forward pass reads and guesses, and how often which draft is right."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minivllm.plotting.style import INK, KERNEL_COLOURS, MUTED, PLATE, TOKEN_LOOKS

_LINES = (
    {"color": KERNEL_COLOURS["mla"], "marker": "o", "linestyle": "-", "linewidth": 2.2},
    {"color": INK, "marker": "s", "linestyle": "--", "linewidth": 1.2},
    {"color": MUTED, "marker": "D", "linestyle": ":", "linewidth": 1.8},
)


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass of one request.

    `tokens` are read at `first_position` and after it; the last `num_void` of them turned out to be wrong drafts.
    `says` is what its last row that counts says. `is_drafter` tells a pass of the MTP layer from one of the target.
    """

    label: str
    first_position: int
    tokens: Sequence[str]
    says: str
    is_drafter: bool
    num_void: int = 0


def forward_passes(passes: Sequence[ForwardPass], title: str) -> tuple[Figure, Axes]:
    """A row for each pass, a column for each position; what the pass says stands behind its row."""
    end = max(each.first_position + len(each.tokens) for each in passes)
    fig, ax = plt.subplots(figsize=(7.6, 0.55 * len(passes) + 1.1))
    for row, each in enumerate(passes):
        y = len(passes) - 1 - row
        num_kept = len(each.tokens) - each.num_void
        for index, token in enumerate(each.tokens):
            look = TOKEN_LOOKS["rejected" if index >= num_kept else "accepted" if each.is_drafter else "decode"]
            x = each.first_position + index
            ax.add_patch(Rectangle((x + 0.04, y + 0.12), 0.92, 0.76, linewidth=1.2, **look))
            ax.text(x + 0.5, y + 0.5, token, ha="center", va="center", size=8, bbox=PLATE)
        x = each.first_position + len(each.tokens)
        ax.annotate(
            each.says, (x + 0.02, y + 0.5), (x + 0.55, y + 0.5), va="center", ha="left", size=9, weight="bold",
            arrowprops={"arrowstyle": "<-", "color": INK},
        )  # fmt: skip
    ax.set_yticks([len(passes) - 0.5 - row for row in range(len(passes))], [each.label for each in passes])
    ax.set_xticks([position + 0.5 for position in range(end)], range(end))
    ax.set(xlim=(0, end + 2.2), ylim=(0, len(passes)), title=title, xlabel="position that is computed (tokens)")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return fig, ax


def acceptance_by_draft(
    panels: Mapping[str, Mapping[str, Sequence[float]]], title: str
) -> tuple[Figure, Sequence[Axes]]:
    """How often draft 1, 2, … is accepted where those before it were: a panel a way of choosing tokens, a line a model.

    Args:
        panels: title of the panel -> label of the line -> shares, 0 to 1, of each draft. At most three lines a panel.
    """
    for name, lines in panels.items():
        if len(lines) > len(_LINES):
            raise ValueError(
                f"panel {name!r} has {len(lines)} lines, but there are looks for {len(_LINES)}: show fewer"
            )
    fig, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.6), squeeze=False)
    for ax, (name, lines) in zip(axes[0], panels.items(), strict=True):
        for look, (label, shares) in zip(_LINES, lines.items(), strict=False):
            drafts = range(1, len(shares) + 1)
            ax.plot(drafts, [100 * share for share in shares], label=label, markersize=6, **look)
        ax.set_xticks(list(range(1, max(map(len, lines.values())) + 1)))
        low, high = min(map(min, lines.values())), max(map(max, lines.values()))
        # Room for the legend below, in whole tens.
        ylim = max(math.floor(10 * low - 1.2), 0) * 10, min(math.ceil(10 * high + 0.5), 10) * 10
        ax.set(xlabel="draft", ylabel="accepted, given those before (%)", ylim=ylim)
        ax.set_title(name, fontweight="normal")
        ax.legend(frameon=False, fontsize=8, loc="lower left")
    fig.suptitle(title, x=0.01, ha="left", size=11, weight="bold")
    return fig, axes[0]
