"""The course's colours stay apart, and its style is what figures get."""

import itertools

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb

from minivllm.plotting.style import FAINT, HIGHLIGHT, INK, KERNEL_COLOURS, MUTED, REQUEST_COLOURS, request_colour


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it, 0 (black) to 1 (white)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_text_is_readable_on_every_request_colour():
    assert all(contrast(INK, colour) > 4.5 for colour in REQUEST_COLOURS[:3])
    assert contrast(INK, "white") > 7


def test_what_stands_out_also_stands_out_in_grey():
    assert contrast(HIGHLIGHT, MUTED) > 1.8
    assert contrast(REQUEST_COLOURS[0], REQUEST_COLOURS[1]) > 1.8
    assert contrast(FAINT, INK) > 7


def test_kernels_and_requests_never_share_a_colour():
    colours = [*KERNEL_COLOURS.values(), *REQUEST_COLOURS, HIGHLIGHT, MUTED]
    assert all(a != b for a, b in itertools.combinations(colours, 2))


def test_request_colours_come_round_again():
    assert request_colour(0) != request_colour(1)
    assert request_colour(len(REQUEST_COLOURS)) == request_colour(0)


def test_figures_get_the_style():
    fig, ax = plt.subplots()
    assert fig.dpi == 100 and tuple(fig.get_size_inches()) == (7.0, 3.5)
    assert not ax.spines["top"].get_visible()
    assert mpl.rcParams["font.size"] == pytest.approx(10)
