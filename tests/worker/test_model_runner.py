"""The model runner beside transformers: log-probabilities, penalties, stops, and what a message may hold."""

import pytest
import torch
from helpers import Finished, make_request, run_to_end, step_checked
from tiny_llama import MAX_POSITIONS, VOCAB_SIZE, random_prompt

from minivllm.config import ConfigError
from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.worker.model_runner import resolve_device

# float32 logits of about 10 through two layers, rounded in another order
LOGIT_TOLERANCE = 1e-3
SMALL_POOL = {"block_size": 4, "max_model_len": 40, "num_gpu_blocks_override": 10}


def reference_logprobs(tiny_llama, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), V]: row p is the distribution of token p + 1."""
    return tiny_llama.logits(token_ids).log_softmax(-1)


def check_entry(entry, expected: torch.Tensor, token: int, num_top: int) -> None:
    assert entry.token_ids[0] == token and len(entry.token_ids) == len(entry.logprobs) == num_top + 1
    assert entry.logprobs == pytest.approx(expected[entry.token_ids].tolist(), abs=LOGIT_TOLERANCE)
    assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)
    assert entry.logprobs[1:] == pytest.approx(expected.topk(num_top).values.tolist(), abs=LOGIT_TOLERANCE)
    margin = (expected - expected[token]).abs().sort().values[1]
    assert margin < 1e-4 or entry.rank == 1 + int((expected > expected[token]).sum())


def crowd(count: int = 4, **params):
    return [make_request(str(i), random_prompt(10 + i, seed=i), max_tokens=15, **params) for i in range(count)]


@pytest.mark.parametrize("settings", [{"max_model_len": 64, "num_gpu_blocks_override": 64}, SMALL_POOL])
def test_logprobs_are_those_of_the_raw_model_before_any_processor(tiny_llama, settings):
    core = tiny_llama.engine(**settings)
    requests = crowd(logprobs=3, temperature=0.7, top_k=5, repetition_penalty=1.4, min_tokens=15, stop_token_ids=[3])
    results = run_to_end(core, requests)
    assert (sum(request.num_preemptions for request in requests) > 0) == (settings is SMALL_POOL)
    for request in requests:
        result = results[request.request_id]
        assert len(result.logprobs) == len(result.token_ids) == 15
        expected = reference_logprobs(tiny_llama, request.all_token_ids)[request.num_prompt_tokens - 1 :]
        for entry, row, token in zip(result.logprobs, expected, result.token_ids, strict=False):
            check_entry(entry, row, token, num_top=3)


def test_only_those_who_ask_get_logprobs_and_each_as_many_as_asked(tiny_llama):
    core = tiny_llama.engine(max_model_len=64, num_gpu_blocks_override=64)
    requests = [make_request(str(i), [5, 6, 7], max_tokens=3, logprobs=i - 1 if i else None) for i in range(4)]
    results = run_to_end(core, requests)
    assert [[len(entry.token_ids) for entry in results[str(i)].logprobs] for i in range(4)] == [
        [],
        [1, 1, 1],
        [2, 2, 2],
        [3, 3, 3],
    ]
    assert len({tuple(result.token_ids) for result in results.values()}) == 1, "asking changes nothing"


@pytest.mark.parametrize("chunk_size", [0, 1, 7])
def test_prompt_logprobs_come_once_for_every_prompt_token_but_the_first(tiny_llama, chunk_size):
    core = tiny_llama.engine(**SMALL_POOL, long_prefill_token_threshold=chunk_size)
    requests = [*crowd(prompt_logprobs=2), make_request("one", [9], prompt_logprobs=2, max_tokens=2)]
    results = run_to_end(core, requests)
    assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        entries = results[request.request_id].prompt_logprobs
        assert len(entries) == request.num_prompt_tokens - 1
        expected = reference_logprobs(tiny_llama, request.prompt_token_ids)
        for entry, row, token in zip(entries, expected, request.prompt_token_ids[1:], strict=False):
            check_entry(entry, row, token, num_top=2)


def test_a_request_preempted_amid_its_prompt_goes_on_with_prompt_logprobs_where_it_was(tiny_llama):
    core = tiny_llama.engine(block_size=4, max_model_len=40, num_gpu_blocks_override=10, long_prefill_token_threshold=3)
    requests = [
        make_request("short", random_prompt(6, seed=0), max_tokens=30),
        make_request("long", random_prompt(39, seed=1), max_tokens=1, prompt_logprobs=0),
    ]
    results: dict[str, Finished] = {}
    for request in requests:
        core.add_request(request)
    while not requests[1].num_preemptions:
        step_checked(core, results)
    seen = len(results["long"].prompt_logprobs)
    assert 0 < seen < 38
    while core.has_unfinished_requests():
        step_checked(core, results)
    got = [entry.logprobs[0] for entry in results["long"].prompt_logprobs]
    prompt = requests[1].prompt_token_ids
    expected = reference_logprobs(tiny_llama, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert got == pytest.approx(expected.tolist(), abs=LOGIT_TOLERANCE)


def test_long_prompts_give_prompt_logprobs_slice_by_slice(tiny_llama):
    core = tiny_llama.engine(max_model_len=MAX_POSITIONS, num_gpu_blocks_override=32)
    prompt = random_prompt(MAX_POSITIONS - 1, seed=3)
    result = run_to_end(core, [make_request("a", prompt, prompt_logprobs=0)])["a"]
    assert [entry.token_ids[0] for entry in result.prompt_logprobs] == prompt[1:]
    expected = reference_logprobs(tiny_llama, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    got = [entry.logprobs[0] for entry in result.prompt_logprobs]
    assert got == pytest.approx(expected.tolist(), abs=LOGIT_TOLERANCE)


def test_who_wants_prompt_logprobs_skips_the_prefix_cache_and_gets_the_same_tokens(tiny_llama):
    core = tiny_llama.engine(max_model_len=64, num_gpu_blocks_override=64, block_size=4)
    prompt = random_prompt(20, seed=2)
    plain = run_to_end(core, [make_request("a", prompt)])["a"]
    curious = run_to_end(core, [make_request("b", prompt, prompt_logprobs=0)])["b"]
    again = run_to_end(core, [make_request("c", prompt)])["c"]
    assert (plain.num_cached_tokens, curious.num_cached_tokens, again.num_cached_tokens) == (0, 0, 16)
    assert len(curious.prompt_logprobs) == 19
    assert plain.token_ids == curious.token_ids == again.token_ids


@pytest.mark.parametrize("settings", [{"max_model_len": 64, "num_gpu_blocks_override": 64}, SMALL_POOL])
def test_penalties_count_prompt_and_output_across_preemptions(tiny_llama, settings):
    repetition, presence, frequency = 1.4, 0.6, 0.9
    core = tiny_llama.engine(**settings)
    requests = crowd(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    results = run_to_end(core, requests)
    assert (sum(request.num_preemptions for request in requests) > 0) == (settings is SMALL_POOL)
    for request in requests:
        output: list[int] = []
        for token in results[request.request_id].token_ids:
            logits = tiny_llama.logits(request.prompt_token_ids + output)[-1]
            for seen in {*request.prompt_token_ids, *output}:
                logits[seen] = logits[seen] / repetition if logits[seen] > 0 else logits[seen] * repetition
                logits[seen] -= frequency * output.count(seen) + presence * (seen in output)
            best_two = logits.topk(2)
            assert best_two.values[0] - best_two.values[1] > 1e-3, "a close call: choose other prompts"
            assert token == best_two.indices[0]
            output.append(token)


def test_stop_tokens_are_masked_before_min_tokens_and_end_the_request_after(tiny_llama):
    prompt = random_prompt(9, seed=0)
    core = tiny_llama.engine(max_model_len=64, num_gpu_blocks_override=64)
    plain = run_to_end(core, [make_request("a", prompt)])["a"].token_ids
    stopped = run_to_end(core, [make_request("b", prompt, eos=(plain[0],))])["b"]
    assert (stopped.token_ids, stopped.finish_reason) == ([plain[0]], "stop")
    kept_on = run_to_end(core, [make_request("c", prompt, eos=(plain[0],), min_tokens=5)])["c"]
    assert len(kept_on.token_ids) >= 5 and plain[0] not in kept_on.token_ids[:5]
    every = tuple(token for token in range(VOCAB_SIZE) if token != 77)
    only = run_to_end(core, [make_request("d", prompt, eos=every, min_tokens=4, max_tokens=8)])["d"]
    assert only.token_ids[:4] == [77] * 4 and only.finish_reason == "stop"


def test_a_message_without_tokens_only_updates_the_batch(tiny_llama):
    core = tiny_llama.engine(max_model_len=64, num_gpu_blocks_override=64)
    run_to_end(core, [make_request("a", [1, 2], max_tokens=1)])
    assert "a" in core.worker.batch.states
    assert core.worker.execute_model(SchedulerOutput(finished_req_ids={"a"})) == ModelRunnerOutput()
    assert core.worker.batch.states == {}


def test_a_max_model_len_left_open_is_the_models_or_what_the_pool_holds(tiny_llama):
    assert tiny_llama.engine(num_gpu_blocks_override=1000).scheduler.max_model_len == MAX_POSITIONS
    core = tiny_llama.engine(num_gpu_blocks_override=3, block_size=16)
    assert core.scheduler.max_model_len == 48
    result = run_to_end(core, [make_request("a", 40, max_tokens=100)])["a"]
    assert (len(result.token_ids), result.finish_reason) == (8, "length")


def test_a_model_len_beyond_the_models_positions_is_refused(tiny_llama):
    with pytest.raises(ConfigError, match=r"max_model_len \(513\) is longer .* \(512\): lower it to at most 512"):
        tiny_llama.engine(max_model_len=513, num_gpu_blocks_override=64)


def test_a_gpu_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    for device in ("cuda", "cuda:3"):
        with pytest.raises(ConfigError, match=f"device='{device}' needs a CUDA GPU.*: use device='cpu'"):
            resolve_device(device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_float32_until_a_close_call(tiny_llama, dtype):
    prompts = [random_prompt(length, seed=5) for length in (3, 17, 30)]
    core = tiny_llama.engine(max_model_len=64, num_gpu_blocks_override=64, dtype=dtype)
    results = run_to_end(core, [make_request(str(i), prompt) for i, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        output = results[str(index)].token_ids
        logits = tiny_llama.logits(prompt + output)[len(prompt) - 1 : -1]
        gap = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        # Two layers of random weights of 0.3 magnify rounding: the best token may lose by a few of bfloat16's last
        # places at logits of about 20, 2^-8 * 16 = 0.06 each.
        assert gap.max() < (0.5 if dtype == "bfloat16" else 0.07)


def test_dummy_weights_need_only_a_config(tiny_llama, tmp_path):
    (tmp_path / "config.json").write_text((tiny_llama.path / "config.json").read_text())
    dummy = type(tiny_llama)(tmp_path)
    core = dummy.engine(load_format="dummy", max_model_len=64, num_gpu_blocks_override=64)
    assert len(run_to_end(core, [make_request("a", 5)])["a"].token_ids) == 16
