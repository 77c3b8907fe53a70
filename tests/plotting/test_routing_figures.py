"""The routing map shows who goes where, with what weight, and where one group of experts ends."""

import numpy as np
import pytest

from minivllm.plotting.routing import routing_map

WEIGHTS = [[0.0, 1.25, 0.0, 0.5], [2.0, 0.0, 0.25, 0.0], [0.0, 1.0, 1.0, 0.0]]


def test_a_cell_a_visit_with_its_weight_and_a_line_between_groups():
    _, ax = routing_map(["The", " king", " said"], WEIGHTS, 2, "Who goes where", emphasised=[1])
    (image,) = ax.images
    assert np.array_equal(image.get_array(), WEIGHTS) and image.get_clim() == (0, 2.0)
    drawn = {(text.get_position()): text.get_text() for text in ax.texts}
    assert drawn == {(1, 0): "1.2", (3, 0): "0.5", (0, 1): "2.0", (2, 1): "0.2", (1, 2): "1.0", (2, 2): "1.0"}
    assert [line.get_xdata()[0] for line in ax.lines] == [1.5]
    labels = ax.get_yticklabels()
    assert [label.get_text() for label in labels] == ['"The"', '"king"', '"said"']
    assert [label.get_weight() for label in labels] == ["normal", "bold", "normal"]
    assert ax.get_xlabel().startswith("expert (2 groups of 2)") and ax.get_ylabel() == "token"
    assert ax.get_title(loc="left") == "Who goes where" and [int(tick) for tick in ax.get_xticks()] == [0, 1, 2, 3]


def test_a_number_can_be_read_on_its_cell():
    _, ax = routing_map(["a", "b", "c"], WEIGHTS, 1, "Ink")
    inks = {text.get_text(): text.get_color() for text in ax.texts}
    assert inks["2.0"] == "white" and inks["0.2"] == "#222222"
    assert not ax.lines


@pytest.mark.parametrize(
    ("tokens", "groups", "said"),
    [(["a"], 1, "one row for each of the 1 tokens"), (["a", "b", "c"], 3, "3 groups do not divide 4 experts")],
)
def test_a_table_that_does_not_fit_is_refused(tokens, groups, said):
    with pytest.raises(ValueError, match=said):
        routing_map(tokens, WEIGHTS, groups, "Title")
