"""The engine beside a worker without a model: whatever happens around a request, it gets what it would get alone."""

import pytest
from helpers import (
    VOCAB_SIZE,
    FakeWorker,
    fake_engine,
    make_request,
    next_token,
    output_alone,
    run_to_end,
)
from hypothesis import example, given
from hypothesis import strategies as st
from scheduler_histories import MAX_MODEL_LEN, sometimes_right

from minivllm.engine.request import RequestStatus

prompts = st.lists(st.integers(1, 2), min_size=1, max_size=MAX_MODEL_LEN - 1)
params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, MAX_MODEL_LEN),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "eos": st.sampled_from([(), (3,), (3, 4, 5, 6)]),
        "stop_token_ids": st.sampled_from([[], [7, 8]]),
        "ignore_eos": st.booleans(),
        "salt": st.sampled_from([None, None, "salt"]),
        "priority": st.integers(0, 1),
    }
)


@st.composite
def engine_settings(draw):
    block_size = draw(st.sampled_from([1, 2, 4, 8, 32]))
    max_num_seqs = draw(st.integers(1, 4))
    smallest_pool = -(-MAX_MODEL_LEN // block_size)
    return {
        "block_size": block_size,
        "num_blocks": smallest_pool + draw(st.sampled_from([0, 1, 3, 100])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + draw(st.sampled_from([0, 1, 5, 100])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 1, 3])),
        "enable_prefix_caching": draw(st.booleans()),
        "num_drafts": draw(st.integers(0, 3)),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
    }


@given(options=engine_settings(), prompts=st.lists(prompts, min_size=1, max_size=6), params=params)
@example(
    options={"block_size": 1, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 4, "num_drafts": 3},
    prompts=[[1] * 20] * 6,
    params={"max_tokens": 24},
)
def test_a_batch_gives_each_request_what_it_gets_alone(options, prompts, params):
    core = fake_engine(max_model_len=MAX_MODEL_LEN, draft=sometimes_right, **options)
    requests = [make_request(str(index), prompt, **params) for index, prompt in enumerate(prompts)]
    results = run_to_end(core, requests)
    for request in requests:
        result = results[request.request_id]
        assert (result.token_ids, result.finish_reason) == output_alone(request, MAX_MODEL_LEN)


def test_a_crowded_pool_preempts_again_and_again_and_everyone_gets_through():
    core = fake_engine(num_blocks=6, max_model_len=24, block_size=4)
    requests = [make_request(str(index), [index] * 3, max_tokens=20) for index in range(8)]
    results = run_to_end(core, requests)
    assert sum(request.num_preemptions for request in requests) >= 6
    for request in requests:
        assert results[request.request_id].token_ids == output_alone(request, 24)[0]


def test_chunks_whole_prompts_and_switched_off_chunking_give_the_same():
    requests = [[1] * 20, [2] * 9, [1] * 21, [3]]
    outputs = []
    for options in (
        {"max_num_batched_tokens": 8},
        {"long_prefill_token_threshold": 1},
        {},
        {"max_num_batched_tokens": 24, "enable_chunked_prefill": False},
    ):
        core = fake_engine(num_blocks=20, max_model_len=24, block_size=4, **options)
        results = run_to_end(core, [make_request(str(i), prompt) for i, prompt in enumerate(requests)])
        outputs.append({name: result.token_ids for name, result in results.items()})
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]


def test_a_step_without_requests_is_harmless():
    core = fake_engine(num_blocks=6, max_model_len=24, block_size=4)
    assert core.step() == [] and not core.has_unfinished_requests()
    run_to_end(core, [make_request("a", 3)])
    assert core.step() == [] and core.worker.tokens == {}


def test_a_step_cut_short_drops_all_requests_and_leaves_an_engine_that_works(monkeypatch):
    core = fake_engine(num_blocks=6, max_model_len=24, block_size=4)
    for name in "ab":
        core.add_request(make_request(name, 10))
    core.step()
    with monkeypatch.context() as broken:
        broken.setattr(core.worker, "execute_model", lambda message: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            core.step()
    assert not core.has_unfinished_requests() and core.scheduler.kv_cache_manager.usage == 0.0
    request = make_request("a", 10)
    result = run_to_end(core, [request])["a"]
    assert result.num_cached_tokens == 0, "what the broken step left in the cache is trusted by nobody"
    assert (result.token_ids, result.finish_reason) == output_alone(request, 24)


class TestTheFakeWorkerItself:
    """The checks above are worth as much as the worker's: it must notice what a real cache would suffer from."""

    def test_a_block_taken_from_its_owner_is_noticed(self):
        core = fake_engine(num_blocks=6, max_model_len=24, block_size=4)
        core.add_request(make_request("a", 6))
        core.step()
        core.worker.cache[2] = 12345
        with pytest.raises(AssertionError, match="a: slot of token 2 holds other K, V"):
            core.step()

    def test_a_token_that_is_skipped_is_noticed(self):
        core = fake_engine(num_blocks=6, max_model_len=24, block_size=4)
        request = make_request("a", 6)
        core.add_request(request)
        core.step()
        request.append_output_token(next_token(request.all_token_ids), 24)
        core.worker.tokens["a"].append(request.all_token_ids[-1])
        request.num_computed_tokens += 1
        with pytest.raises(AssertionError, match="slot of token 6 holds other K, V"):
            core.step()

    def test_drafts_are_accepted_up_to_the_first_mismatch(self):
        prompt = [1, 2, 3]
        right = [next_token(prompt)]
        right.append(next_token(prompt + right))
        right.append(next_token(prompt + right))
        worker = FakeWorker(4, 4)
        core = fake_engine(num_blocks=4, max_model_len=16, block_size=4)
        core.worker = worker
        request = make_request("a", prompt)
        request.spec_token_ids = [right[0], (right[1] + 1) % VOCAB_SIZE]
        core.add_request(request)
        (output,) = core.step()
        assert output.new_token_ids == right[:2]
        assert request.status is RequestStatus.RUNNING and request.num_computed_tokens == 4
