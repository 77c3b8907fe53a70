"""The simulator runs the real scheduler on a clock that obeys the cost model."""

import time

import pytest
from trace_samples import busy_trace

from minivllm.config import ConfigError
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.simulate import CostModel, simulate
from minivllm.engine.trace_metrics import occupancy, request_metrics, summarise
from minivllm.engine.workload import SimulatedRequest, make_workload, poisson_arrivals

SIZES = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32}


def test_a_lone_request_takes_the_seconds_that_the_cost_model_says():
    cost = CostModel(fixed=1.0, per_token=0.1, per_context_token=0.01)
    trace = simulate([SimulatedRequest("a", 2.0, 40, 3)], cost, **SIZES)
    (metrics,) = request_metrics(trace)
    # Two chunks of the prompt (32, then 8), then two decodes at contexts of 41 and 42.
    first = 2.0 + (1 + 3.2 + 0.32) + (1 + 0.8 + 0.40)
    second = first + 1 + 0.1 + 0.41
    assert metrics.token_times == pytest.approx([first, second, second + 1 + 0.1 + 0.42])
    assert trace.steps[0].start == 2.0 and metrics.queue_time == 0.0


def test_everybody_gets_as_many_tokens_as_were_asked_for():
    workload = make_workload(poisson_arrivals(40, 50.0), (1, 60), (1, 60), num_shared_tokens=1, seed=4)
    trace = simulate(workload, **SIZES)
    tokens = {metrics.req_id: len(metrics.token_times) for metrics in request_metrics(trace)}
    assert tokens == {request.req_id: request.num_output_tokens for request in workload}
    assert summarise(trace).num_preemptions > 0


def test_requests_enter_when_the_clock_passes_their_arrival_in_any_order():
    late, early = SimulatedRequest("late", 5.0, 8, 2), SimulatedRequest("early", 1.0, 8, 2)
    trace = simulate([late, early], **SIZES)
    assert [row.req_id for event in trace.steps for row in event.scheduled] == ["early"] * 2 + ["late"] * 2
    assert trace.steps[2].start == 5.0


def test_a_request_that_finds_no_place_has_a_queue_time():
    workload = [SimulatedRequest(name, 0.0, 8, 10) for name in ("a", "b")]
    first, second = request_metrics(simulate(workload, **{**SIZES, "max_num_seqs": 1}))
    assert first.queue_time == 0.0
    assert second.queue_time == pytest.approx(first.end_to_end_latency)


def test_a_shared_prefix_is_computed_once():
    workload = make_workload([0.0] * 8, 20, 2, num_shared_tokens=16)
    with_cache = simulate(workload, **SIZES)
    without = simulate(workload, enable_prefix_caching=False, **SIZES)
    computed = [sum(row.num_tokens for e in t.steps for row in e.scheduled) for t in (with_cache, without)]
    assert computed == [16 + 8 * 4 + 8, 8 * 20 + 8]
    assert summarise(with_cache).hit_rate == pytest.approx(7 * 16 / (8 * 20))


def test_drafts_shorten_a_run_and_are_accepted_at_their_rate():
    workload = make_workload([0.0] * 4, 10, 50)
    plain, fast = simulate(workload, **SIZES), simulate(workload, num_drafts=1, acceptance_rate=0.8, **SIZES)
    assert len(fast.steps) < 0.7 * len(plain.steps)
    assert summarise(fast).acceptance_rate == pytest.approx(0.8, abs=0.15)
    none = summarise(simulate(workload, num_drafts=3, acceptance_rate=0.0, **SIZES))
    assert (none.acceptance_rate, none.num_steps) == (0.0, len(plain.steps))


def test_the_same_seed_gives_the_same_trace():
    assert busy_trace() == busy_trace()


def test_a_block_of_max_model_len_tokens_is_contiguous_allocation():
    workload = make_workload([0.0] * 12, (10, 40), (10, 40), seed=1)
    paged = simulate(workload, **SIZES)
    contiguous = simulate(workload, **{**SIZES, "num_blocks": 2, "block_size": 128, "enable_prefix_caching": False})
    assert occupancy(contiguous).reserved == occupancy(contiguous).contiguous
    assert max(event.num_running for event in contiguous.steps) == 2
    assert occupancy(paged).shares[0] > 0.9 > 0.5 > occupancy(contiguous).shares[0]
    assert paged.duration < contiguous.duration


def test_a_run_can_be_cut_after_some_steps():
    assert len(simulate(make_workload([0.0] * 4, 10, 100), max_steps=7, **SIZES).steps) == 7


def test_nothing_to_do_is_an_empty_trace():
    assert simulate([], **SIZES).steps == []


def test_options_of_the_scheduler_are_passed_on():
    trace = simulate([SimulatedRequest("a", 0.0, 30, 1)], long_prefill_token_threshold=10, **SIZES)
    assert [event.num_scheduled_tokens for event in trace.steps] == [10, 10, 10]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive"),
        ({"block_size": 0}, "block_size must be a positive"),
        ({"num_blocks": 2}, "cannot serve one request of max_model_len"),
        ({"max_num_batched_tokens": 4}, "is smaller than what max_num_seqs"),
    ],
)
def test_settings_that_the_engine_refuses_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        simulate([SimulatedRequest("a", 0.0, 8, 2)], **{**SIZES, **settings})


def test_a_request_that_can_never_run_is_refused():
    with pytest.raises(ValueError, match="leaves no room for an output"):
        simulate([SimulatedRequest("a", 0.0, 128, 2)], **SIZES)


@pytest.mark.parametrize("costs", [(-1.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_costs_that_would_stop_the_clock_are_refused(costs):
    with pytest.raises(ValueError, match="a step must take some time"):
        CostModel(*costs)


def test_a_scheduler_that_plans_nothing_is_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setattr(Scheduler, "_admit_waiting", lambda *arguments: None)
    with pytest.raises(RuntimeError, match="step 0 is empty"):
        simulate([SimulatedRequest("a", 0.0, 8, 2)], **SIZES)


def test_a_simulation_takes_hundreds_of_steps_a_second_at_the_very_least():
    """Thousands, on a machine that is not busy; the bound leaves room for one that is."""
    workload = make_workload([0.0] * 8, 100, 300)
    start = time.process_time()
    trace = simulate(workload, num_blocks=300, max_model_len=512)
    assert len(trace.steps) / (time.process_time() - start) > 500
