"""The baseline does what static batching did: no better, and no worse."""

import pytest

from minivllm.engine.simulate import CostModel, simulate
from minivllm.engine.static_batching import simulate_static_batching
from minivllm.engine.trace_metrics import occupancy, request_metrics, summarise
from minivllm.engine.workload import SimulatedRequest, make_workload, poisson_arrivals

A, B, C = (SimulatedRequest("a", 0.0, 4, 3), SimulatedRequest("b", 0.0, 6, 1), SimulatedRequest("c", 0.5, 5, 2))


def test_a_batch_runs_until_its_longest_request_ends():
    trace = simulate_static_batching([A, B, C], CostModel(1.0, 0.0, 0.0), num_slots=32, max_model_len=16)
    rows = [[(row.req_id, row.kind, row.first, row.num_tokens) for row in event.scheduled] for event in trace.steps]
    assert rows == [
        [("a", "prefill", 0, 4), ("b", "prefill", 0, 6)],
        [("a", "decode", 4, 1)],
        [("a", "decode", 5, 1)],
        [("c", "prefill", 0, 5)],
        [("c", "decode", 5, 1)],
    ]
    assert [event.finished for event in trace.steps] == [{"b": "length"}, {}, {"a": "length"}, {}, {"c": "length"}]
    assert [metrics.end_to_end_latency for metrics in request_metrics(trace)] == [3.0, 1.0, 4.5]
    assert [event.num_waiting for event in trace.steps] == [0, 1, 1, 0, 0]
    trace.check()


def test_a_request_that_has_ended_keeps_its_place_until_the_batch_is_done():
    trace = simulate_static_batching([A, B, C], num_slots=32, max_model_len=16)
    assert [trace.tables_at(step) for step in (0, 2, 3)] == [{"a": [0], "b": [1]}, {"a": [0], "b": [1]}, {"c": [0]}]
    filled = occupancy(trace)
    assert filled.reserved == [32, 32, 32, 16, 16]
    assert filled.stored == [10, 11, 12, 5, 6]
    assert filled.kept_for_later == [2, 1, 0, 1, 0]


def test_a_row_that_has_ended_still_costs_a_token_and_its_context():
    cost = CostModel(fixed=0.0, per_token=1.0, per_context_token=0.01)
    trace = simulate_static_batching([A, B], cost, num_slots=32, max_model_len=16)
    assert [event.duration for event in trace.steps] == pytest.approx([10 + 0.10, 2 + 0.11, 2 + 0.12])


def test_the_batch_is_as_large_as_the_cache_or_max_num_seqs_allow():
    requests = [SimulatedRequest(str(number), 0.0, 4, 2) for number in range(5)]
    by_cache = simulate_static_batching(requests, num_slots=50, max_model_len=16)
    by_limit = simulate_static_batching(requests, num_slots=500, max_model_len=16, max_num_seqs=2)
    assert [len(event.scheduled) for event in by_cache.steps] == [3, 3, 2, 2]
    assert [len(event.scheduled) for event in by_limit.steps] == [2, 2, 2, 2, 1, 1]


def test_paging_with_continuous_batching_beats_it_on_the_same_cache():
    workload = make_workload(poisson_arrivals(60, 30.0), (20, 200), (10, 200), seed=5)
    static = simulate_static_batching(workload, num_slots=4096, max_model_len=512)
    paged = simulate(workload, num_blocks=256, block_size=16, max_model_len=512)
    assert summarise(static).num_output_tokens == summarise(paged).num_output_tokens
    assert occupancy(static).shares[0] < 0.5 < 0.9 < occupancy(paged).shares[0]
    assert static.duration > 1.5 * paged.duration


def test_nothing_to_do_is_an_empty_trace():
    assert simulate_static_batching([], num_slots=16, max_model_len=16).steps == []


def test_a_cache_without_room_and_a_request_too_long_are_refused():
    with pytest.raises(ValueError, match="15 slots hold no request of max_model_len"):
        simulate_static_batching([A], num_slots=15, max_model_len=16)
    with pytest.raises(ValueError, match="request 'a' is longer than max_model_len"):
        simulate_static_batching([A], num_slots=16, max_model_len=6)
