"""The figures of chapter 12 show the data they were given: contents, timelines, utilisation, traffic."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from minivllm.engine.stage_timeline import StageTimeline
from minivllm.plotting.pipeline import stage_contents, stage_timelines, traffic_lines, utilisation_lines
from minivllm.plotting.style import FAINT, KERNEL_COLOURS, MUTED, request_colour


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def assert_texts_have_their_place(fig, ax) -> None:
    """No two texts overlap, and none leaves the figure."""
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
    titles = [child for child in ax.get_children() if isinstance(child, Text)]
    boxes += [text.get_window_extent() for text in (*titles, ax.xaxis.label, ax.yaxis.label) if text.get_text()]
    for box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= fig.bbox.x1 + 1 and box.y1 <= fig.bbox.y1 + 1, box


CONTENTS = [["embedding", "layer 0"], ["layer 1"], ["layer 2", "norm, head", "sampler", "drafter"]]


class TestStageContents:
    def test_every_stage_shows_what_it_holds_and_ends_are_set_apart(self):
        fig, ax = stage_contents(CONTENTS, "one number a request", "Who holds what")
        shown = texts(ax)
        assert [name for name in shown if name.startswith("layer")] == ["layer 0", "layer 1", "layer 2"]
        assert {"embedding", "sampler", "stage 0", "stage 2", "one number a request"} <= set(shown)
        assert shown.count("hidden") == 2
        colours = [to_hex(p.get_facecolor()) for p in ax.patches if isinstance(p, Rectangle) and p.get_facecolor()[3]]
        assert colours.count(FAINT) == 3 and colours.count(KERNEL_COLOURS["paged"]) == 4
        assert ax.get_title(loc="left") == "Who holds what"
        assert_texts_have_their_place(fig, ax)

    def test_boxes_of_different_stages_stand_apart(self):
        _, ax = stage_contents(CONTENTS, "back", "t")
        lefts = {round(p.get_x(), 2) for p in ax.patches if isinstance(p, Rectangle) and p.get_facecolor()[3]}
        assert lefts == {0.0, 1.5, 3.0}


def two_stages() -> StageTimeline:
    timeline = StageTimeline(2)
    for step in (0, 3):
        timeline.submit(step)
        timeline.run(0, step, 1.0, 4)
        timeline.run(1, step, 2.0, 4)
    return timeline


class TestStageTimelines:
    def drawn(self, until=6.0):
        return stage_timelines({"both": two_stages()}, {"both": {0: "A", 3: "B"}}, until, "Bubbles")

    def boxes(self, ax):
        return [p for p in ax.patches if not p.get_hatch()]

    def test_a_box_for_each_run_at_its_time_in_the_colour_of_its_batch(self):
        fig, ax = self.drawn()
        places = [(p.get_x(), p.get_width(), to_hex(p.get_facecolor())) for p in self.boxes(ax)]
        a, b = to_hex(request_colour(0)), to_hex(request_colour(1))
        assert places == [(0.0, 1.0, a), (1.0, 1.0, b), (1.0, 2.0, a), (3.0, 2.0, b)]
        assert texts(ax) == ["both", "A", "B", "A", "B"]
        assert [label.get_text() for label in ax.get_yticklabels()] == ["stage 0", "stage 1"]
        assert (ax.get_title(loc="left"), "seconds" in ax.get_xlabel()) == ("Bubbles", True)
        assert_texts_have_their_place(fig, ax)

    def test_waiting_is_hatched_from_the_start_to_the_end_of_all(self):
        _, ax = self.drawn()
        bubbles = [p for p in ax.patches if p.get_hatch()]
        assert [(p.get_x(), p.get_width()) for p in bubbles] == [(0, 5.0), (0, 5.0)]
        assert to_hex(bubbles[0].get_edgecolor()) == to_hex(MUTED)

    def test_what_lies_beyond_the_end_of_the_axis_is_cut(self):
        _, ax = self.drawn(until=4.0)
        assert max(p.get_x() + p.get_width() for p in ax.patches) == 4.0
        assert ax.get_xlim() == (0, 4.0)


def test_utilisation_has_points_that_were_measured_and_lines_of_the_formula():
    measured = {2: {1: 0.5, 2: 0.99}, 4: {1: 0.25, 2: 0.5, 4: 1.0}}
    formula = {2: {1: 0.5, 2: 1.0, 3: 1.0}, 4: {1: 0.25, 2: 0.5, 3: 0.75}}
    fig, ax = utilisation_lines(measured, formula, "Busy")
    drawn = [(line.get_linestyle(), list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines]
    assert drawn == [
        ("-", [1, 2, 3], [0.5, 1.0, 1.0]),
        ("None", [1, 2], [0.5, 0.99]),
        ("-", [1, 2, 3], [0.25, 0.5, 0.75]),
        ("None", [1, 2, 4], [0.25, 0.5, 1.0]),
    ]
    assert texts(ax) == ["2 stages", "4 stages"]
    assert (ax.get_title(loc="left"), ax.get_ylabel()) == ("Busy", "stages at work")
    assert "batches in flight" in ax.get_xlabel()
    assert_texts_have_their_place(fig, ax)


def test_traffic_says_megabytes_and_exchanges():
    lines = {"pipeline": [(1, 2.0), (3, 2.0)], "tensor": [(64, 100.0), (64, 150.0)]}
    fig, ax = traffic_lines([2, 4], lines, "Less, and rarely")
    assert [list(line.get_ydata()) for line in ax.lines] == [[2.0, 2.0], [100.0, 150.0]]
    assert texts(ax) == ["1 exchange", "3 exchanges", "pipeline", "64 exchanges", "64 exchanges", "tensor"]
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_xlabel()) == ("log", "log", "ranks")
    assert ax.get_ylabel() == "megabytes a step over a rank's link"
    assert_texts_have_their_place(fig, ax)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_any_number_of_stages_fits(num_stages):
    contents = [["embedding", "layer 0"], *[["layer"]] * (num_stages - 1)]
    assert_texts_have_their_place(*stage_contents(contents, "back", "t"))
