"""The recorder writes down what happened, names it by the counters, and leaves no trace of itself."""

from collections import Counter

import pytest
from helpers import fake_engine, make_request, make_scheduler, run_step
from hypothesis import given
from hypothesis import strategies as st

from minivllm.engine.messages import ModelRunnerOutput
from minivllm.engine.recorder import record
from minivllm.engine.simulate import CostModel, SimulatedWorker, simulate
from minivllm.engine.trace import DECODE, PREFILL, RECOMPUTE, VERIFY
from minivllm.engine.workload import engine_request, make_workload


def kinds(trace) -> list[list[tuple[str, str, int, int]]]:
    return [[(row.req_id, row.kind, row.first, row.num_tokens) for row in event.scheduled] for event in trace.steps]


def test_chunks_are_prefill_and_the_token_sampled_last_is_a_decode():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 12, max_tokens=2))
    with record(scheduler) as trace:
        run_step(scheduler, {})
        run_step(scheduler, {"a": [7]})
        run_step(scheduler, {"a": [8]})
    assert kinds(trace) == [[("a", PREFILL, 0, 8)], [("a", PREFILL, 8, 4)], [("a", DECODE, 12, 1)]]
    assert [event.scheduled[0].num_output for event in trace.steps] == [0, 1, 1]
    assert [event.finished for event in trace.steps] == [{}, {}, {"a": "length"}]


def test_a_last_prompt_token_alone_is_prefill_and_no_decode():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 9))
    with record(scheduler) as trace:
        run_step(scheduler, {})
        run_step(scheduler, {"a": [7]})
    assert kinds(trace)[1] == [("a", PREFILL, 8, 1)]


def test_drafts_are_split_into_accepted_and_rejected():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    with record(scheduler) as trace:
        run_step(scheduler, {"a": [5]}, drafts={"a": [6, 7, 8]})
        run_step(scheduler, {"a": [6, 9]})
    verified = trace.steps[1].scheduled[0]
    assert (verified.kind, verified.num_tokens, verified.num_output) == (VERIFY, 4, 2)
    assert (verified.num_drafts, verified.num_accepted, verified.num_rejected) == (3, 1, 2)
    assert trace.steps[1].num_stored_tokens == 8


def test_tokens_after_a_stop_count_as_accepted_but_not_as_output():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens=2))
    with record(scheduler) as trace:
        run_step(scheduler, {"a": [5]}, drafts={"a": [6, 7]})
        run_step(scheduler, {"a": [6, 7, 8]})
    assert (trace.steps[1].scheduled[0].num_accepted, trace.steps[1].scheduled[0].num_output) == (2, 1)


def test_what_is_computed_again_after_a_preemption_is_recompute():
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, enable_prefix_caching=False)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 7, max_tokens=5))
    with record(scheduler) as trace:
        run_step(scheduler, {"a": [1], "b": [1]})
        run_step(scheduler, {"a": [2], "b": [2]})
        run_step(scheduler, {"a": [3]})
        for _ in range(2):
            run_step(scheduler, {"a": [4]})
        run_step(scheduler, {"b": [5]})
    assert trace.steps[2].preempted == ["b"] and trace.steps[2].freed == ["b"]
    assert kinds(trace)[5] == [("b", RECOMPUTE, 0, 9)]
    assert trace.steps[5].scheduled[0].parts() == {RECOMPUTE: 8, PREFILL: 1}
    assert trace.steps[2].num_waiting == 1 and trace.steps[5].num_waiting == 0


def test_prefix_hits_are_entered_where_a_request_is_admitted():
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 9))
    with record(scheduler) as trace:
        run_step(scheduler, {"a": [1], "b": [1]})
        run_step(scheduler, {"a": [2], "b": [2]})
    assert trace.steps[0].prefix_hits == {"a": [0, 9], "b": [8, 9]}
    assert trace.steps[1].prefix_hits == {}


def test_without_a_prefix_cache_nothing_is_looked_up():
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.add_request(make_request("a", 9))
    with record(scheduler) as trace:
        run_step(scheduler, {"a": [1]})
    assert trace.steps[0].prefix_hits == {}


def test_an_abort_is_entered_in_the_next_step_and_frees_the_table():
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 5))
    with record(scheduler) as trace:
        run_step(scheduler, {"a": [1], "b": [1]})
        scheduler.abort(["a", "never-there"])
        run_step(scheduler, {"b": [2]})
    assert trace.steps[1].aborted == ["a"] and trace.steps[1].freed == ["a"]
    assert list(trace.tables_at(1)) == ["b"] and "a" not in trace.steps[1].finished


def test_a_request_aborted_before_it_ran_is_not_in_the_trace():
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 5))
    with record(scheduler) as trace:
        scheduler.abort(["a"])
        run_step(scheduler, {"b": [1]})
    assert list(trace.requests) == ["b"] and trace.steps[0].aborted == []
    trace.check()


def test_steps_in_flight_are_completed_in_the_order_of_their_results():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 12))
    moments = iter([0.0, 1.0, 2.0, 5.0, 9.0])
    with record(scheduler, clock=lambda: next(moments)) as trace:
        first, second = scheduler.schedule(), scheduler.schedule()
        scheduler.update_from_output(first, ModelRunnerOutput())
        scheduler.update_from_output(second, ModelRunnerOutput({"a": [7]}))
    assert [(event.start, event.end) for event in trace.steps] == [(1.0, 5.0), (2.0, 9.0)]
    assert [event.scheduled[0].num_output for event in trace.steps] == [0, 1]


def test_a_recorded_engine_steps_as_before_and_an_unrecorded_one_has_nothing_attached():
    core = fake_engine(num_blocks=16, max_model_len=32, block_size=4)
    core.add_request(make_request("a", 6, max_tokens=3))
    with record(core.scheduler) as trace:
        outputs = [core.step() for _ in range(3)]
    assert [len(output.new_token_ids) for step in outputs for output in step] == [1, 1, 1]
    assert trace.source == "engine" and trace.steps[2].finished == {"a": "length"}
    assert {"schedule", "update_from_output"}.isdisjoint(vars(core.scheduler))


def test_the_recorder_lets_go_when_the_block_fails():
    scheduler = make_scheduler()
    with pytest.raises(KeyError), record(scheduler):
        raise KeyError
    assert "schedule" not in vars(scheduler)


def test_a_recording_begins_before_requests_run():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5))
    run_step(scheduler, {"a": [1]})
    with pytest.raises(ValueError, match="must begin before requests run"), record(scheduler):
        pass


@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(16, 24),
    num_drafts=st.integers(0, 3),
    caching=st.booleans(),
    budget=st.integers(8, 40),
)
def test_replayed_tables_and_stored_tokens_equal_those_of_the_cache_manager(
    seed, num_blocks, num_drafts, caching, budget
):
    workload = make_workload([0.0] * 8, (6, 30), (1, 20), num_shared_tokens=6, num_prefixes=2, seed=seed)
    seen = []

    class WatchedWorker(SimulatedWorker):
        def execute_model(self, message):
            seen.append(snapshot())
            return super().execute_model(message)

    scheduler = make_scheduler(num_blocks, 4, 60, 8, budget, enable_prefix_caching=caching)
    manager = scheduler.kv_cache_manager

    def snapshot():
        tables = {request.request_id: manager.block_ids(request) for request in scheduler.running}
        refs = {block.block_id: block.ref_count for block in manager.block_pool.blocks if block.ref_count}
        filled = Counter()
        for request in scheduler.running:
            for index, block_id in enumerate(tables[request.request_id]):
                filled[block_id] = max(filled[block_id], min(4, request.num_computed_tokens - 4 * index))
        return tables, refs, sum(filled.values())

    worker = WatchedWorker(CostModel(), num_drafts, seed=seed)
    for number, simulated in enumerate(workload):
        scheduler.add_request(engine_request(simulated, own_text=2 + number))
    with record(scheduler) as trace:
        while scheduler.num_unfinished_requests:
            output = scheduler.schedule()
            results, _ = worker.execute_model(output)
            scheduler.update_from_output(output, results)
    trace.check()
    assert len(seen) == len(trace.steps)
    for event, (tables, refs, stored) in zip(trace.steps, seen, strict=True):
        assert trace.tables_at(event.step) == tables
        assert trace.ref_counts_at(event.step) == refs
        assert (event.num_used_blocks, event.num_stored_tokens) == (len(refs), stored)


def test_every_part_of_a_recorded_step_is_counted_once():
    trace = simulate(make_workload([0.0] * 6, (6, 30), (4, 20), seed=3), num_blocks=20, block_size=4, max_model_len=60,
                     max_num_seqs=4, max_num_batched_tokens=16, num_drafts=2)  # fmt: skip
    for event in trace.steps:
        for row in event.scheduled:
            assert sum(row.parts().values()) == row.num_tokens and min(row.parts().values()) >= 0
