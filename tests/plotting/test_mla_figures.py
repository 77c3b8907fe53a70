"""The figures of chapter 05 show the data they were given: bytes, operations and pieces."""

import pytest
from matplotlib.colors import to_hex

from minivllm.plotting.mla import Piece, RowField, crossover, plan_map, row_layouts
from minivllm.plotting.style import KERNEL_COLOURS, request_colour


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def assert_texts_do_not_overlap(fig, ax) -> None:
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, ax.texts[index]


LAYOUTS = {
    "bfloat16": [RowField("latent", 1024), RowField("", 0), RowField("rope", 128)],
    "FP8": [RowField("latent", 512), RowField("scales", 16), RowField("rope", 128)],
}


def test_a_row_is_drawn_to_scale_with_its_total_behind_it():
    fig, ax = row_layouts(LAYOUTS, "Bytes")
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches]
    assert bars == [(0, 1024), (1024, 128), (0, 512), (512, 16), (528, 128)]
    assert texts(ax) == ["latent", "rope", "1,152 bytes", "latent", "scales", "rope", "656 bytes"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["bfloat16", "FP8"]
    assert ax.yaxis_inverted() and "bytes" in ax.get_xlabel() and ax.get_title(loc="left") == "Bytes"
    assert_texts_do_not_overlap(fig, ax)


def test_a_field_has_the_same_colour_in_every_layout():
    _, ax = row_layouts(LAYOUTS, "Bytes")
    colours = [to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert colours[:2] == [colours[2], colours[4]] and colours[0] == KERNEL_COLOURS["mla"]
    assert len(set(colours)) == 3


def test_two_ways_are_two_lines_and_the_crossing_is_named():
    lines = {"absorbed": [2.0, 4.0, 8.0], "decompressed": [5.0, 5.5, 6.5]}
    fig, ax = crossover([1, 2, 4], lines, 2.8, "FLOP", "Cross")
    assert [line.get_ydata().tolist() for line in ax.lines[:2]] == list(lines.values())
    assert ax.lines[0].get_linestyle() != ax.lines[1].get_linestyle()
    assert ax.lines[2].get_xdata() == [2.8, 2.8]
    assert texts(ax) == ["absorbed", "decompressed", "2.8"]
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert ax.get_ylabel() == "FLOP" and "queries" in ax.get_xlabel()
    assert_texts_do_not_overlap(fig, ax)


def test_a_crossover_is_of_exactly_two_ways():
    with pytest.raises(ValueError):
        crossover([1], {"one": [1.0]}, 1.0, "FLOP", "Cross")


def test_pieces_lie_where_the_plan_puts_them_over_what_the_part_is_charged():
    pieces = [Piece(0, 0, 0, 8, start=5), Piece(1, 0, 8, 16, start=0), Piece(1, 1, 0, 1, start=12)]
    fig, ax = plan_map(pieces, [13, 13], "Plan")
    charged = [(patch.get_x(), patch.get_width()) for patch in ax.patches if patch.get_hatch()]
    assert charged == [(0, 13), (0, 13)]
    drawn = [(p.get_x(), p.get_y() + 0.4, p.get_width(), to_hex(p.get_fc())) for p in ax.patches if not p.get_hatch()]
    first, second = request_colour(0), request_colour(1)
    assert drawn == [(5, 0, 8, first), (0, 1, 8, first), (12, 1, 1, second)]
    assert texts(ax) == ["request 0, blocks 0 to 7", "request 0, blocks 8 to 15", "1"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["part 0", "part 1"]
    assert_texts_do_not_overlap(fig, ax)
