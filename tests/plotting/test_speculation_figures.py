"""The figures of chapter 10 show the data they were given: fates of drafts, parts of a law, shares and lines."""

import pytest
from matplotlib.colors import to_hex

from minivllm.plotting.speculation import emitted_shares, lines_over_k, two_laws, verification
from minivllm.plotting.style import HIGHLIGHT, KERNEL_COLOURS, MUTED, TOKEN_LOOKS


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_text()]


def assert_texts_do_not_overlap(fig, ax) -> None:
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), ax.texts[index]
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, ax.texts[index]


@pytest.mark.parametrize(
    ("num_accepted", "fates"),
    [
        (0, ["recovered", "void", "void"]),
        (1, ["draft is right", "recovered", "void"]),
        (2, ["draft is right", "draft is right", "bonus"]),
    ],
)
def test_each_row_of_a_verification_has_its_fate(num_accepted, fates):
    fig, ax = verification(["the", " cat", " sat"], [" cat", " ran", " on"], num_accepted, 7, "Verified")
    assert [text for text in texts(ax) if text in ("recovered", "void", "draft is right", "bonus")] == fates
    hatched = [patch for patch in ax.patches if patch.get_hatch()]
    assert len(hatched) == 2 - num_accepted
    assert all(patch.get_hatch() == TOKEN_LOOKS["rejected"]["hatch"] for patch in hatched)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["7", "8", "9"]
    assert ax.get_title(loc="left") == "Verified" and "position" in ax.get_xlabel()
    assert_texts_do_not_overlap(fig, ax)


def test_the_parts_of_two_laws_make_up_p_and_q():
    p, q = [0.5, 0.3, 0.2], [0.2, 0.7, 0.1]
    _, ax = two_laws(p, q, "Laws")
    heights = [[bar.get_height() for bar in container] for container in ax.containers]
    accepted, recovered, rejected = heights
    assert accepted == pytest.approx([0.2, 0.3, 0.1])
    assert [a + b for a, b in zip(accepted, recovered, strict=True)] == pytest.approx(p)
    assert [a + b for a, b in zip(accepted, rejected, strict=True)] == pytest.approx(q)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["accepted: 0.60", "recovered: 0.40", "rejected: 0.40"]
    assert [bool(handle.get_hatch()) for handle in ax.get_legend().get_patches()] == [False, False, True]
    assert [bar.get_visible() for bar in ax.containers[2]] == [False, True, False]
    assert ax.get_ylabel() == "probability"


def test_shares_stand_beside_each_other_and_the_wrong_one_catches_the_eye():
    shares = {"target": [0.5, 0.5], "with drafts": [0.4, 0.6], "afresh": [0.1, 0.9]}
    _, ax = emitted_shares(shares, ["a", "b"], "Shares", wrong="afresh")
    assert [[bar.get_height() for bar in container] for container in ax.containers] == list(shares.values())
    first, second, third = (container[0] for container in ax.containers)
    assert to_hex(first.get_facecolor()) == MUTED and to_hex(second.get_facecolor()) == KERNEL_COLOURS["mla"]
    assert to_hex(third.get_edgecolor()) == HIGHLIGHT and third.get_hatch()
    edges = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in (first, second, third)]
    assert edges[0][1] == pytest.approx(edges[1][0]) and edges[1][1] == pytest.approx(edges[2][0])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b"]


def test_lines_are_labelled_at_their_ends_without_overlap():
    lines = {"one": [(1, 1.0), (2, 2.0)], "two": [(1, 1.0), (2, 2.0)], "three": [(1, 0.5), (2, 1.9)]}
    fig, ax = lines_over_k(lines, "Lines", "k", "speed-up", "recorded on a machine", even=1.0)
    assert [line.get_ydata().tolist() for line in ax.lines[1:]] == [[1.0, 2.0], [1.0, 2.0], [0.5, 1.9]]
    assert list(ax.lines[0].get_ydata()) == [1.0, 1.0]
    assert len({line.get_linestyle() for line in ax.lines[1:]}) == 3, "told apart in grey, too"
    assert texts(ax) == ["one", "two", "three"]
    assert ax.get_xlabel() == "k\nrecorded on a machine" and ax.get_ylabel() == "speed-up"
    assert_texts_do_not_overlap(fig, ax)


def test_batch_sizes_double_from_tick_to_tick():
    _, ax = lines_over_k({"k = 1": [(1, 1.2), (8, 1.1), (64, 0.9)]}, "Lines", "batch", "ratio", log_x=True)
    assert ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "8", "64"]
