"""The batch queue on a virtual clock: who is in flight, and bubbles that match their formulas."""

import subprocess
import sys

import pytest

from minivllm.engine.message_text import message_lines
from minivllm.engine.parallel_traffic import pipeline_traffic, tensor_traffic
from minivllm.engine.simulate import CostModel
from minivllm.engine.simulate_pipeline import simulate_pipeline
from minivllm.engine.stage_timeline import StageTimeline, fill_and_drain_bubble_fraction, steady_bubble_fraction
from minivllm.engine.workload import SimulatedRequest


def workload(num_requests, num_prompt_tokens=4, num_output_tokens=40):
    return [SimulatedRequest(str(i), 0.0, num_prompt_tokens, num_output_tokens) for i in range(num_requests)]


def run(costs, num_requests=12, **options):
    costs = [CostModel(seconds, 0.0, 0.0) for seconds in costs]
    return simulate_pipeline(workload(num_requests), costs, num_blocks=256, **options)


@pytest.mark.parametrize("costs", [(1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (2.0, 1.0, 1.0, 1.0)])
def test_bubbles_of_decoding_match_the_formula(costs):
    total = sum(costs)
    for num_in_flight in range(1, len(costs) + 1):
        _, pipeline = run(costs, max_in_flight=num_in_flight)
        span = max(total, num_in_flight * max(costs))
        fraction = pipeline.timeline.bubble_fraction(6 * span, 14 * span)
        assert fraction == pytest.approx(steady_bubble_fraction(costs, num_in_flight), abs=1e-9)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_chunks_of_one_prompt_fill_and_drain_the_pipeline(num_stages):
    num_chunks = 8
    requests = workload(1, num_prompt_tokens=4 * num_chunks, num_output_tokens=1)
    _, pipeline = simulate_pipeline(
        requests, [CostModel(1.0, 0.0, 0.0)] * num_stages, num_blocks=256, long_prefill_token_threshold=4
    )
    timeline = pipeline.timeline
    assert timeline.duration == num_chunks + num_stages - 1
    assert timeline.bubble_fraction() == pytest.approx(fill_and_drain_bubble_fraction(num_stages, num_chunks))


def test_as_many_batches_are_in_flight_as_there_are_stages():
    _, pipeline = run((1.0, 1.0, 1.0))
    assert [pipeline.timeline.num_in_flight(time + 0.5) for time in (20, 21, 22, 23)] == [3] * 4
    sizes = [len(message.num_scheduled_tokens) for message in pipeline.messages if message.num_scheduled_tokens]
    assert set(sizes[1:20]) == {4}, "12 decodes are shared out among 3 batches"


def test_a_stage_runs_one_step_at_a_time_and_after_the_stage_before_it():
    _, pipeline = run((1.0, 0.5, 2.0))
    end_of = {(run.stage, run.step): run.end for run in pipeline.timeline.runs}
    free_at = [0.0] * 3
    for stage_run in pipeline.timeline.runs:
        assert stage_run.start >= free_at[stage_run.stage]
        assert stage_run.stage == 0 or stage_run.start >= end_of[stage_run.stage - 1, stage_run.step]
        free_at[stage_run.stage] = stage_run.end


def test_the_timeline_is_drawn_in_text():
    timeline = StageTimeline(2)
    for step in (0, 1):
        timeline.submit(step)
        timeline.run(0, step, 1.0, 4)
        timeline.run(1, step, 2.0, 4)
    assert timeline.as_text(1.0) == "stage 0  01...\nstage 1  .0011"
    assert timeline.busy(0) == 2.0 and timeline.busy(1, until=2.0) == 1.0


def test_drafts_are_verified_and_every_request_gets_its_tokens():
    trace, pipeline = run((1.0, 1.0), num_requests=5, num_drafts=3)
    trace.check()
    outputs = {}
    for event in trace.steps:
        for row in event.scheduled:
            outputs[row.req_id] = outputs.get(row.req_id, 0) + row.num_output
    assert outputs == {str(i): 40 for i in range(5)}
    assert any(len(ids) > 1 for m in pipeline.messages for ids in m.scheduled_cached_reqs.new_token_ids)


def test_a_message_is_readable():
    _, pipeline = run((1.0, 1.0), num_requests=1, max_steps=4)
    lines = [line for message in pipeline.messages for line in message_lines(message)]
    assert lines[:2] == ["step 0: 4 tokens", "  0: new, prompt of 4, computed 0, +4, blocks [0]"]
    assert "  0: computed 4, +1, new_token_ids [-2]" in lines


def test_traffic_of_a_step():
    sends = pipeline_traffic(num_tokens=8, hidden_size=4096, num_stages=4)
    assert (sends.num_exchanges, sends.bytes_per_link) == (3, 2 * 8 * 4096 * 2)
    reduces = tensor_traffic(num_tokens=8, hidden_size=4096, num_layers=32, num_ranks=4)
    assert (reduces.num_exchanges, reduces.bytes_per_link) == (64, 64 * 2 * 3 * 8 * 4096 * 2 // 4)
    assert pipeline_traffic(8, 4096, 1).bytes_per_link == tensor_traffic(8, 4096, 32, 1).bytes_per_link == 0


def test_none_of_it_needs_torch():
    code = (
        "import sys, minivllm.engine.simulate_pipeline, minivllm.engine.message_text; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
