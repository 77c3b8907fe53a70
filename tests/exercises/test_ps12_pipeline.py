"""Set 12 beside the engine: its rules are the engine's, and its exhibits do to a real run what the sheet says."""

import random

import pytest
from classroom import checks_and_what_they_load, solved_sheet
from helpers import make_request, make_scheduler

from minivllm.config import EngineConfig
from minivllm.engine.batch_queue import PipelineCore
from minivllm.engine.messages import ModelRunnerOutput
from minivllm.engine.parallel_traffic import pipeline_traffic, tensor_traffic
from minivllm.engine.stage_states import classic_new_token_ids_for, classic_rule, new_token_ids_for
from minivllm.engine.stages import split_layers
from minivllm.exercises import exercises_of, find
from minivllm.exercises.ps12_step import Row


@pytest.fixture(scope="module")
def sheet():
    """All that the solved sheet defines."""
    return solved_sheet("ps12_pipeline")


def test_the_checks_of_the_set_load_neither_torch_nor_the_engine():
    checked, loaded = checks_and_what_they_load("ps12")
    assert len(checked) == 6 and loaded == ""


ODD_ANSWERS = [
    1,
    True,
    "submit",
    [],
    [None],
    [1.0, 2.0],
    [[1], [2]],
    (),
    (1, 2),
    (1.0, float("nan")),
    ([5], [3], None),
    ([5], (3,), 0),
    (None, None, None),
    {"a": None},
    {"z": 1},
    {1: 1},
    {"a": 10**6},
    ["collect", "collect"],
    ["collect", "submit"],
]


@pytest.mark.parametrize("exercise", exercises_of("ps12"), ids=lambda exercise: exercise.name)
def test_any_wrong_answer_is_answered_with_words(exercise):
    for case in exercise.cases:
        expected, inputs = exercise.oracle(*case.args), dict(zip(exercise.parameters, case.args, strict=True))
        for answer in ODD_ANSWERS:
            if answer != expected:
                assert exercise.judge(expected, answer, inputs), (case.args, answer)


def test_layers_are_the_engines():
    layers_per_stage = find("ps12.layers_per_stage").oracle
    for num_layers in range(1, 62):
        for num_stages in range(1, num_layers + 1):
            expected = [len(stage.layers) for stage in split_layers(num_layers, num_stages)]
            assert layers_per_stage(num_layers, num_stages) == expected


def test_traffic_is_the_engines():
    traffic = find("ps12.traffic").oracle
    for num_ranks in (1, 2, 3, 4, 8):
        pipeline = pipeline_traffic(37, 192, num_ranks, 2)
        tensor = tensor_traffic(37, 192, 9, num_ranks, 2)
        assert traffic("pipeline", 37, 192, 9, num_ranks, 2) == (pipeline.num_exchanges, pipeline.bytes_per_link)
        assert traffic("tensor", 37, 192, 9, num_ranks, 2) == (tensor.num_exchanges, tensor.bytes_per_link)


@pytest.mark.parametrize("seed", range(20))
def test_the_next_batch_is_the_schedulers(seed):
    """In every step of runs with several batches in flight, for the requests that ran before it."""
    draw, next_batch = random.Random(seed), find("ps12.next_batch").oracle
    num_stages, budget = draw.randint(1, 4), draw.randint(8, 30)
    scheduler = make_scheduler(
        num_blocks=400, max_num_batched_tokens=budget, enable_prefix_caching=False, pipeline_parallel_size=num_stages
    )
    for name in "abcdefgh":
        scheduler.add_request(make_request(name, draw.randint(1, 24), max_tokens=draw.randint(1, 8)))
    in_flight, num_compared = [], 0
    while scheduler.num_unfinished_requests:
        running = [Row(r.request_id, r.num_tokens, r.num_computed_tokens) for r in scheduler.running]
        output = scheduler.schedule()
        names = {row.name for row in running}
        scheduled = {name: n for name, n in output.num_scheduled_tokens.items() if name in names}
        assert scheduled == next_batch(running, num_stages, budget)
        num_compared += len(scheduled)
        in_flight.append(output)
        if len(in_flight) == num_stages:
            oldest = in_flight.pop(0)
            scheduler.update_from_output(oldest, results_of(scheduler, oldest))
    assert num_compared > 10


def results_of(scheduler, output) -> ModelRunnerOutput:
    """A token for each request of the step that has reached its newest one."""
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    reached = [
        req_id
        for req_id, n in output.num_scheduled_tokens.items()
        if req_id in scheduler.requests and starts[req_id] + n >= scheduler.requests[req_id].num_tokens
    ]
    return ModelRunnerOutput({req_id: [7] for req_id in reached})


def test_the_exhibit_is_the_classic_rule_and_its_cure_the_exact_one(sheet):
    for num_known, num_tokens, computed, scheduled, drafts in (
        (10, 10, 4, 4, 0),
        (10, 10, 8, 2, 0),
        (10, 11, 10, 1, 0),
        (7, 8, 0, 8, 0),
        (11, 14, 13, 3, 2),
    ):
        ids = list(range(100, 100 + num_tokens))
        sent = classic_new_token_ids_for(ids, computed, scheduled, drafts)
        found = sheet["new_token_ids_as_found"](ids, num_known, computed, scheduled, drafts)
        assert found == classic_rule(num_known, computed, sent)
        assert find("ps12.new_token_ids").oracle(ids, num_known, computed, scheduled, drafts) == new_token_ids_for(
            ids, num_known
        )


def test_the_exhibit_loses_tokens_only_with_drafts_and_the_cure_loses_none(sheet):
    assert set(sheet["lacks"](sheet["new_token_ids_as_found"], 0)) == {0}
    lacks = sheet["lacks"](sheet["new_token_ids_as_found"], 2)
    assert lacks[-1] > 0 and lacks == sorted(lacks)
    assert all(set(sheet["lacks"](sheet["new_token_ids"], k)) == {0} for k in (0, 2))


def test_waiting_too_early_leaves_two_of_three_stages_idle(sheet, capsys):
    sheet["run_pipeline"](sheet["engine_step_as_found"])
    sheet["run_pipeline"](sheet["engine_step"])
    verdicts = [line for line in capsys.readouterr().out.splitlines() if "bubbles" in line]
    assert verdicts == ["36 seconds, bubbles 67%", "14 seconds, bubbles 14%"]


class NotedPipeline:
    """A pipeline that notes what the engine does, and samples the same token for everybody."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages, self.actions, self.waiting = num_stages, [], []

    def submit(self, message) -> None:
        if message.num_scheduled_tokens:
            self.actions.append("submit")
            self.waiting.append(results_of(self.scheduler, message))

    def collect(self) -> ModelRunnerOutput:
        self.actions.append("collect")
        return self.waiting.pop(0)

    def reset(self) -> None:
        raise AssertionError("a step was cut short")


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_steps_are_those_of_the_engine(num_stages):
    """With as many decodes as stages a step, what is ready is known: whoever is not in flight."""
    pipeline = NotedPipeline(num_stages)
    config = EngineConfig("noted", block_size=4, num_gpu_blocks_override=64, pipeline_parallel_size=num_stages)
    core = PipelineCore(config, pipeline, 64, 64, 4)
    pipeline.scheduler = core.scheduler
    requests = [make_request(name, 3, max_tokens=6) for name in "abcd"[:num_stages]]
    for request in requests:
        core.add_request(request)
    core.step()  # the prompts share a step
    pipeline.actions.clear()
    engine_step = find("ps12.engine_step").oracle
    while core.has_unfinished_requests():
        expected = engine_step(len(core.queue), num_stages, num_stages - len(core.queue))
        core.step()
        assert pipeline.actions == expected
        pipeline.actions.clear()
        if any(request.status.is_finished for request in requests):
            break
    assert all(request.num_output_tokens > 3 for request in requests)
