"""What `check` promises whatever the exercise: who is told what, and what never happens."""

import subprocess
import sys

import pytest
import torch

from minivllm.exercises import Case, Exercise, ExerciseFailure, check, exercise_names, find
from minivllm.exercises.checking import LONGEST_SHOWN, examine, same_value


def failure(name, fn, **options) -> str:
    """The message that this answer gets."""
    with pytest.raises(ExerciseFailure) as caught:
        check(name, fn, **options)
    return str(caught.value)


def test_a_right_answer_prints_one_line_on_stdout_and_returns_nothing(capsys):
    # nbgrader takes a cell's value for a partial grade and anything on stderr for a failure.
    assert check("ps00.slot_mapping", find("ps00.slot_mapping").oracle) is None
    out, err = capsys.readouterr()
    assert out == "ps00.slot_mapping: 4 cases pass (77 more at the edges: hidden=True)\n"
    assert err == ""


def test_the_edges_are_tried_only_when_asked_for(capsys):
    def no_empty_range(block_table, start, num_tokens, block_size):
        assert num_tokens > 0
        return find("ps00.slot_mapping").oracle(block_table, start, num_tokens, block_size)

    check("ps00.slot_mapping", no_empty_range)
    assert "num_tokens  = 0" in failure("ps00.slot_mapping", no_empty_range, hidden=True)


def test_a_failure_shows_input_expected_got_why_and_hint_in_this_order():
    message = failure("ps00.blocks_needed", lambda num_tokens, num_owned, block_size: 2)
    assert message.splitlines() == [
        "ps00.blocks_needed fails on this input:",
        "    num_tokens = 10",
        "    num_owned  = 0",
        "    block_size = 4",
        "expected: 3",
        "got:      2",
        "why:      10 tokens fill 3 blocks of 4, and the request owns 0; "
        "a block that is only partly filled is a whole block taken",
        "hint:     10 tokens in blocks of 4: two full ones and a half",
    ]


def test_a_mask_is_drawn_with_one_row_a_query():
    message = failure("ps00.chunk_mask", lambda n, q, k: torch.ones(q, k, dtype=torch.bool))
    assert "expected: 1 . . .\n          1 1 . .\n          1 1 1 .\n          1 1 1 1\ngot:      1 1 1 1\n" in message


def test_an_answer_of_a_kind_that_cannot_be_drawn_is_shown_as_it_is():
    message = failure("ps00.chunk_mask", lambda n, q, k: [[True] * k] * q)
    assert "why:      the answer is a list, not a torch tensor" in message


def test_an_unknown_name_lists_the_names_there_are():
    with pytest.raises(ValueError, match=r"there is no exercise 'ps00\.slots'") as caught:
        check("ps00.slots", len)
    assert all(name in str(caught.value) for name in exercise_names())


@pytest.mark.parametrize("name", ["ps00.slot_maping", "ps0.slot_mapping", "slot_mapping"])
def test_a_misspelt_name_is_answered_with_the_nearest(name):
    with pytest.raises(ValueError, match=r"did you mean 'ps00\.slot_mapping'\?"):
        check(name, len)


def test_a_stub_is_told_that_it_is_not_written_yet():
    def stub(block_table, start, num_tokens, block_size):
        raise NotImplementedError()

    assert "ps00.slot_mapping is not written yet" in failure("ps00.slot_mapping", stub)


def test_an_error_inside_the_answer_is_shown_with_its_line():
    def reads_past_the_table(block_table, start, num_tokens, block_size):
        return block_table[99]

    message = failure("ps00.slot_mapping", reads_past_the_table)
    assert "got:      IndexError: list index out of range" in message
    assert "return block_table[99]" in message
    assert "block_table = [7]" in message


def test_an_answer_with_other_parameters_is_told_so():
    assert "takes 1 positional argument but 3 were given" in failure("ps00.blocks_needed", lambda n: n)


def test_an_answer_that_returns_nothing_is_asked_for_its_return():
    assert "is the `return` missing?" in failure("ps00.blocks_needed", lambda *inputs: None)


def test_a_result_given_in_place_of_the_function_is_refused():
    assert "takes the function itself, not a call of it; it got [31, 8]" in failure("ps00.slot_mapping", [31, 8])


def test_an_answer_that_changes_its_inputs_is_told_which():
    def eats_the_table(block_table, start, num_tokens, block_size):
        slots = find("ps00.slot_mapping").oracle(block_table, start, num_tokens, block_size)
        block_table.clear()
        return slots

    assert "it changed its input block_table to []" in failure("ps00.slot_mapping", eats_the_table)


def test_one_answer_that_changes_its_inputs_does_not_spoil_the_next():
    with pytest.raises(ExerciseFailure):
        check("ps00.slot_mapping", lambda block_table, *rest: block_table.clear())
    check("ps00.slot_mapping", find("ps00.slot_mapping").oracle, hidden=True)


def test_an_endless_answer_is_cut_short():
    assert len(failure("ps00.slot_mapping", lambda *inputs: list(range(10**5)))) < 2 * LONGEST_SHOWN


def test_in_a_notebook_the_message_stands_without_the_checkers_own_frames():
    with pytest.raises(ExerciseFailure) as caught:
        check("ps00.blocks_needed", lambda *inputs: -1)
    assert caught.value._render_traceback_() == [f"ExerciseFailure: {caught.value}"]


def test_tensor_inputs_are_guarded_too():
    def in_place(x):
        return x.mul_(2)

    doubling = Exercise(
        name="psXX.double",
        oracle=lambda x: x * 2,
        judge=lambda expected, got, inputs: None if torch.equal(expected, got) else "not doubled",
        cases=(Case((torch.tensor([1.0, float("nan")]),)), Case((torch.ones(2),))),
        hint="make a new tensor",
    )
    with pytest.raises(ExerciseFailure, match="it changed its input x"):
        examine(doubling, in_place, hidden=False)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        ([1, [2]], [1, [2]], True),
        ([1, [2]], [1, [3]], False),
        ((1,), (1, 2), False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": [1]}, {"b": [1]}, False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([1, 2]), torch.tensor([[1, 2]]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
    ],
)
def test_inputs_are_compared_by_value(a, b, same):
    assert same_value(a, b) is same


def test_the_checks_load_no_engine_and_no_torch_until_an_exercise_needs_it():
    script = """
import sys
from minivllm.exercises import check, exercise_names, find
exercise_names()
check("ps00.slot_mapping", find("ps00.slot_mapping").oracle, hidden=True)
loaded = [name for name in sys.modules if name == "torch" or name.startswith("minivllm.")]
print(*(name for name in loaded if not name.startswith("minivllm.exercises")))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[1:] == [""]
