"""Figures are drawn without a screen, in the course's style, and closed after each test."""

import matplotlib
import pytest

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def drawing():
    import matplotlib.pyplot as plt

    from minivllm.plotting.style import use_style

    with matplotlib.rc_context():
        use_style()
        yield
        plt.close("all")
