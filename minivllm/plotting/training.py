"""The loss curve of a tiny model's training."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.plotting.style import HIGHLIGHT, KERNEL_COLOURS, MUTED, REQUEST_COLOURS, use_style

_PASS_DASHES = ("-", (0, (4, 4)), (0, (1, 3)))


def loss_curve(training: Mapping[str, Any]) -> tuple[Figure, Axes]:
    """Training and held-out loss by step, the MTP layer's passes, and the step whose weights were kept.

    Args:
        training: the content of training.json: "recipe", "run", and under "curve" and "held_out" rows with "step" and
            "losses", the main loss and then that of each MTP pass, in nats a token.
    """
    use_style()
    fig, ax = plt.subplots()
    best = min(training["held_out"], key=lambda row: row["losses"][0])["losses"][0]
    for row_name, width, alpha in (("curve", 0.8, 0.55), ("held_out", 1.8, 1.0)):
        rows = training[row_name]
        steps = [row["step"] for row in rows]
        for index in range(len(rows[0]["losses"])):
            colour = REQUEST_COLOURS[(index - 1) % len(REQUEST_COLOURS)] if index else KERNEL_COLOURS["flash"]
            label = (f"MTP pass {index}" if index else "main model") if row_name == "held_out" else None
            losses = [row["losses"][index] for row in rows]
            # Passes lie nearly on each other: dashes let the one below be seen.
            dashes = _PASS_DASHES[(index - 1) % len(_PASS_DASHES)] if index and label else "-"
            ax.plot(steps, losses, color=colour, linewidth=width, alpha=alpha, label=label, linestyle=dashes)
    ax.axvline(training["run"]["best_step"], color=HIGHLIGHT, linestyle=":", label="weights kept")
    finals = [loss for row in training["held_out"] for loss in row["losses"]]
    ax.set_ylim(min(finals) - 0.6, min(max(finals), min(finals) + 3.0) + 0.3)
    ax.set(xlabel="step", ylabel="nats a token")
    ax.set_title(f"{training['recipe']['name']}: {best:.2f} nats a token on held-out text (thick; thin: training)")
    ax.grid(axis="y", color=MUTED, alpha=0.3, linewidth=0.6)
    ax.legend(frameon=False, fontsize=8, ncols=2)
    return fig, ax
