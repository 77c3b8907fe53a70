"""The figures of chapter 01 show the data they were given: steps, heads, bytes and shares as numbers and texts."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minivllm.plotting.cache_memory import bytes_per_token, head_sharing, read_for_each_token, work_by_step
from minivllm.plotting.style import KERNEL_COLOURS, MUTED


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def assert_labels_do_not_overlap(fig, ax) -> None:
    """No two texts inside the axes cover each other, and none leaves the figure."""
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, ax.texts[index]


def test_work_is_drawn_in_gigaflops_from_zero():
    fig, ax = work_by_step({"again": [1e9, 2e9, 3e9], "cached": [1e9, 1e8, 1e8]}, "A finding")
    assert [list(line.get_ydata()) for line in ax.lines] == [[1, 2, 3], [1, 0.1, 0.1]]
    assert ax.get_ylim()[0] == 0 and texts(ax) == ["again", "cached"]
    assert "GFLOPs" in ax.get_ylabel() and ax.get_title(loc="left") == "A finding"
    assert_labels_do_not_overlap(fig, ax)


def test_each_query_head_is_joined_to_the_stored_head_that_it_reads():
    fig, ax = head_sharing({"GQA: 2": [0, 0, 1, 1], "MLA: 1 latent": [0, 0, 0, 0]}, "Less to store")
    ends = [tuple(line.get_xdata()) for line in ax.lines]
    assert ends == [(0, 0.5), (1, 0.5), (2, 2.5), (3, 2.5), (0, 1.5), (1, 1.5), (2, 1.5), (3, 1.5)]
    boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert len(boxes) == (2 + 4) + (1 + 4)
    assert sum(to_hex(box.get_facecolor()) == KERNEL_COLOURS["mla"] for box in boxes) == 1
    assert {"GQA: 2", "MLA: 1 latent", "queries", "stored"} < set(texts(ax))
    assert_labels_do_not_overlap(fig, ax)


def test_a_model_is_a_row_with_its_bytes_in_kib_on_a_logarithmic_axis():
    models = [("Old", "MHA", 512 * 1024), ("Small", "MQA", 8192), ("New", "MLA", 70_272)]
    fig, ax = bytes_per_token(models, "The new one stores less")
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if line.get_marker() in "oD"]
    assert points == [(512, 0), (8, 1), (pytest.approx(68.625), 2)]
    assert texts(ax) == ["MHA  512 KiB", "MQA  8 KiB", "MLA  68.6 KiB"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["Old", "Small", "New"]
    assert ax.get_xscale() == "log" and ax.yaxis_inverted() and "KiB" in ax.get_xlabel()
    assert_labels_do_not_overlap(fig, ax)


def test_the_weights_stand_on_the_cache_and_the_sum_above():
    _, ax = read_for_each_token([1, 2, 4], [16e9, 8e9, 4e9], [1e9, 1e9, 1e9], "Shared weights")
    bars = [(to_hex(bar.get_facecolor()), bar.get_y(), bar.get_height()) for bar in ax.patches if bar.get_width() < 1]
    cache, weights = bars[:3], bars[3:6]
    assert cache == [(KERNEL_COLOURS["paged"], 0, 1)] * 3
    assert weights == [(MUTED, 1, 16), (MUTED, 1, 8), (MUTED, 1, 4)]
    assert texts(ax)[:3] == ["17.0", "9.0", "5.0"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "4"]
    assert ax.get_xlabel() and "GB" in ax.get_ylabel()
