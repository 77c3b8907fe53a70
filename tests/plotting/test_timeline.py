"""The figures of a trace over its steps show its cells, waits and tokens, and every text has its place."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from trace_samples import busy_trace, hand_made_trace

from minivllm.engine.trace import Trace
from minivllm.engine.trace_metrics import tokens_by_part
from minivllm.engine.trace_views import timeline
from minivllm.plotting.style import HIGHLIGHT, KERNEL_COLOURS, MUTED, TOKEN_LOOKS
from minivllm.plotting.timeline import LABELS, request_timeline, token_budget


def patches_like(ax, part: str) -> list[tuple[float, float, float]]:
    """(left, centre, width) of each rectangle that looks like a part."""
    look = TOKEN_LOOKS[part]
    return [
        (round(p.get_x(), 3), round(p.get_y() + p.get_height() / 2, 3), round(p.get_width(), 3))
        for p in ax.patches
        if isinstance(p, Rectangle)
        and (to_hex(p.get_facecolor()), p.get_hatch()) == (to_hex(look["facecolor"]), look.get("hatch"))
    ]


def legend_texts(fig) -> list[str]:
    return [text.get_text() for legend in fig.legends for text in legend.get_texts()]


def assert_everything_is_inside(fig, ax) -> None:
    """No text leaves the figure, the title and the legend included, and no two inside the axes overlap."""
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
    boxes += [legend.get_window_extent() for legend in fig.legends]
    boxes += [ax.xaxis.label.get_window_extent(), ax.yaxis.label.get_window_extent()]
    for box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= fig.bbox.x1 + 1 and box.y1 <= fig.bbox.y1 + 1


def test_cells_stand_at_their_request_and_step_and_look_like_their_kind():
    fig, ax = request_timeline(timeline(hand_made_trace()), "B comes back")
    assert patches_like(ax, "prefill") == [(0, 0, 1), (0, 1, 1), (1, 1, 1), (3.833, 1, 0.167)]
    assert patches_like(ax, "recompute") == [(3, 1, 0.833)]
    assert patches_like(ax, "preempted") == [(2, 1, 1)]
    assert ax.get_title(loc="left") == "B comes back"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["A", "B"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2", "3"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("engine step", "request")
    assert ax.yaxis_inverted()
    assert_everything_is_inside(fig, ax)


def test_a_verification_is_a_decode_with_accepted_and_rejected_drafts():
    _, ax = request_timeline(timeline(hand_made_trace()), "Drafts")
    assert patches_like(ax, "decode") == [(1, 0, 0.333), (2, 0, 1)]
    assert patches_like(ax, "accepted") == [(1.333, 0, 0.333)]
    assert patches_like(ax, "rejected") == [(1.667, 0, 0.333)]


def test_cells_of_several_tokens_say_how_many():
    _, ax = request_timeline(timeline(hand_made_trace()), "Numbers")
    assert [text.get_text() for text in ax.texts] == ["6", "2", "3"]


def test_only_what_occurs_is_in_the_legend():
    fig, _ = request_timeline(timeline(hand_made_trace(), 0, 1), "A step")
    assert legend_texts(fig) == ["prefill"]
    fig, _ = request_timeline(timeline(hand_made_trace()), "All")
    assert legend_texts(fig) == list(LABELS.values())


def test_waiting_for_the_first_step_is_a_line():
    trace = hand_made_trace()
    trace.steps[0].scheduled.pop()
    fig, ax = request_timeline(timeline(trace), "B waits")
    lines = [line for line in ax.lines if to_hex(line.get_color()) == MUTED]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in lines] == [([0, 1], [1, 1])]
    assert legend_texts(fig)[-1] == "waiting"


def test_a_long_timeline_numbers_some_steps_and_no_cells():
    trace = busy_trace(max_num_seqs=1, num_drafts=0)
    assert len(trace.steps) > 40
    fig, ax = request_timeline(timeline(trace), "One after the other")
    assert ax.texts == [] or all(not text.get_text() for text in ax.texts)
    assert [label.get_text() for label in ax.get_xticklabels()][:3] == ["0", "5", "10"]
    assert_everything_is_inside(fig, ax)


def test_a_busy_timeline_has_room_for_all_its_texts():
    fig, ax = request_timeline(timeline(busy_trace()), "Everything happens")
    assert_everything_is_inside(fig, ax)


def test_a_timeline_of_nothing_can_be_drawn():
    fig, ax = request_timeline(timeline(Trace("nothing", 8, 4, 16, 4, 10)), "Nothing yet")
    assert not ax.patches and not fig.legends


def test_the_budget_is_a_line_over_stacked_bars():
    trace = hand_made_trace()
    fig, ax = token_budget(tokens_by_part(trace), trace.max_num_batched_tokens, "Half used")
    bars = sorted((round(p.get_x(), 2), p.get_y(), p.get_height()) for p in ax.patches)
    assert bars == [(0, 0, 8), (1, 0, 3), (1, 3, 1), (1, 4, 1), (1, 5, 1), (2, 0, 1), (3, 0, 1), (3, 1, 5)]
    assert [list(line.get_ydata()) for line in ax.lines] == [[10, 10]]
    assert [text.get_text() for text in ax.texts] == ["budget: 10 tokens"]
    assert "tokens" in ax.get_ylabel() and ax.get_xlabel() == "engine step"
    assert legend_texts(fig) == ["prefill", "recomputed", "decode", "draft verified", "draft rejected"]
    assert_everything_is_inside(fig, ax)


def test_a_budget_far_above_is_said_and_not_drawn():
    fig, ax = token_budget(tokens_by_part(hand_made_trace()), 8192, "Hardly used", first=100)
    assert not ax.lines and ax.get_ylim()[1] < 20
    assert [text.get_text() for text in ax.texts] == ["budget: 8192 tokens, far above"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["100", "101", "102", "103"]
    assert_everything_is_inside(fig, ax)


@pytest.mark.parametrize("budget", [10, 8192])
def test_a_budget_of_no_steps_can_be_drawn(budget):
    _, ax = token_budget({"prefill": []}, budget, "Nothing yet")
    assert not ax.patches


def test_rows_of_prefill_and_decode_have_the_colours_of_their_kernels():
    assert TOKEN_LOOKS["prefill"]["facecolor"] == KERNEL_COLOURS["flash"]
    assert TOKEN_LOOKS["decode"]["facecolor"] == KERNEL_COLOURS["paged"]
    assert TOKEN_LOOKS["rejected"]["edgecolor"] == HIGHLIGHT
