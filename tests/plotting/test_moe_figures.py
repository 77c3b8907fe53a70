"""The figures of chapter 08 show the data they were given: scores, loads, shares of padding, times."""

from matplotlib.colors import to_hex

from minivllm.plotting.moe import LayerTime, layer_times, load_map, padding_lines, routing_bars
from minivllm.plotting.style import FAINT, HIGHLIGHT, KERNEL_COLOURS


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def assert_texts_do_not_overlap(fig, ax) -> None:
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, ax.texts[index]


def test_scores_are_bars_the_bias_stands_on_them_and_groups_that_are_out_are_pale():
    fig, ax = routing_bars([0.9, 0.1, 0.2, 0.5], [0.0, 0.0, 0.3, -0.1], [False, True], [1.0, 0.9], [3, 2], "Chosen")
    heights = [(round(bar.get_y(), 3), round(bar.get_height(), 3)) for bar in ax.patches]
    assert heights == [(0, 0.9), (0, 0.1), (0, 0.2), (0.2, 0.3), (0, 0.5), (0.5, -0.1)]
    solid = [bar for bar in ax.patches if not bar.get_hatch()]
    assert [to_hex(bar.get_facecolor()) for bar in solid] == [FAINT, FAINT, *[KERNEL_COLOURS["flash"]] * 2]
    assert texts(ax) == ["0.90", "0.10", "0.20+0.30", "0.50-0.10", "group 0: 1.00\nout", "group 1: 0.90\nkept"]
    names = {label.get_text(): label.get_color() for label in ax.get_xticklabels()}
    assert [name for name, colour in names.items() if colour == HIGHLIGHT] == ["expert 2\nchosen", "expert 3\nchosen"]
    assert ax.get_title(loc="left") == "Chosen" and "score" in ax.get_ylabel()
    assert_texts_do_not_overlap(fig, ax)


def test_eight_experts_have_room_for_their_numbers():
    bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0]
    scores = [0.95, 0.1, 0.6, 0.5, 0.8, 0.2, 0.3, 0.4]
    assert_texts_do_not_overlap(
        *routing_bars(scores, bias, [False, True, True, False], [1.05, 1.1, 1.3, 0.7], [4], "t")
    )


def test_the_map_holds_every_count():
    fig, ax = load_map([[3, 0], [1, 2]], ["layer 1", "layer 2"], "Even")
    assert ax.images[0].get_array().tolist() == [[3, 0], [1, 2]] and ax.images[0].get_clim() == (0, 3)
    assert texts(ax) == ["3", "0", "1", "2"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["layer 1", "layer 2"]
    assert "expert" in ax.get_xlabel() and "tokens" in ax.get_xlabel() and ax.get_title(loc="left") == "Even"
    assert_texts_do_not_overlap(fig, ax)


def test_each_size_of_tile_has_a_line_that_is_named_where_it_falls():
    waste = {16: [0.9, 0.5, 0.2, 0.1], 128: [0.99, 0.9, 0.7, 0.3]}
    fig, ax = padding_lines([1, 32, 1024, 32768], waste, "Padding")
    assert [line.get_ydata().tolist() for line in ax.lines] == [waste[128], waste[16]]
    assert len({line.get_linestyle() for line in ax.lines}) == 2, "told apart in grey, too"
    assert [(text.get_text(), text.xy) for text in ax.texts] == [
        ("tiles of 128", (1024, 0.7)),
        ("tiles of 16", (32, 0.5)),
    ]
    assert ax.get_xscale() == "log" and "tokens" in ax.get_xlabel() and "padding" in ax.get_ylabel()
    assert_texts_do_not_overlap(fig, ax)


def test_times_are_marks_and_the_ratio_stands_beside_them():
    times = [
        LayerTime("1 token", 40.0, {"torch_grouped": 90.0}, fp8=30.0),
        LayerTime("64 tokens", 200.0, {"vllm_fused_moe": 250.0, "torch_grouped": 500.0}),
    ]
    fig, ax = layer_times(times, "Ahead", "recorded on a GPU, PyTorch 2, commit 0")
    marks = [(line.get_marker(), float(line.get_xdata()[0])) for line in ax.lines if line.get_marker() != "None"]
    assert marks == [("o", 40.0), ("^", 30.0), ("x", 90.0), ("o", 200.0), ("D", 250.0), ("x", 500.0)]
    assert texts(ax) == ["2.25", "1.25", "best peer\n/ minivllm"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "minivllm",
        "minivllm, fp8",
        "PyTorch",
        "vLLM",
    ]
    assert "microseconds" in ax.get_xlabel() and "recorded on a GPU" in ax.get_xlabel() and ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1 token", "64 tokens"]
    assert_texts_do_not_overlap(fig, ax)
