"""The figures of chapter 09 show the data they were given: latencies, batches in a pipeline, costs and capacities."""

import dataclasses

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from minivllm.bench.result_file import Measurement
from minivllm.plotting.scheduling import latency_over_load, pipeline_stages, recorded_step_cost, trade_off
from minivllm.plotting.style import MUTED, request_colour

SUBTITLE = "recorded on AMD EPYC, 2 CPUs, 1 threads, PyTorch 2.13.0+cpu, 2026-12-02, commit aeca68d9ac"


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def assert_texts_have_their_place(fig, ax) -> None:
    """No two texts overlap, and none leaves the figure, titles and labels of the axes included."""
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
    titles = [child for child in ax.get_children() if isinstance(child, Text)]
    around = (*titles, ax.xaxis.label, ax.yaxis.label, *ax.get_yticklabels())
    boxes += [text.get_window_extent() for text in around if text.get_text()]
    for box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= fig.bbox.x1 + 1 and box.y1 <= fig.bbox.y1 + 1, box


class TestTradeOff:
    def drawn(self):
        points = {"budget 8,192": (222.0, 220.0), "512": (290.0, 17.6), "32": (1515.0, 4.5)}
        return trade_off(points, "Cheap, then dear", "wait (ms)", "gap (ms)")

    def test_points_are_joined_in_order_and_labelled_where_they_are(self):
        fig, ax = self.drawn()
        (line,) = ax.lines
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([222.0, 290.0, 1515.0], [220.0, 17.6, 4.5])
        assert [(text.get_text(), text.xy) for text in ax.texts] == [
            ("budget 8,192", (222.0, 220.0)),
            ("512", (290.0, 17.6)),
            ("32", (1515.0, 4.5)),
        ]
        assert (ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel()) == (
            "Cheap, then dear",
            "wait (ms)",
            "gap (ms)",
        )
        assert_texts_have_their_place(fig, ax)

    def test_axes_are_logarithmic_with_ticks_in_plain_numbers(self):
        fig, ax = self.drawn()
        fig.canvas.draw()
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        assert [label.get_text() for label in ax.get_xticklabels()] == ["200", "500", "1,000", "2,000"]
        assert {"5", "10", "20", "50", "100", "200"} <= {label.get_text() for label in ax.get_yticklabels()}


class TestPipelineStages:
    def drawn(self):
        return pipeline_stages({"all at once": [32, 0, 32], "shared out": [16, 16, 16]}, 2, "Half idle")

    def cells(self, ax) -> list[list[str | None]]:
        """For each row from the top, the colour of each pass; None where the stage is idle."""
        rows: dict[float, dict[float, str | None]] = {}
        for patch in ax.patches:
            colour = None if patch.get_hatch() else to_hex(patch.get_facecolor())
            rows.setdefault(round(patch.get_y(), 3), {})[patch.get_x()] = colour
        return [[cells[x] for x in sorted(cells)] for _, cells in sorted(rows.items())]

    def test_a_batch_is_in_each_stage_a_pass_after_the_one_before(self):
        fig, ax = self.drawn()
        even, odd = request_colour(0), request_colour(1)
        assert self.cells(ax) == [[even, None, even], [None, even, None], [even, odd, even], [None, even, odd]]
        assert [text for text in texts(ax) if text.isdigit()] == ["32"] * 3 + ["16"] * 5
        assert {to_hex(patch.get_edgecolor()) for patch in ax.patches if patch.get_hatch()} == {MUTED}
        assert_texts_have_their_place(fig, ax)

    def test_groups_and_stages_are_named(self):
        _, ax = self.drawn()
        assert [text for text in texts(ax) if not text.isdigit()] == ["all at once", "shared out"]
        assert [label.get_text() for label in ax.get_yticklabels()] == ["stage 0", "stage 1"] * 2
        assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2"]
        assert ax.yaxis_inverted() and "hatched" in ax.get_xlabel() and ax.get_title(loc="left") == "Half idle"


class TestRecordedStepCost:
    def measurements(self) -> list[Measurement]:
        settings = {"shapes": {"context": 64}, "dtype": "int64", "unit": "ms", "warmup": 1}
        return [
            Measurement.from_samples(f"256 decodes at context {context}", samples, **settings)
            for context, samples in ((64, [0.6, 0.7, 0.8]), (4096, [0.7, 0.75, 0.9]))
        ]

    def test_bars_are_medians_with_a_line_between_the_quartiles(self):
        fig, ax = recorded_step_cost(self.measurements(), "Nearly the same", SUBTITLE)
        assert [bar.get_width() for bar in ax.patches] == [0.7, 0.75]
        assert [line.get_xdata().tolist() for line in ax.lines] == [
            pytest.approx([0.65, 0.75]),
            pytest.approx([0.725, 0.825]),
        ]
        assert texts(ax) == ["0.70 ms", "0.75 ms"]
        names = [label.get_text() for label in ax.get_yticklabels()]
        assert names == ["256 decodes at context 64", "256 decodes at context 4096"]
        assert ax.yaxis_inverted() and ax.get_title(loc="left") == "Nearly the same"
        assert_texts_have_their_place(fig, ax)

    def test_the_unit_and_the_whole_provenance_stand_under_the_axis(self):
        measurements = [dataclasses.replace(m, unit="us", repeats=1000) for m in self.measurements()]
        _, ax = recorded_step_cost(measurements, "Nearly the same", SUBTITLE)
        first, _, provenance = ax.get_xlabel().partition("\n")
        assert first == "us a step, median and quartiles of 1,000 steps"
        assert provenance.replace("\n", " ") == SUBTITLE


class TestLatencyOverLoad:
    def drawn(self):
        latencies = {"all new": [100.0, 900.0, 5000.0, 50.0], "half shared": [50.0, 60.0, 70.0, 80.0]}
        return latency_over_load([20, 40, 60, 80], latencies, [29.4, 70.0], 1000, "A knee", "TTFT (ms)")

    def test_a_line_ends_before_it_leaves_the_figure(self):
        fig, ax = self.drawn()
        lines = [line for line in ax.lines if line.get_linestyle() == "-"]
        assert [line.get_xdata().tolist() for line in lines] == [[20, 40], [20, 40, 60, 80]]
        assert [line.get_ydata().tolist() for line in lines] == [[100.0, 900.0], [50.0, 60.0, 70.0, 80.0]]
        assert [line.get_color() for line in lines] == [request_colour(0), request_colour(1)]
        assert len({line.get_marker() for line in lines}) == 2, "told apart in grey, too"
        assert ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > 1000
        assert_texts_have_their_place(fig, ax)

    def test_each_capacity_is_a_dotted_line_in_the_colour_of_its_setting(self):
        _, ax = self.drawn()
        dotted = [line for line in ax.lines if line.get_linestyle() == ":"]
        assert [line.get_xdata()[0] for line in dotted] == [29.4, 70.0]
        assert [line.get_color() for line in dotted] == [request_colour(0), request_colour(1)]
        assert texts(ax) == ["capacity 29/s", "all new", "capacity 70/s", "half shared"]
        assert "requests" in ax.get_xlabel() and ax.get_ylabel() == "TTFT (ms)"

    def test_a_line_that_begins_above_the_limit_has_no_point_and_no_label(self):
        _, ax = latency_over_load([1, 2], {"hopeless": [9.0, 9.0]}, [0.5], 5, "Nothing to see", "TTFT (ms)")
        assert texts(ax) == ["capacity 0/s"] and len(ax.lines[0].get_xdata()) == 0
