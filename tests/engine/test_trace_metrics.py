"""Latencies, budget and occupancy of traces whose numbers are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_samples import busy_trace, hand_made_trace

from minivllm.engine.trace import Trace
from minivllm.engine.trace_metrics import (
    budget_use,
    occupancy,
    percentile,
    request_metrics,
    summarise,
    tokens_by_part,
)


def test_each_request_has_its_latencies():
    a, b = request_metrics(hand_made_trace())
    assert (a.token_times, b.token_times) == ([1.0, 2.0, 2.0, 3.0], [2.0, 4.0])
    assert (a.time_to_first_token, b.time_to_first_token) == (1.0, 2.0)
    assert (a.inter_token_latencies, b.inter_token_latencies) == ([1.0, 0.0, 1.0], [2.0])
    assert (a.time_per_output_token, b.time_per_output_token) == (pytest.approx(2 / 3), 2.0)
    assert (a.end_to_end_latency, b.end_to_end_latency) == (3.0, 4.0)
    assert (a.num_preemptions, b.num_preemptions, b.num_recomputed_tokens) == (0, 1, 5)
    assert (a.num_prefix_hit_tokens, b.num_prefix_hit_tokens) == (0, 4)


def test_queue_time_is_from_arrival_to_the_first_step():
    trace = hand_made_trace()
    trace.requests["B"].arrival = -2.5
    assert [request.queue_time for request in request_metrics(trace)] == [0.0, 2.5]


def test_times_that_did_not_come_to_pass_are_none_and_left_out():
    trace = hand_made_trace()
    trace.steps = trace.steps[:1]
    b = request_metrics(trace)[1]
    assert b.time_to_first_token is b.end_to_end_latency is b.time_per_output_token is None
    summary = summarise(trace)
    assert summary.times_to_first_token == [1.0] and summary.end_to_end_latencies == []
    assert (summary.num_requests, summary.num_finished) == (2, 0)


def test_the_summary_adds_up():
    summary = summarise(hand_made_trace())
    assert (summary.num_steps, summary.duration, summary.num_output_tokens) == (4, 4.0, 6)
    assert summary.output_tokens_per_second == 1.5
    assert summary.hit_rate == pytest.approx(8 / 25)
    assert summary.acceptance_rate == 0.5
    assert (summary.num_preemptions, summary.num_recomputed_tokens) == (1, 5)
    assert summary.mean_budget_use == pytest.approx((0.8 + 0.6 + 0.1 + 0.6) / 4)
    assert summary.mean_running == pytest.approx(1.5)


def test_an_empty_trace_has_a_summary_of_zeros():
    summary = summarise(Trace("nothing", 8, 4, 16, 4, 10))
    assert (summary.num_requests, summary.output_tokens_per_second, summary.mean_running) == (0, 0.0, 0.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentiles_of_nothing_or_outside_a_hundred_are_refused(values, percent):
    with pytest.raises(ValueError, match="at least one value"):
        percentile(values, percent)


def test_budget_use_and_parts_of_each_step():
    trace = hand_made_trace()
    assert budget_use(trace) == [0.8, 0.6, 0.1, 0.6]
    assert tokens_by_part(trace) == {
        "prefill": [8, 3, 0, 1],
        "recompute": [0, 0, 0, 5],
        "decode": [0, 1, 1, 0],
        "accepted": [0, 1, 0, 0],
        "rejected": [0, 1, 0, 0],
    }


def test_occupancy_tells_stored_slots_from_kept_and_wasted_ones():
    filled = occupancy(hand_made_trace())
    assert filled.capacity == 32
    assert filled.stored == [8, 14, 9, 10]
    # Step 0: A and B each fill 2 more slots of the block they do not share. Step 1: B has 9 of its 10 tokens.
    assert filled.kept_for_later == [4, 1, 0, 0]
    assert filled.never_used == [0, 5, 3, 2]
    assert filled.reserved == [12, 20, 12, 12]
    assert filled.contiguous == [32, 32, 16, 16]
    assert filled.shares == (pytest.approx(41 / 56), pytest.approx(5 / 56), pytest.approx(10 / 56))


def test_occupancy_of_a_busy_trace_never_leaves_the_cache():
    trace = busy_trace()
    filled = occupancy(trace)
    assert filled.reserved == [event.num_used_blocks * trace.block_size for event in trace.steps]
    assert min(filled.kept_for_later) >= 0 and min(filled.never_used) >= 0
    assert max(filled.reserved) <= filled.capacity
