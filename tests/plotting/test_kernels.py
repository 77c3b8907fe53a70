"""The figures of chapter 06 show the data they were given: bytes, intensities, speeds and where they come from."""

import pytest
from matplotlib.colors import to_hex

from minivllm.bench.kv_calculator import Device
from minivllm.plotting.kernels import RooflinePoint, SpeedBar, cache_sizes, recorded_speeds, roofline
from minivllm.plotting.style import KERNEL_COLOURS

TOY = Device("toy", 1e15, 5e12)
SUBTITLE = "recorded on NVIDIA H200, driver 570.1, CUDA 12.8, PyTorch 2.11, Triton 3.6, 2026-01-31, commit 0123456789"


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def assert_texts_do_not_overlap(fig, ax) -> None:
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, ax.texts[index]


def test_a_bar_is_a_token_and_its_words_are_the_long_context():
    per_token = {"MHA": 512 * 1024, "MLA": 64 * 1024}
    fig, ax = cache_sizes(per_token, {"MHA": 64 * 2**30, "MLA": 8 * 2**30}, "Sizes")
    assert [bar.get_width() for bar in ax.patches] == [512, 64]
    assert [to_hex(bar.get_facecolor()) for bar in ax.patches] == [KERNEL_COLOURS["paged"], KERNEL_COLOURS["mla"]]
    assert texts(ax) == ["512 KiB a token, 64.0 GiB", "64 KiB a token, 8.0 GiB"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["MHA", "MLA"]
    assert ax.yaxis_inverted() and "KiB" in ax.get_xlabel() and ax.get_title(loc="left") == "Sizes"
    assert_texts_do_not_overlap(fig, ax)


POINTS = [
    RooflinePoint("PagedAttention", "paged", 4.0, 2e13, False, (10, -10)),
    RooflinePoint("FlashMLA", "mla", 240.0, 5e14, True, (-8, -12)),
]


def test_the_roof_is_a_slope_and_a_ceiling_that_meet_at_the_balance():
    fig, ax = roofline(POINTS, TOY, "Roof")
    roof, balance, *_ = ax.lines
    assert roof.get_xdata().tolist() == [2.0, 200.0, 960.0]
    assert roof.get_ydata().tolist() == pytest.approx([10.0, 1000.0, 1000.0])
    assert balance.get_xdata() == [200.0, 200.0]
    assert texts(ax) == ["1,000 TFLOP/s (modelled)", "5.0 TB/s (modelled)", "PagedAttention", "FlashMLA"]
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert_texts_do_not_overlap(fig, ax)


def test_a_modelled_point_is_hollow_and_a_measured_one_filled():
    _, ax = roofline(POINTS, TOY, "Roof")
    modelled, measured = ax.lines[2:]
    assert (modelled.get_xdata().tolist(), modelled.get_ydata().tolist()) == ([4.0], [20.0])
    assert modelled.get_markerfacecolor() == "white" and modelled.get_color() == KERNEL_COLOURS["paged"]
    assert measured.get_markerfacecolor() == measured.get_color() == KERNEL_COLOURS["mla"]
    assert modelled.get_marker() != measured.get_marker(), "told apart in grey, too"


def test_the_provenance_of_measured_points_stands_under_the_axis():
    _, ax = roofline(POINTS, TOY, "Roof", SUBTITLE)
    assert ax.get_xlabel().split("\n", 1)[1].replace("\n", " ") == SUBTITLE
    _, ax = roofline(POINTS, TOY, "Roof")
    assert "\n" not in ax.get_xlabel()


def test_a_recorded_speed_is_a_share_with_its_peer_as_a_tick():
    bars = [
        SpeedBar("prompt", "flash", 0.7, "490 TFLOP/s", "FA3", 0.8),
        SpeedBar("decode", "paged", 0.9, "4,140 GB/s", None, None),
    ]
    fig, ax = recorded_speeds(bars, "Speeds", SUBTITLE)
    assert [bar.get_width() for bar in ax.patches] == [0.7, 0.9]
    assert [to_hex(bar.get_facecolor()) for bar in ax.patches] == [KERNEL_COLOURS["flash"], KERNEL_COLOURS["paged"]]
    assert [list(line.get_xdata()) for line in ax.lines] == [[0.8, 0.8]]
    assert texts(ax) == ["490 TFLOP/s", "FA3", "4,140 GB/s", "best peer (tick)"]
    assert ax.get_xlabel().split("\n", 1)[1].replace("\n", " ") == SUBTITLE
    assert_texts_do_not_overlap(fig, ax)
