"""Which expert each token of a text goes to, and with what weight."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from minivllm.plotting.style import INK, KERNEL_COLOURS

_WEIGHTS = LinearSegmentedColormap.from_list("weights", ["white", KERNEL_COLOURS["mla"]])


def routing_map(
    tokens: Sequence[str],
    weights: Sequence[Sequence[float]],
    num_groups: int,
    title: str,
    emphasised: Sequence[int] = (),
) -> tuple[Figure, Axes]:
    """A row a token, a column an expert; where a token visits an expert, a cell with its weight.

    Args:
        tokens: T texts, in the order of the sentence.
        weights: [T, E], 0 where the token does not visit the expert.
        num_groups: groups of neighbouring experts, parted by lines; must divide E.
        emphasised: rows whose token is printed in bold.

    Raises:
        ValueError: a row of `weights` for each token is not there, or the groups are not equal.
    """
    table = np.asarray(weights, dtype=float)
    if table.ndim != 2 or len(table) != len(tokens):
        raise ValueError(f"weights have shape {table.shape}: give one row for each of the {len(tokens)} tokens")
    num_experts = table.shape[1]
    if num_experts % num_groups:
        raise ValueError(f"{num_groups} groups do not divide {num_experts} experts")
    fig, ax = plt.subplots(figsize=(7.0, 1.1 + 0.22 * len(tokens)))
    ax.imshow(table, cmap=_WEIGHTS, vmin=0, vmax=table.max(), aspect="auto")
    for (row, expert), weight in np.ndenumerate(table):
        if weight > 0:
            ink = "white" if weight > 0.6 * table.max() else INK
            ax.text(expert, row, f"{weight:.1f}", ha="center", va="center", color=ink, size=8)
    per_group = num_experts // num_groups
    for group in range(1, num_groups):
        ax.axvline(group * per_group - 0.5, color=INK, linewidth=1)
    ax.set_xticks(range(num_experts))
    labels = ax.set_yticks(range(len(tokens)), [f'"{token.strip()}"' for token in tokens])
    for row in emphasised:
        labels[row].label1.set_weight("bold")
    ax.tick_params(length=0)
    for side in ("top", "right"):
        ax.spines[side].set_visible(True)
    ax.set(xlabel=f"expert ({num_groups} groups of {per_group}); the number is its weight", ylabel="token", title=title)
    return fig, ax
