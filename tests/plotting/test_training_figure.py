"""The loss curve of a training run: axes, lines, what the title states."""

import matplotlib.pyplot as plt

from minivllm.plotting.training import loss_curve

TRAINING = {
    "recipe": {"name": "tiny"},
    "run": {"best_step": 20},
    "curve": [{"step": 10, "losses": [5.0, 5.4, 5.5]}, {"step": 20, "losses": [4.0, 4.4, 4.5]}],
    "held_out": [{"step": 10, "losses": [5.1, 5.5, 5.6]}, {"step": 20, "losses": [4.26, 4.6, 4.7]}],
}


def test_the_loss_curve_shows_each_pass_and_states_the_best_held_out_loss():
    figure, ax = loss_curve(TRAINING)
    assert ax.get_xlabel() == "step" and ax.get_ylabel() == "nats a token"
    assert ax.get_title(loc="left").startswith("tiny: 4.26 nats a token") or "4.26" in ax.get_title()
    named = {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}
    assert set(named) == {"main model", "MTP pass 1", "MTP pass 2", "weights kept"}
    assert list(named["main model"].get_ydata()) == [5.1, 4.26] and list(named["MTP pass 2"].get_ydata()) == [5.6, 4.7]
    assert named["MTP pass 1"].get_linestyle() != named["MTP pass 2"].get_linestyle()
    assert list(named["weights kept"].get_xdata()) == [20, 20]
    low, high = ax.get_ylim()
    assert low < 4.26 and high > 5.6
    plt.close(figure)
