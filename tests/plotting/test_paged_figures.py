"""The figures of chapter 04 show the data they were given: pages, rows, counts and weights."""

from matplotlib.colors import to_hex

from minivllm.plotting.paged import packed_tile, page_walk, processors_at_work, split_weights
from minivllm.plotting.style import KERNEL_COLOURS, request_colour


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def filled(ax, colour: str) -> list[tuple[float, float]]:
    """Lower left corner of each patch of this colour."""
    return [patch.get_xy() for patch in ax.patches if patch.get_fill() and to_hex(patch.get_fc()) == colour]


def assert_texts_do_not_overlap(fig, ax) -> None:
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, ax.texts[index]


def test_each_table_entry_has_its_colour_in_the_request_and_in_the_pool():
    fig, ax = page_walk([2, 0, -1], seq_len=3, block_size=2, num_blocks=3, title="Strangers")
    assert filled(ax, request_colour(0)) == [(1.0, 4), (4, 0), (2.0, 4), (5, 0)]
    assert filled(ax, request_colour(1)) == [(3.0, 4), (0, 0)]
    assert [patch.get_xy() for patch in ax.patches if patch.get_hatch()] == [(1, 0)]
    assert texts(ax) == ["block 0", "block 1", "block 2", "0", "0", "1", "1", "[0] = 2", "2", "2", "[1] = 0"]
    ends = [line.get_xdata().tolist() for line in ax.lines]
    assert ends == [[2.0, 5.0], [3.5, 1.0]]
    assert ax.get_title(loc="left") == "Strangers"
    assert_texts_do_not_overlap(fig, ax)


def test_the_walk_does_not_look_at_the_tail_of_the_table():
    _, ax = page_walk([1, 2**31 - 1, -7], seq_len=4, block_size=4, num_blocks=2, title="One page")
    assert len(ax.lines) == 1 and not any(patch.get_hatch() for patch in ax.patches)


def test_a_packed_row_is_named_and_shows_what_it_sees():
    _, ax = packed_tile([0, 0, 1], [2, 3, 2], [[True, False], [True, False], [True, True]], "Packed")
    assert filled(ax, request_colour(0)) == [(0, 0), (0, 1)]
    assert filled(ax, request_colour(1)) == [(0, 2), (1, 2)]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["row 0: token 0, head 2", "row 1: token 0, head 3", "row 2: token 1, head 2"]
    assert ax.yaxis_inverted() and "key" in ax.get_xlabel()


def test_lines_of_processors_are_the_counts_in_the_kernels_colour():
    fig, ax = processors_at_work([1, 2], {"1 split": [8, 16], "16 splits": [128, 132]}, 132, "Idle")
    assert [line.get_ydata().tolist() for line in ax.lines] == [[8, 16], [128, 132]]
    assert {line.get_color() for line in ax.lines} == {KERNEL_COLOURS["paged"]}
    assert len({line.get_linestyle() for line in ax.lines}) == 2, "told apart in grey, too"
    assert texts(ax) == ["1 split", "16 splits", "all 132"]
    assert "requests" in ax.get_xlabel() and "multiprocessors" in ax.get_ylabel()
    assert_texts_do_not_overlap(fig, ax)


def test_weights_are_segments_that_are_named_where_they_are_widest():
    fig, ax = split_weights([[0.75, 0.25], [0.03, 0.97]], "Weights")
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches]
    assert bars == [(0.0, 0.75), (0.75, 0.25), (0.0, 0.03), (0.03, 0.97)]
    assert texts(ax) == ["split 0: 0.75", "0.25", "split 1: 0.97"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["head 0", "head 1"]
    assert_texts_do_not_overlap(fig, ax)
