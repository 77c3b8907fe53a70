"""The figures of the KV cache show its owners, its slots and its shared beginnings."""

import pytest
from matplotlib.colors import to_hex
from trace_samples import busy_trace, hand_made_trace

from minivllm.engine.trace_metrics import occupancy
from minivllm.engine.trace_views import block_spans, prefix_tree
from minivllm.plotting.cache import (
    SHARED_HATCH,
    blocks_over_time,
    cache_occupancy,
    prefix_branches,
    reserved_slots,
)
from minivllm.plotting.style import request_colour


def rectangles(ax, *, shared: bool) -> list[tuple[float, float, float]]:
    """(left, centre of the row, width) of the patches that are hatched as shared, or are not."""
    chosen = [patch for patch in ax.patches if (patch.get_hatch() == SHARED_HATCH) is shared]
    return [(p.get_x(), round(p.get_y() + p.get_height() / 2, 3), p.get_width()) for p in chosen]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def legend_texts(fig) -> list[str]:
    return [text.get_text() for legend in fig.legends for text in legend.get_texts()]


def assert_everything_is_inside(fig, ax) -> None:
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
    boxes += [legend.get_window_extent() for legend in fig.legends]
    boxes += [ax.xaxis.label.get_window_extent()]
    for box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= fig.bbox.x1 + 1 and box.y1 <= fig.bbox.y1 + 1


def hand_made_blocks(**options):
    trace = hand_made_trace()
    arguments = {"num_steps": len(trace.steps), "title": "A and B share a block", **options}
    return blocks_over_time(block_spans(trace), list(trace.requests), trace.num_blocks, **arguments)


def test_blocks_that_several_requests_hold_are_hatched():
    fig, ax = hand_made_blocks()
    assert rectangles(ax, shared=True) == [(0, 0, 2)]
    assert rectangles(ax, shared=False) == [
        (2, 0, 1), (3, 0, 1), (0, 1, 3), (0, 2, 2), (1, 3, 2), (1, 4, 1), (3, 5, 1), (3, 6, 1)
    ]  # fmt: skip
    assert ax.get_ylabel() == "block of the pool" and "step" in ax.get_xlabel()
    assert ax.yaxis_inverted() and ax.get_title(loc="left") == "A and B share a block"
    assert_everything_is_inside(fig, ax)


def test_a_block_has_the_colour_of_the_request_that_holds_it():
    _, ax = hand_made_blocks()
    colours = {(p.get_x(), round(p.get_y() + p.get_height() / 2)): to_hex(p.get_facecolor()) for p in ax.patches}
    assert colours[0, 1] == request_colour(0) and colours[0, 2] == request_colour(1)
    assert colours[2, 0] == request_colour(0) and colours[3, 0] == request_colour(1)


def test_owners_are_named_once_each():
    _, ax = hand_made_blocks()
    assert sorted(texts(ax)) == ["A", "A + B", "B"]


def test_spans_are_cut_to_the_steps_shown():
    _, ax = hand_made_blocks(first=1, num_steps=2)
    assert ax.get_xlim() == (1, 3)
    assert rectangles(ax, shared=True) == [(1, 0, 1)]
    assert (1, 1, 2) in rectangles(ax, shared=False) and not any(x >= 3 for x, _, _ in rectangles(ax, shared=False))


def test_a_large_pool_is_drawn_without_outlines_and_names():
    trace = busy_trace(num_blocks=200)
    fig, ax = blocks_over_time(block_spans(trace), list(trace.requests), 200, len(trace.steps), "Large")
    assert texts(ax) == [] and {patch.get_linewidth() for patch in ax.patches} == {0.0}
    assert fig.get_size_inches()[1] <= 8.0


def test_names_of_owners_do_not_overlap_in_a_busy_pool():
    trace = busy_trace()
    fig, ax = blocks_over_time(block_spans(trace), list(trace.requests), 16, len(trace.steps), "Busy")
    assert len(texts(ax)) >= 4
    assert_everything_is_inside(fig, ax)


def area_top(ax, label: str) -> float:
    (area,) = [c for c in ax.collections if c.get_label() == label]
    return max(vertex[1] for path in area.get_paths() for vertex in path.vertices)


def test_occupancy_is_stacked_under_the_capacity_beside_what_contiguous_rows_would_take():
    trace = hand_made_trace()
    fig, ax = cache_occupancy(occupancy(trace), "Half empty", trace.duration)
    assert [area_top(ax, label) for label in ("holds a token", "kept for later", "never used")] == [14, 15, 20]
    contiguous, capacity = ax.lines
    assert list(contiguous.get_xdata()) == [0, 1, 2, 3, 4] and list(contiguous.get_ydata()) == [32, 32, 16, 16, 16]
    assert list(capacity.get_ydata()) == [32, 32] and texts(ax) == ["the cache: 32 slots"]
    assert ax.get_xlabel() == "time (s)" and "slots" in ax.get_ylabel() and ax.get_ylim()[1] > 32
    assert legend_texts(fig) == ["holds a token", "kept for later", "never used", "contiguous would take"]
    assert_everything_is_inside(fig, ax)


def test_the_contiguous_line_can_be_left_out():
    fig, ax = cache_occupancy(occupancy(hand_made_trace()), "A baseline", with_contiguous=False)
    assert len(ax.lines) == 1 and "contiguous would take" not in legend_texts(fig)


def test_reserved_slots_are_shares_that_fill_a_bar_for_each_policy():
    policies = {"paged": occupancy(hand_made_trace()), "busy": occupancy(busy_trace())}
    fig, ax = reserved_slots(policies, "Paging wastes little")
    widths = {0: [], 1: []}
    for bar in ax.patches:
        widths[round(bar.get_y() + bar.get_height() / 2)].append(bar.get_width())
    assert widths[0] == pytest.approx([100 * share for share in policies["paged"].shares])
    assert sum(widths[1]) == pytest.approx(100)
    assert texts(ax)[:3] == ["73%", "9%", "18%"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["paged", "busy"]
    assert legend_texts(fig) == ["holds a token", "kept for later", "never used"] and "%" in ax.get_xlabel()
    assert_everything_is_inside(fig, ax)


def test_branches_of_the_prefix_tree_start_where_requests_part():
    tree = prefix_tree({"A": [0, 1, 2], "B": [0, 1, 3, 4], "C": [0, 5]})
    fig, ax = prefix_branches(tree, "Two beginnings")
    assert rectangles(ax, shared=True) == [(0, 1.0, 1), (1, 0.5, 1)]
    assert rectangles(ax, shared=False) == [(2, 0, 1), (2, 1, 2), (1, 2, 1)]
    assert sorted(texts(ax)) == ["2 requests", "3 requests", "A", "B", "C"]
    assert "blocks from the beginning" in ax.get_xlabel()
    assert_everything_is_inside(fig, ax)


def test_a_tree_whose_requests_part_at_once_has_no_trunk():
    _, ax = prefix_branches(prefix_tree({"A": [0], "B": [1]}), "Nothing shared", unit="tokens")
    assert rectangles(ax, shared=True) == [] and texts(ax) == ["A", "B"] and "tokens from" in ax.get_xlabel()


def test_a_tree_of_nothing_can_be_drawn():
    _, ax = prefix_branches(prefix_tree({}), "Nothing yet")
    assert not ax.patches and texts(ax) == []
