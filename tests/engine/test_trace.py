"""A trace replays its block tables, and refuses to contradict itself."""

import pytest
from trace_samples import busy_trace, hand_made_trace

from minivllm.engine.trace import ACCEPTED, DECODE, PREFILL, RECOMPUTE, REJECTED, TraceError


def test_tables_are_replayed_step_by_step():
    trace = hand_made_trace()
    assert [trace.tables_at(step) for step in range(4)] == [
        {"A": [0, 1], "B": [0, 2]},
        {"A": [0, 1, 3], "B": [0, 2, 4]},
        {"A": [0, 1, 3]},
        {"B": [0, 5, 6]},
    ]


def test_shared_blocks_have_a_ref_count_above_one():
    trace = hand_made_trace()
    assert trace.ref_counts_at(1) == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}
    assert trace.ref_counts_at(2) == {0: 1, 1: 1, 3: 1}


def test_a_step_outside_the_trace_is_refused():
    with pytest.raises(IndexError, match="step 4 is not in a trace of 4 steps"):
        hand_made_trace().tables_at(4)


def test_parts_of_a_row_sum_to_its_tokens():
    rows = [row for event in hand_made_trace().steps for row in event.scheduled]
    assert [row.parts() for row in rows] == [
        {PREFILL: 6},
        {PREFILL: 2},
        {DECODE: 1, ACCEPTED: 1, REJECTED: 1},
        {PREFILL: 3},
        {DECODE: 1},
        {RECOMPUTE: 5, PREFILL: 1},
    ]


def test_good_traces_pass_the_check():
    hand_made_trace().check()
    busy_trace().check()


def set_in(step: int, /, **values):
    def change(trace):
        for name, value in values.items():
            setattr(trace.steps[step], name, value)

    return change


def set_in_row(**values):
    def change(trace):
        for name, value in values.items():
            setattr(trace.steps[1].scheduled[0], name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in(2, step=7), "step 2: is numbered 7"),
        (set_in(1, end=0.5), "step 1: ends before it starts"),
        (lambda trace: setattr(trace, "max_num_batched_tokens", 7), "step 0: 8 tokens, budget 7"),
        (lambda trace: setattr(trace, "block_size", 0), "block_size must be positive"),
        (set_in(0, preempted=["C"]), "step 0: request 'C' is not among the trace's requests"),
        (set_in(0, finished={"C": "stop"}), "request 'C' is not among"),
        (set_in(0, new_blocks={"A": [8]}), "step 0: block 8 of 8"),
        (set_in(0, num_used_blocks=9), "step 0: more blocks used than there are"),
        (set_in(1, num_used_blocks=4), "step 1: tables hold 5 blocks, 4 in use"),
        (set_in_row(kind="verified"), "step 1, request 'A': kind 'verified' is none of prefill, recompute"),
        (set_in_row(num_tokens=0), "step 1, request 'A': 0 tokens from 6 on"),
        (set_in_row(num_accepted=3), "step 1, request 'A': a count of tokens is negative"),
    ],
)
def test_a_contradiction_is_named_with_its_place(change, message):
    trace = hand_made_trace()
    change(trace)
    with pytest.raises(TraceError, match=message):
        trace.check()
