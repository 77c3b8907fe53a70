"""The figures of chapter 07 show the data they were given."""

import pytest
from matplotlib.colors import to_hex
from test_kernels import SUBTITLE, TOY, assert_texts_do_not_overlap, texts

from minivllm.plotting.gemm import (
    FORMAT_COLOURS,
    Cost,
    GemmPoint,
    error_curves,
    format_errors,
    format_of,
    gemm_roofline,
    perplexity_costs,
)


def test_every_curve_is_drawn_and_named_at_its_end():
    curves = {
        "int8": ("int8", [0.1, 0.2]),
        "fp8": ("fp8_token", [0.01, 0.02]),
        "fp8, 128": ("fp8_token", [0.001, 0.001]),
    }
    fig, ax = error_curves([1, 10], curves, "x", "error", "Errors", {"int8": 4})
    assert [line.get_ydata().tolist() for line in ax.lines] == [[0.1, 0.2], [0.01, 0.02], [0.001, 0.001]]
    assert [line.get_color() for line in ax.lines] == [FORMAT_COLOURS[f] for f in ("int8", "fp8_token", "fp8_token")]
    assert [line.get_linestyle() for line in ax.lines] == ["-", "-", "--"]
    assert texts(ax) == list(curves) and ax.get_xscale() == ax.get_yscale() == "log"
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title(loc="left")) == ("x", "error", "Errors")
    assert_texts_do_not_overlap(fig, ax)


def test_a_group_has_a_bar_a_format_in_per_cent():
    errors = {"qkv_proj": {"fp8_token": 0.024, "int8": 0.007}, "down_proj": {"fp8_token": 0.03, "int8": 0.1}}
    fig, ax = format_errors(errors, "Errors")
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([2.4, 0.7, 3.0, 10.0])
    assert [to_hex(bar.get_facecolor()) for bar in ax.patches] == [
        FORMAT_COLOURS[f] for f in ("fp8_token", "int8", "fp8_token", "int8")
    ]
    assert texts(ax)[0] == "fp8_token: 2.40 %" and [t.get_text() for t in ax.get_yticklabels()] == list(errors)
    assert "%" in ax.get_xlabel()
    assert_texts_do_not_overlap(fig, ax)


def test_the_roofline_has_two_ceilings_and_filled_marks_for_what_was_measured():
    points = [
        GemmPoint("bf16", 100.0, 3e14, True),
        GemmPoint("int8", 400.0, 1.5e15, False),
        GemmPoint("fp8_block", 3000.0, 1.2e15, True),
    ]
    fig, ax = gemm_roofline(points, TOY, 2e15, "Roof", SUBTITLE)
    for roof, peak in zip(ax.lines[:2], (1000.0, 2000.0), strict=True):
        assert roof.get_ydata().tolist() == pytest.approx([250.0, peak, peak])
    marks = {line.get_label(): line for line in ax.lines[2:] if not line.get_label().startswith("_")}
    assert set(marks) == {"bf16", "fp8_block"}
    assert marks["bf16"].get_ydata() == [300.0] and marks["bf16"].get_markerfacecolor() == FORMAT_COLOURS["bf16"]
    hollow = next(line for line in ax.lines[2:] if line.get_color() == FORMAT_COLOURS["int8"])
    assert hollow.get_markerfacecolor() == "white"
    assert "H200" in ax.get_xlabel() and ax.get_ylabel() == "TFLOP/s"
    assert_texts_do_not_overlap(fig, ax)


def test_a_cost_is_a_mark_with_its_error_and_the_limit_is_a_line():
    costs = [
        Cost("tiny", "fp8", 0.0046, 0.001),
        Cost("tiny", "int8", -0.001, 0.0005),
        Cost("big", "fp8_block", 0.02, 0.002),
    ]
    fig, ax = perplexity_costs(costs, 0.03, "Costs", SUBTITLE)
    centres = [container.lines[0] for container in ax.containers]
    assert [line.get_xdata()[0] for line in centres] == pytest.approx([0.46, -0.1, 2.0])
    assert [line.get_color() for line in centres] == [FORMAT_COLOURS[format_of(cost.scheme)] for cost in costs]
    assert ax.lines[-1].get_xdata() == [3.0, 3.0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["tiny, fp8", "tiny, int8", "big, fp8_block"]
    assert texts(ax)[-1] == "limit: 3 %" and "+0.46 %" in texts(ax)
    assert "H200" in ax.get_xlabel()
    assert_texts_do_not_overlap(fig, ax)


def test_a_scheme_has_the_colour_of_its_format():
    assert [format_of(s) for s in ("fp8", "bfloat16", "fp8_block", "int8")] == [
        "fp8_token",
        "bf16",
        "fp8_block",
        "int8",
    ]
