"""The figures of chapter 00 show the data they were given: bars, slots and words as numbers and texts."""

import matplotlib.pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minivllm.plotting.style import HIGHLIGHT, MUTED, request_colour
from minivllm.plotting.tour import CachedRequest, block_map, next_token_bars, step_timeline


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def filled(ax, colour: str) -> list[tuple[float, float]]:
    """(offset, height) of each patch of this colour."""
    patches = [patch for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    return [(patch.get_x(), round(patch.get_height(), 2)) for patch in patches if to_hex(patch.get_fc()) == colour]


def assert_labels_do_not_overlap(fig, ax) -> None:
    """No two texts inside the axes cover each other, and none leaves the figure."""
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, ax.texts[index]


def test_candidates_are_bars_from_the_top_and_the_chosen_one_stands_out():
    fig, ax = next_token_bars([" sky", "\n", " east"], [0.5, 0.25, 0.125], chosen=1, title="A finding")
    assert [bar.get_width() for bar in ax.patches] == [0.5, 0.25, 0.125]
    assert [to_hex(bar.get_facecolor()) for bar in ax.patches] == [MUTED, HIGHLIGHT, MUTED]
    assert [label.get_text() for label in ax.get_yticklabels()] == ['" sky"', '"\\n"', '" east"']
    assert texts(ax) == ["0.50", "0.25  chosen", "0.12"]
    assert ax.yaxis_inverted() and ax.get_xlabel().startswith("probability") and ax.get_ylabel()
    assert ax.get_title(loc="left") == "A finding"
    assert_labels_do_not_overlap(fig, ax)


A = CachedRequest("A", [0, 2], ["the", " sun", " is"])
B = CachedRequest("B", [0, 1], ["the", " sun", " or"])


def test_a_shared_block_is_striped_in_both_colours_and_the_others_in_one():
    _, ax = block_map([A, B], num_blocks=4, block_size=2, title="Shared")
    assert filled(ax, request_colour(0)) == [(0, 0.42), (1, 0.42), (0, 0.84)]
    assert filled(ax, request_colour(1)) == [(0, 0.42), (1, 0.42), (0, 0.84)]


def test_slots_that_are_held_but_not_written_are_hatched():
    _, ax = block_map([A, B], num_blocks=4, block_size=2, title="Shared")
    hatched = [(patch.get_x(), round(patch.get_y() + 0.42)) for patch in ax.patches if patch.get_hatch()]
    assert hatched == [(1, 1), (1, 2)]


def test_the_map_names_slots_tokens_and_entries_of_block_tables():
    fig, ax = block_map([A, B], num_blocks=4, block_size=2, title="Shared")
    by_row = {row: [t.get_text() for t in ax.texts if t.get_position()[1] == row] for row in range(4)}
    assert by_row[0] == ["A[0], B[0]", "the", "0", " sun", "1"]
    assert by_row[1] == ["B[1]", " or", "2", "", "3"]
    assert by_row[2] == ["A[1]", " is", "4", "", "5"]
    assert by_row[3] == ["free", "", "6", "", "7"]
    assert ax.get_xlabel() == "offset within the block" and ax.get_ylabel() == "block of the pool"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1"]
    assert_labels_do_not_overlap(fig, ax)


def test_an_empty_pool_can_be_drawn():
    _, ax = block_map([], num_blocks=2, block_size=2, title="Nothing yet")
    assert texts(ax).count("free") == 2 and not any(patch.get_fill() for patch in ax.patches)


def test_a_step_is_a_bar_of_segments_whose_heights_are_the_scheduled_tokens():
    steps = [{"A": 5}, {"A": 1}, {"A": 1, "B": 6}, {}]
    fig, ax = step_timeline(steps, "One rule")
    segments = [(round(bar.get_x() + 0.4), bar.get_y(), bar.get_height()) for bar in ax.patches]
    assert segments == [(0, 0, 5), (1, 0, 1), (2, 0, 1), (2, 1, 6)]
    colours = [to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert colours == [request_colour(0), request_colour(0), request_colour(0), request_colour(1)]
    assert texts(ax) == ["5", "request A", "1", "1", "6", "request B"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2", "3"]
    assert ax.get_xlabel() == "engine step" and "tokens" in ax.get_ylabel()
    assert_labels_do_not_overlap(fig, ax)


def test_figures_are_left_open_for_the_notebook_to_show():
    fig, _ = step_timeline([{"A": 1}], "One")
    assert plt.fignum_exists(fig.number)
