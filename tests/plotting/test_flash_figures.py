"""The figures of chapter 03 show the data they were given: curves, tiles and roofs as numbers and texts."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from minivllm.plotting.flash import (
    FULL,
    MASKED,
    SKIPPED,
    bytes_text,
    memory_by_context,
    online_softmax_trace,
    roofline,
    tile_map,
)
from minivllm.plotting.style import HIGHLIGHT, KERNEL_COLOURS


def curve(ax, colour: str) -> list[tuple[float, float]]:
    """The points of the line of this colour that has the most of them."""
    lines = [line for line in ax.lines if to_hex(line.get_color()) == colour]
    longest = max(lines, key=lambda line: len(line.get_xdata()))
    return list(zip(longest.get_xdata(), longest.get_ydata(), strict=True))


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def assert_labels_do_not_overlap(fig, ax) -> None:
    """No two texts inside the axes cover each other, and none leaves the figure."""
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, ax.texts[index]


def test_memory_curves_have_a_limit_and_logarithmic_axes():
    contexts, scores, inputs = [1024, 2048, 4096], [1e9, 4e9, 1.6e10], [1e7, 2e7, 4e7]
    fig, ax = memory_by_context(contexts, scores, inputs, ("one GPU", 5e9), "A finding")
    assert curve(ax, KERNEL_COLOURS["reference"]) == list(zip(contexts, scores, strict=True))
    assert curve(ax, KERNEL_COLOURS["flash"]) == list(zip(contexts, inputs, strict=True))
    assert {y for _, y in curve(ax, HIGHLIGHT)} == {5e9}
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1k", "2k", "4k"]
    assert texts(ax) == ["one GPU", "scores, naive", "q, k, v and out"]
    assert ax.get_title(loc="left") == "A finding" and ax.get_xlabel() and ax.get_ylabel()
    assert_labels_do_not_overlap(fig, ax)


def test_the_trace_draws_scores_their_running_maximum_and_the_output_after_each_tile():
    estimates = {"right": [1.0, 0.5], "wrong": [1.0, 0.9]}
    fig, (top, bottom) = online_softmax_trace([1.0, 2.0, 4.0, 3.0], 2, [2.0, 4.0], estimates, [1.0, 0.5], "Exact")
    assert [bar.get_height() for bar in top.patches] == [1.0, 2.0, 4.0, 3.0]
    assert curve(top, KERNEL_COLOURS["flash"]) == [(-0.5, 2.0), (1.5, 4.0), (3.5, 4.0)]
    assert curve(bottom, KERNEL_COLOURS["flash"]) == [(1.5, 1.0), (3.5, 0.5)]
    assert curve(bottom, HIGHLIGHT) == [(1.5, 1.0), (3.5, 0.9)]
    assert texts(bottom) == ["right", "wrong"]
    assert top.get_title(loc="left") == "Exact" and bottom.get_xlabel() and bottom.get_ylabel()
    assert_labels_do_not_overlap(fig, bottom)


def test_the_tile_map_draws_and_counts_each_kind():
    kinds = np.array([[MASKED, SKIPPED, SKIPPED], [FULL, MASKED, SKIPPED], [FULL, FULL, MASKED]])
    fig, ax = tile_map(kinds, 64, 32, "Half is skipped")
    squares = ax.patches[:9]
    assert [bool(square.get_hatch()) for square in squares] == [kind == MASKED for kind in kinds.flatten()]
    filled = [to_hex(square.get_facecolor()) == KERNEL_COLOURS["flash"] for square in squares]
    assert filled == [kind == FULL for kind in kinds.flatten()]
    names = ["computed, no mask", "computed and masked", "never touched"]
    assert texts(ax) == [f"{name}:\n3 tiles" for name in names]
    assert ax.yaxis_inverted() and (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    assert_labels_do_not_overlap(fig, ax)


def test_points_lie_on_the_lower_of_the_two_roofs():
    points = [("slow", 50.0, KERNEL_COLOURS["reference"]), ("fast", 1000.0, KERNEL_COLOURS["flash"])]
    fig, ax = roofline(1e15, 5e12, points, "A model")
    markers = [line for line in ax.lines if line.get_marker() == "o"]
    places = [(line.get_xdata()[0], line.get_ydata()[0]) for line in markers]
    assert places == [(50.0, pytest.approx(250.0)), (1000.0, pytest.approx(1000.0))]
    assert texts(ax) == ["slow", "fast", "ridge: 200 FLOPs for each byte"]
    assert "modelled" in ax.get_ylabel()
    assert_labels_do_not_overlap(fig, ax)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5 B"), (999, "999 B"), (1e3, "1 kB"), (1.5e9, "1.5 GB"), (141e9, "141 GB"), (2e12, "2 TB")],
)
def test_bytes_are_written_in_powers_of_a_thousand(value: float, text: str):
    assert bytes_text(value) == text
