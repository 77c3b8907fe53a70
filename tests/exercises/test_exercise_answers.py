"""Do the checkers check? Every set is tried with its own solutions and with what students get wrong.

A new set is found by itself: its exercises in the registry, its wrong answers in `wrong_answers/psNN.py`.
Only the numbers worked by hand are added at the end.
"""

import pytest
from classroom import wrong_answers

from minivllm.exercises import ExerciseFailure, check, exercise_names, find, set_names

WRONG = {name: answers for set_name in set_names() for name, answers in wrong_answers(set_name).items()}
EACH_WRONG = [
    pytest.param(name, fn, words, id=f"{name}-{fn.__name__}")
    for name, answers in WRONG.items()
    for fn, words in answers
]


@pytest.mark.parametrize("name", exercise_names())
def test_the_oracle_passes_its_own_check(name):
    check(name, find(name).oracle, hidden=True)


@pytest.mark.parametrize("name", exercise_names())
def test_an_exercise_has_visible_cases_and_edges_and_at_least_three_known_wrong_answers(name):
    hidden = [case.hidden for case in find(name).cases]
    assert hidden.count(False) >= 3
    assert hidden.count(True) >= 3
    assert hidden == sorted(hidden), "visible cases come first, so that the first failing input is a plain one"
    assert len(WRONG[name]) >= 3


@pytest.mark.parametrize(("name", "fn", "words"), EACH_WRONG)
def test_a_wrong_answer_is_rejected_in_the_readers_terms(name, fn, words):
    with pytest.raises(ExerciseFailure) as caught:
        check(name, fn, hidden=True)
    message = str(caught.value)
    assert words in message
    assert all(f"    {parameter}" in message for parameter in find(name).parameters)
    assert "\nexpected: " in message
    assert "\ngot:      " in message
    assert "\nhint:     " in message


@pytest.mark.parametrize("name", exercise_names())
def test_the_edges_catch_an_answer_that_the_visible_cases_let_through(name):
    passes_the_visible = []
    for fn, _ in WRONG[name]:
        try:
            check(name, fn)
        except ExerciseFailure:
            continue
        passes_the_visible.append(fn.__name__)
    assert passes_the_visible


@pytest.mark.parametrize(
    ("name", "inputs", "answer"),
    [
        ("ps00.slot_mapping", ([7, 2, 5], 3, 6, 4), [31, 8, 9, 10, 11, 20]),
        ("ps00.slot_mapping", ([7, 2, 5], 5, 0, 4), []),
        ("ps00.slot_mapping", ([4, 0, 6], 0, 3, 1), [4, 0, 6]),
        ("ps00.blocks_needed", (34, 2, 16), 1),
        ("ps00.blocks_needed", (35, 3, 16), 0),
        ("ps00.blocks_needed", (32, 1, 16), 1),
        ("ps00.blocks_needed", (20, 5, 16), 0),
        ("ps00.chunk_mask", (4, 3, 7), ["1111100", "1111110", "1111111"]),
        ("ps00.chunk_mask", (2, 2, 6), ["111000", "111100"]),
        ("ps00.chunk_mask", (7, 1, 8), ["11111111"]),
        ("ps02.blocks_to_take", (13, 1, 7, 128, 4, [], 4), 2),
        ("ps02.blocks_to_take", (8, 5, 0, 128, 0, [1, 0], 4), 3),
        ("ps02.cached_prefix", ([b"A", b"B", b"C"], 13, 4, {b"A": [5], b"B": [2], b"C": [7]}), [5, 2, 7]),
        ("ps02.cached_prefix", ([b"A", b"B", b"C"], 13, 4, {b"A": [5], b"B": [2]}), [5, 2]),
        ("ps02.free_order", (6, [("take", 3), ("free", [0, 1, 2], 2)]), [2, 3, 4, 5, 1, 0]),
        ("ps02.free_order", (6, [("take", 3), ("free", [0, 1, 2], 2), ("hit", 1)]), [2, 3, 4, 5, 0]),
        ("ps02.allocate", ([3, 2, 1, 0], [0] * 4, [0, 1], 1), ([0, 1, 3], [2], [1, 1, 0, 1])),
        ("ps02.allocate", ([3, 2, 1, 0], [0] * 4, [0, 1], 3), ([], [3, 2, 1, 0], [0] * 4)),
    ],
)
def test_the_oracle_gives_the_numbers_worked_by_hand(name, inputs, answer):
    result = find(name).oracle(*inputs)
    if name == "ps00.chunk_mask":
        result = ["".join(str(int(seen)) for seen in row) for row in result]
    assert result == answer
