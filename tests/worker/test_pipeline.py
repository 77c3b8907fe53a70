"""Stages in one process: greedy ids of a model in one piece, whatever is split, drafted, cut, preempted or aborted."""

import pytest
from helpers import make_request, run_to_end
from pipeline_cases import (
    CASES,
    LIMITS,
    SITUATIONS,
    alone,
    draft_well,
    pipeline_core,
    requests,
    run_situation,
    save_models,
    speculative_config,
)
from tiny_deepseek import random_prompt

from minivllm.config import EngineConfig
from minivllm.engine.batch_queue import PipelineCore
from minivllm.engine.recorder import record
from minivllm.engine.simulate import CostModel
from minivllm.worker.executor import make_engine
from minivllm.worker.pipeline import InProcessPipeline, use_classic_rule


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def answers(models):
    return alone(models[0])


def config_of(models, num_stages, method=None, k=0, **settings):
    tiny, draft = models
    return EngineConfig(
        str(tiny.path), dtype="float32", device="cpu", pipeline_parallel_size=num_stages,
        distributed_executor_backend="in_process", speculative_config=speculative_config(method, k, draft),
        **{**LIMITS, **settings},
    )  # fmt: skip


@pytest.mark.parametrize(("method", "k"), CASES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_greedy_ids_are_those_of_a_model_in_one_piece(models, answers, num_stages, method, k):
    config = config_of(models, num_stages, method, k)
    worker = InProcessPipeline(config, config.model)
    if k and method != "draft_model":
        draft_well(worker.stages[-1], answers)
    for situation in SITUATIONS:
        asked = run_situation(pipeline_core(config, worker, situation), situation, answers)
        if k and situation != "aborts":
            accepted = sum(request.spec_decode.num_accepted for request in asked)
            assert 0 < accepted < sum(request.spec_decode.num_drafted for request in asked)


@pytest.mark.parametrize(("method", "k"), [(None, 0), ("mtp", 3), ("ngram", 2)])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_broadcast_tokens_do_as_well(models, answers, num_stages, method, k):
    config = config_of(models, num_stages, method, k, pp_token_feedback="broadcast")
    worker = InProcessPipeline(config, config.model)
    worker.keep_messages = True
    if k:
        draft_well(worker.stages[-1], answers)
    for situation in SITUATIONS:
        run_situation(pipeline_core(config, worker, situation), situation, answers)
    assert all(message.scheduled_cached_reqs.new_token_ids == [] for message in worker.messages)


def test_with_one_stage_nothing_is_sent_and_nothing_read(models, answers):
    config = config_of(models, 1, "mtp", 2)
    worker = InProcessPipeline(config, config.model)
    worker.keep_messages = True
    run_situation(pipeline_core(config, worker, "chunks"), "chunks", answers)
    assert all(message.scheduled_cached_reqs.new_token_ids == [] for message in worker.messages)
    tampered = InProcessPipeline(config, config.model)
    submit = tampered.submit

    def lie(message):
        message.scheduled_cached_reqs.new_token_ids = [[3, 3, 3] for _ in message.scheduled_cached_reqs.req_ids]
        submit(message)

    tampered.submit = lie
    run_situation(pipeline_core(config, tampered, "chunks"), "chunks", answers)


def test_the_classic_rule_loses_accepted_drafts(models, answers):
    """Without drafts both rules do; with them the first stage falls behind, and what it embeds is wrong."""
    for k, is_right in ((0, True), (3, False)):
        config = config_of(models, 2, "mtp", k)
        worker = InProcessPipeline(config, config.model)
        if k:
            draft_well(worker.stages[-1], answers)
        core = PipelineCore(config, worker, worker.num_blocks, worker.max_model_len, worker.block_size)
        use_classic_rule(core)
        try:
            results = run_to_end(core, requests()[:3])
        except (AssertionError, IndexError, ValueError):
            assert not is_right
            continue
        asked = {name: ids for name, ids in answers.items() if name in results}
        assert ({name: result.token_ids for name, result in results.items()} == asked) == is_right


@pytest.mark.parametrize("num_stages", [2, 3])
def test_sampling_penalties_and_logprobs_are_those_of_a_model_in_one_piece(models, num_stages):
    def ask():
        return [
            make_request("sampled", random_prompt(9, 1), temperature=1.0, seed=7, top_k=20, logprobs=3),
            make_request("penalties", random_prompt(6, 2), repetition_penalty=1.4, frequency_penalty=0.5, logprobs=0),
            make_request("prompt", random_prompt(20, 3), prompt_logprobs=2, max_tokens=3),
        ]

    got = []
    for size in (1, num_stages):
        config = config_of(models, size, "mtp", 2, long_prefill_token_threshold=6)
        worker = InProcessPipeline(config, config.model)
        got.append(run_to_end(pipeline_core(config, worker, "chunks"), ask()))
    one, several = got
    for name in one:
        assert several[name].token_ids == one[name].token_ids
        for mine, theirs in ((several[name].logprobs, one[name].logprobs),
                             (several[name].prompt_logprobs, one[name].prompt_logprobs)):  # fmt: skip
            assert [entry.token_ids for entry in mine] == [entry.token_ids for entry in theirs]
            for entry, expected in zip(mine, theirs, strict=True):
                assert entry.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_step_that_is_cut_short_leaves_a_pipeline_that_works(models, answers):
    config = config_of(models, 3)
    worker = InProcessPipeline(config, config.model)
    core = pipeline_core(config, worker, "chunks")
    for request in requests():
        core.add_request(request)
    for _ in range(3):
        core.step()
    collect = worker.collect
    worker.collect = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    worker.collect = collect
    assert not core.has_unfinished_requests() and not core.queue
    assert {name: r.token_ids for name, r in run_to_end(core, requests()).items()} == answers


def test_recorder_timeline_and_batches_in_flight(models, answers):
    config = config_of(models, 3)
    worker = InProcessPipeline(config, config.model, [CostModel(1.0, 0.0, 0.0)] * 3)
    core = pipeline_core(config, worker, "prefix caching")
    with record(core.scheduler, clock=lambda: worker.timeline.now) as trace:
        run_to_end(core, requests())
    trace.check()
    runs = worker.timeline.runs
    assert {run.stage for run in runs} == {0, 1, 2} and len(runs) == 3 * len(trace.steps) - 3 * sum(
        not event.scheduled for event in trace.steps
    )
    assert max(worker.timeline.num_in_flight(run.start) for run in runs) == 3


def test_num_blocks_is_the_least_of_any_stage(models, monkeypatch):
    import minivllm.worker.model_runner as model_runner

    counts = iter([48, 32, 40])
    monkeypatch.setattr(model_runner, "count_blocks", lambda *_: next(counts))
    config = config_of(models, 3)
    worker = InProcessPipeline(config, config.model)
    assert worker.num_blocks == 32
    assert {stage.num_blocks for stage in worker.stages} == {32}
    assert {len(cache) for stage in worker.stages for cache in stage.kv_caches.values()} == {32}


def test_each_stage_holds_its_layers_and_no_more(models):
    config = config_of(models, 3, "mtp", 1)
    first, middle, last = InProcessPipeline(config, config.model).stages
    layers = [[layer.layer_name.split(".")[2] for layer in s.model.attention_layers()] for s in (first, middle, last)]
    assert layers == [["0"], ["1", "2"], ["3"]]
    assert [s.model.embed_tokens is not None for s in (first, middle, last)] == [True, False, False]
    assert [s.model.lm_head is not None for s in (first, middle, last)] == [False, False, True]
    assert [s.proposer is not None for s in (first, middle, last)] == [False, False, True]


def test_more_stages_than_layers_are_refused(models):
    with pytest.raises(ValueError, match="pipeline_parallel_size is 5, but the model has 4 layers"):
        make_engine(config_of(models, 5), str(models[0].path))
