"""The figures of chapter 02 show the data they were given: extents and holes, waste and its bound, the queue."""

import pytest
from matplotlib.colors import to_hex

from minivllm.plotting.paging import HOLE, free_queue, memory_layouts, waste_by_block_size
from minivllm.plotting.style import request_colour


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def boxes(ax, *, holes: bool) -> list[tuple[float, float, float]]:
    """(left, centre of the row, width) of the patches that are holes, or are not."""
    chosen = [patch for patch in ax.patches if (patch.get_hatch() == HOLE["hatch"]) is holes]
    return [(p.get_x(), round(p.get_y() + p.get_height() / 2, 3), p.get_width()) for p in chosen]


def tick_texts(labels) -> list[str]:
    return [label.get_text() for label in labels]


def assert_texts_are_inside_and_apart(fig, ax) -> None:
    fig.canvas.draw()
    extents = [text.get_window_extent() for text in [*ax.texts, ax.xaxis.label, ax.title] if text.get_text()]
    for index, box in enumerate(extents):
        assert not any(box.overlaps(other) for other in extents[index + 1 :]), ax.texts[index]
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1 and box.y0 >= 0 and box.y1 <= fig.bbox.y1


LAYOUTS = {"all": [("A", 0, 20), ("B", 20, 12), ("C", 32, 16)], "later": [("D", 32, 4), ("B", 20, 12), ("D", 0, 16)]}


def test_each_moment_is_a_strip_with_its_holders_and_the_holes_between_them():
    fig, ax = memory_layouts(LAYOUTS, 48, "Holes")
    assert boxes(ax, holes=False) == [(0, 0, 20), (20, 0, 12), (32, 0, 16), (0, 1, 16), (20, 1, 12), (32, 1, 4)]
    assert boxes(ax, holes=True) == [(16, 1, 4), (36, 1, 12)]
    assert texts(ax) == ["A: 20", "B: 12", "C: 16", "D: 16", "4 free", "B: 12", "D: 4", "12 free"]
    assert tick_texts(ax.get_yticklabels()) == ["all", "later"] and ax.yaxis_inverted()
    assert ax.get_xlim() == (0, 48) and "slot" in ax.get_xlabel() and ax.get_title(loc="left") == "Holes"
    assert_texts_are_inside_and_apart(fig, ax)


def test_a_holder_keeps_its_colour():
    _, ax = memory_layouts(LAYOUTS, 48, "Holes")
    colours = [to_hex(patch.get_facecolor()) for patch in ax.patches if not patch.get_hatch()]
    assert colours == [request_colour(number) for number in (0, 1, 2, 3, 1, 3)]


def test_empty_memory_is_one_hole():
    _, ax = memory_layouts({"new": []}, 8, "Empty")
    assert boxes(ax, holes=True) == [(0, 0, 8)] and texts(ax) == ["8 free"]


def test_measured_waste_lies_beside_the_lines_that_were_predicted():
    sizes, mean, largest = [1, 4, 16, 64], [0, 1.4, 7.6, 30], [0, 3, 15, 60]
    fig, ax = waste_by_block_size(sizes, mean, largest, "Half a block")
    bound, half, highest, average = ([float(y) for y in line.get_ydata()] for line in ax.lines)
    assert all(list(line.get_xdata()) == sizes for line in ax.lines)
    assert bound == [0, 3, 15, 63] and half == [0, 1.5, 7.5, 31.5]
    assert highest == pytest.approx(largest) and average == pytest.approx(mean)
    assert tick_texts(ax.get_legend().get_texts()) == ["largest, measured", "mean, measured"]
    fig.canvas.draw()
    assert tick_texts(ax.get_xticklabels()) == ["1", "4", "16", "64"]
    assert tick_texts(ax.get_yticklabels()) == ["0", "1", "4", "16", "64"]
    assert "slots" in ax.get_xlabel() and "slots" in ax.get_ylabel()
    assert_texts_are_inside_and_apart(fig, ax)


def test_the_queue_is_drawn_in_order_and_only_named_blocks_are_coloured():
    states = {"A has left": [(2, None), (3, None), (1, "A[1]"), (0, "A[0]")], "C came": [(1, "A[1]"), (3, "C[0]")]}
    fig, ax = free_queue(states, "Tail first")
    assert texts(ax) == ["2", "3", "1  A[1]", "0  A[0]", "1  A[1]", "3  C[0]"]
    places = [(patch.get_x() + 0.46, patch.get_y() + 0.4) for patch in ax.patches]
    assert places == [pytest.approx(place) for place in [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]]
    colours = [to_hex(patch.get_facecolor()) for patch in ax.patches]
    first, second = request_colour(0), request_colour(1)
    assert colours == ["#ffffff", "#ffffff", first, first, first, second]
    assert tick_texts(ax.get_yticklabels()) == ["A has left", "C came"] and ax.yaxis_inverted()
    assert "handed out next" in ax.get_xlabel()
    assert_texts_are_inside_and_apart(fig, ax)


def test_an_empty_queue_is_an_empty_row():
    _, ax = free_queue({"all held": []}, "Nothing left")
    assert not ax.patches and tick_texts(ax.get_yticklabels()) == ["all held"]
