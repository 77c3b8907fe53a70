"""The figures of chapter 11 show the data they were given: tokens at their positions, and shares in per cent."""

import pytest

from minivllm.plotting.mtp import ForwardPass, acceptance_by_draft, forward_passes
from minivllm.plotting.style import TOKEN_LOOKS

PASSES = [
    ForwardPass("target", 0, ["the", "old"], "woman", False),
    ForwardPass("pass 1", 0, ["old", "woman"], "said", True),
    ForwardPass("target again", 2, ["woman", "said", ","], "said:", False, num_void=1),
]


def test_each_token_stands_at_its_position_and_void_ones_are_hatched():
    fig, ax = forward_passes(PASSES, "Passes")
    cells = [(round(patch.get_x() - 0.04), int(patch.get_y()), patch.get_hatch()) for patch in ax.patches[:7]]
    rejected = TOKEN_LOOKS["rejected"]["hatch"]
    assert cells == [
        (0, 2, None), (1, 2, None), (0, 1, None), (1, 1, None), (2, 0, None), (3, 0, None), (4, 0, rejected)
    ]  # fmt: skip
    texts = {text.get_text() for text in ax.texts}
    assert {"the", "said", "woman", "said:", ","} <= texts
    assert [label.get_text() for label in ax.get_yticklabels()] == ["target", "pass 1", "target again"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2", "3", "4"]
    assert ax.get_title(loc="left") == "Passes" and "position" in ax.get_xlabel()
    fig.canvas.draw()
    assert all(text.get_window_extent().x1 <= fig.bbox.x1 for text in ax.texts)


def test_a_panel_for_each_way_and_a_line_for_each_model():
    panels = {"greedy": {"here": [0.8, 0.9], "recorded": [0.7, 0.6]}, "sampled": {"here": [0.3, 0.25]}}
    fig, axes = acceptance_by_draft(panels, "Acceptance")
    lines = [{line.get_label(): list(line.get_ydata()) for line in ax.lines} for ax in axes]
    assert lines[0]["here"] == pytest.approx([80, 90]) and lines[0]["recorded"] == pytest.approx([70, 60])
    assert lines[1] == {"here": pytest.approx([30, 25])}
    for ax, name in zip(axes, panels, strict=True):
        assert ax.get_title(loc="left") == name and "%" in ax.get_ylabel() and ax.get_xlabel() == "draft"
        assert list(ax.get_xticks()) == [1, 2]
        assert [text.get_text() for text in ax.get_legend().get_texts()] == list(panels[name])
    styles = {(line.get_linestyle(), line.get_marker()) for line in axes[0].lines}
    assert len(styles) == 2
    assert fig.get_suptitle() == "Acceptance"


def test_too_many_lines_are_refused():
    with pytest.raises(ValueError, match="panel 'greedy' has 4 lines"):
        acceptance_by_draft({"greedy": {str(index): [0.5] for index in range(4)}}, "Too many")
