"""The front door: what users hand in, what they get back, and what happens when something is wrong with it."""

import math

import pytest
import torch
from tiny_chat_model import EOS, VOCAB_SIZE, save_tiny_chat_model

from minivllm import LLM, SamplingParams
from minivllm.config import ConfigError
from minivllm.sampling_params import SamplingError

PROMPTS = ["a", "Wolf and kids", "Überraschung: 🐺", "x" * 40]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model_path):
    return LLM(str(model_path))


def greedy(max_tokens: int = 24, **params) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def nothing_is_left(llm: LLM) -> bool:
    scheduler = llm.engine.scheduler
    llm.step()  # delivers the last endings to the worker
    return not (llm._trackers or llm._completions or scheduler.requests or llm.model_runner.batch.states)


def test_outputs_come_in_the_order_of_the_prompts_with_all_their_fields(llm):
    outputs = llm.generate(PROMPTS, [greedy(3 + index) for index in range(4)], use_tqdm=False)
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        completion = output.outputs[0]
        assert output.prompt == prompt
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert output.finished and output.error is None
        assert len(completion.token_ids) == 3 + index
        assert completion.finish_reason == "length"
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert 0 <= output.metrics.queue_time <= output.metrics.time_to_first_token
        assert output.metrics.time_to_first_token <= output.metrics.end_to_end_latency
        assert output.metrics.inter_token_latency > 0
    assert nothing_is_left(llm)


def test_a_text_and_its_token_ids_are_the_same_prompt(llm):
    text, ids = "Wolf", llm.tokenizer.encode("Wolf")
    results = [llm.generate(prompt, greedy(), use_tqdm=False)[0] for prompt in (text, ids, torch.tensor(ids).numpy())]
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
    assert [result.prompt for result in results] == ["Wolf", None, None]


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], greedy(), use_tqdm=False) == []


@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_of_a_stream_add_up_to_the_text_of_generate(llm, seed):
    params = SamplingParams(max_tokens=60, seed=seed, ignore_eos=True)
    whole = llm.generate("Wolf", params, use_tqdm=False)[0].outputs[0]
    with llm.stream("Wolf", params) as stream:
        pieces = list(stream)
    assert "".join(pieces) == whole.text == llm.tokenizer.decode(whole.token_ids, skip_special_tokens=True)
    assert stream.output.outputs[0].token_ids == whole.token_ids
    assert all(pieces)
    assert nothing_is_left(llm)


def test_an_emoji_of_four_tokens_is_streamed_whole(llm):
    """The model is scripted through the sampler: it says the bytes of a wolf's face."""
    token_ids = iter(llm.tokenizer.encode("🐺!"))
    sampler = llm.model_runner.sampler
    llm.model_runner.sampler = lambda logits, metadata: torch.tensor([next(token_ids)])
    try:
        assert list(llm.stream("a", greedy(5))) == ["🐺", "!"]
    finally:
        llm.model_runner.sampler = sampler


def test_closing_a_stream_aborts_its_request_and_no_other(llm):
    other = llm.stream("Wolf", greedy(30))
    stream = llm.stream("a", greedy(200))
    next(stream)
    stream.close()
    assert stream.output.outputs[0].finish_reason == "abort"
    assert "".join(other) == llm.generate("Wolf", greedy(30), use_tqdm=False)[0].outputs[0].text
    assert nothing_is_left(llm)


def test_a_stream_that_is_given_up_aborts_its_request(llm):
    for _ in llm.stream("a", greedy(200)):
        break
    assert nothing_is_left(llm)


def test_abort_keeps_what_is_there(llm):
    stream = llm.stream("a", greedy(200))
    next(stream)
    llm.abort(stream.request_id)
    llm.abort("no such request")
    completion = stream.output.outputs[0]
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 200
    list(stream)
    assert nothing_is_left(llm)


def test_generate_while_a_stream_is_open_serves_both(llm):
    stream = llm.stream("a", greedy(40))
    first = next(stream)
    whole = llm.generate("Wolf", greedy(40), use_tqdm=False)[0].outputs[0].text
    assert first + "".join(stream) == llm.generate("a", greedy(40), use_tqdm=False)[0].outputs[0].text
    assert whole == llm.generate("Wolf", greedy(40), use_tqdm=False)[0].outputs[0].text


def test_n_completions_are_those_of_n_seeds(llm):
    many = llm.generate("Wolf", SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True), use_tqdm=False)[0]
    single = [
        llm.generate("Wolf", SamplingParams(seed=7 + i, max_tokens=12, ignore_eos=True), use_tqdm=False)[0]
        for i in range(3)
    ]
    assert [c.token_ids for c in many.outputs] == [output.outputs[0].token_ids for output in single]
    assert [c.index for c in many.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in many.outputs}) == 3


def test_the_highest_seed_still_has_n_followers(llm):
    output = llm.generate("a", SamplingParams(n=2, seed=2**63 - 1, max_tokens=2), use_tqdm=False)[0]
    assert len(output.outputs) == 2


def test_without_a_seed_two_engines_of_one_seed_agree_and_one_engine_varies(model_path):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = [
        [output.outputs[0].token_ids for output in LLM(str(model_path), seed=5).generate(["a", "a"], params, False)]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_a_stop_string_ends_text_before_it_and_ids_with_the_token_that_completes_it(llm):
    params = SamplingParams(seed=3, max_tokens=60, ignore_eos=True)
    text = llm.generate("Wolf", params, use_tqdm=False)[0].outputs[0].text
    stop = text[20:23]
    assert text.index(stop) > 0
    params.stop = [stop]
    completion = llm.generate("Wolf", params, use_tqdm=False)[0].outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert completion.finish_reason == "stop" and completion.stop_reason == stop
    ids = completion.token_ids
    assert stop in llm.tokenizer.decode(ids) and stop not in llm.tokenizer.decode(ids[:-1])
    with llm.stream("Wolf", params) as stream:
        assert "".join(stream) == completion.text
    assert nothing_is_left(llm)


def test_a_stop_string_before_min_tokens_does_not_count(llm):
    params = SamplingParams(seed=3, max_tokens=60, ignore_eos=True)
    output = llm.generate("Wolf", params, use_tqdm=False)[0].outputs[0]
    early, late = output.text[2], output.text[30:34]
    params.stop, params.min_tokens = [early, late], 8
    ids = llm.generate("Wolf", params, use_tqdm=False)[0].outputs[0].token_ids
    assert len(ids) >= 8
    assert ids == output.token_ids[: len(ids)]


def test_eos_ends_the_output_and_stays_out_of_the_text(llm):
    sampler = llm.model_runner.sampler
    token_ids = iter([*llm.tokenizer.encode("ab"), EOS])
    llm.model_runner.sampler = lambda logits, metadata: torch.tensor([next(token_ids)])
    try:
        params = SamplingParams(max_tokens=9, skip_special_tokens=False)
        completion = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    finally:
        llm.model_runner.sampler = sampler
    assert completion.text == "ab"
    assert completion.token_ids[-1] == EOS
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_stop_token_is_named_as_the_reason(llm):
    ids = llm.generate("Wolf", greedy(20), use_tqdm=False)[0].outputs[0].token_ids
    params = greedy(20, stop_token_ids=[ids[7]])
    completion = llm.generate("Wolf", params, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == ids[: ids.index(ids[7]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[7])


def test_logprobs_hold_the_chosen_token_and_the_best_ones(llm):
    output = llm.generate(
        "Wolf", SamplingParams(seed=1, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True), use_tqdm=False
    )[0]
    completion = output.outputs[0]
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert token_id in position and len(position) in (3, 4)
        best = sorted(position.values(), key=lambda entry: entry.rank)
        assert [entry.rank for entry in best[:3]] == [1, 2, 3]
        assert [entry.logprob for entry in best] == sorted((e.logprob for e in best), reverse=True)
    chosen = [position[i].logprob for i, position in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert math.isclose(completion.cumulative_logprob, sum(chosen))
    assert output.prompt_logprobs[0] is None
    assert [
        token_id in position
        for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ] == [True] * 3


def test_a_prompt_asked_twice_comes_from_the_prefix_cache(model_path):
    llm = LLM(str(model_path), block_size=4)
    prompt = list(range(9))
    first, second = (llm.generate(prompt, greedy(), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_chat_puts_the_conversation_through_the_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    asked, several = llm.chat(messages, greedy(4), False)[0], llm.chat([messages, messages], greedy(4), False)
    assert llm.tokenizer.decode(asked.prompt_token_ids) == "<user>Hi<assistant>"
    assert [output.outputs[0].token_ids for output in several] == [asked.outputs[0].token_ids] * 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, VOCAB_SIZE], f"token id {VOCAB_SIZE}, which is outside the vocabulary: ids go from 0 to {VOCAB_SIZE - 1}"),
        ([-1], "token id -1"),
        ([1.5], "holds 1.5"),
        ([True], "holds True"),
        (list(range(256)), "shorten the prompt to at most 255 tokens"),
        (7, "not 7"),
        ([{"role": "user"}], "content"),
    ],
)
def test_one_bad_prompt_is_refused_by_name_and_the_others_are_served(llm, bad, message):
    outputs = llm.generate(["a", bad, "Wolf"], greedy(4), use_tqdm=False)
    assert message in outputs[1].error
    assert outputs[1].outputs == [] and outputs[1].finished
    assert [len(output.outputs[0].token_ids) for output in (outputs[0], outputs[2])] == [4, 4]
    assert nothing_is_left(llm)


def test_if_every_prompt_is_refused_the_call_raises(llm):
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate(["", ""], greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match="not 3"):
        llm.generate(3)
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.stream("")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=[9999]), "stop_token_ids holds token id 9999"),
        ("greedy", "must be SamplingParams, not str"),
        (SamplingParams(max_tokens=None, min_tokens=9999), "min_tokens"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(llm, params, message):
    outputs = llm.generate(["a", "b"], [params, greedy(2)], use_tqdm=False)
    assert message in outputs[0].error and len(outputs[1].outputs[0].token_ids) == 2


def test_the_number_of_parameters_must_match_the_prompts(llm):
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        llm.generate(["a", "b"], [greedy()])


@pytest.fixture(scope="module")
def priority_llm(model_path):
    return LLM(str(model_path), scheduling_policy="priority", max_num_seqs=1)


def admission_order(llm, monkeypatch) -> list[list[int]]:
    """Prompts in the order in which the engine takes them up, filled while it runs."""
    order: list[list[int]] = []
    execute_model = llm.model_runner.execute_model

    def watched(message):
        order.extend(new.prompt_token_ids for new in message.scheduled_new_reqs)
        return execute_model(message)

    monkeypatch.setattr(llm.model_runner, "execute_model", watched)
    return order


def test_a_lower_priority_is_served_sooner_and_the_results_keep_their_order(priority_llm, monkeypatch):
    order = admission_order(priority_llm, monkeypatch)
    prompts = [[1], [2], [3], [4]]
    outputs = priority_llm.generate(prompts, greedy(2), use_tqdm=False, priority=[3, -1, 3, 0])
    assert order == [[2], [4], [1], [3]]
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_one_priority_serves_all_prompts_of_a_call_and_a_later_stream_can_overtake_them(priority_llm, monkeypatch):
    order = admission_order(priority_llm, monkeypatch)
    with priority_llm.stream([9], greedy(2), priority=5) as late:
        priority_llm.generate([[7], [8]], greedy(2), use_tqdm=False, priority=4)
        assert order == [[7], [8]]
        list(late)
    conversation = [{"role": "user", "content": "a"}]
    priority_llm.chat([conversation], greedy(2), use_tqdm=False, priority=[1])
    assert order[2] == [9] and len(order) == 4


@pytest.mark.parametrize("bad", ["high", None, 1.5, True])
def test_what_is_no_priority_is_refused(priority_llm, bad):
    with pytest.raises(ValueError, match=r"priority must be a whole number \(the lower, the sooner served\), not "):
        priority_llm.generate("a", greedy(), use_tqdm=False, priority=bad)


def test_a_priority_that_nobody_would_heed_is_refused(llm):
    with pytest.raises(ValueError, match="priority=1 needs scheduling_policy='priority': under 'fcfs'"):
        llm.stream("a", greedy(), priority=1)
    assert nothing_is_left(llm)


def test_prompts_share_what_is_cached_only_with_prompts_of_the_same_salt(model_path):
    llm = LLM(str(model_path), block_size=4)
    salts = ["me", None, "you", "me"]
    hits = [llm.generate([1] * 9, greedy(1), use_tqdm=False, cache_salt=salt)[0].num_cached_tokens for salt in salts]
    assert hits == [0, 0, 0, 8]
    outputs = llm.generate([[2] * 9] * 3, greedy(1), use_tqdm=False, cache_salt=["me", "you", "me"])
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 8]
    with llm.stream([2] * 9, greedy(1), cache_salt="you") as stream:
        list(stream)
        assert stream.output.num_cached_tokens == 8


@pytest.mark.parametrize("bad", ["", 7])
def test_a_salt_that_keeps_nobody_apart_is_refused(llm, bad):
    with pytest.raises(ValueError, match="cache_salt must be None or a text that is not empty, not "):
        llm.generate("a", greedy(), use_tqdm=False, cache_salt=bad)


def test_the_number_of_priorities_and_salts_must_match_the_prompts(llm):
    with pytest.raises(ValueError, match="2 prompts but 3 priority values: give one for all or one each"):
        llm.generate(["a", "b"], greedy(), priority=[0, 0, 0])
    with pytest.raises(ValueError, match="2 prompts but 1 cache_salt values: give one for all or one each"):
        llm.generate(["a", "b"], greedy(), cache_salt=["x"])


def test_the_prefix_cache_can_be_forgotten_while_nothing_runs(model_path):
    llm = LLM(str(model_path), block_size=4)
    with llm.stream([1] * 9, greedy(8)) as stream:
        next(stream)
        assert llm.reset_prefix_cache() is False
    assert llm.generate([1] * 9, greedy(1), use_tqdm=False)[0].num_cached_tokens == 8
    assert llm.reset_prefix_cache() is True
    assert llm.generate([1] * 9, greedy(1), use_tqdm=False)[0].num_cached_tokens == 0


def test_a_stream_shows_one_completion_only(llm):
    with pytest.raises(ValueError, match="n=2"):
        llm.stream("a", SamplingParams(n=2))


def test_max_tokens_none_runs_to_max_model_len(llm):
    output = llm.generate([1] * 250, greedy(None), use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 6 and output.finish_reason == "length"


def test_a_prompt_longer_than_the_whole_pool_is_told_what_the_cache_holds(model_path):
    llm = LLM(str(model_path), num_gpu_blocks_override=4, block_size=8)
    assert llm.max_model_len == 32
    with pytest.raises(ValueError, match="the KV cache holds 32 tokens"):
        llm.generate([[1] * 40], greedy())
    with pytest.raises(ConfigError, match="lower max_model_len to at most 32"):
        LLM(str(model_path), num_gpu_blocks_override=4, block_size=8, max_model_len=64)


def test_settings_that_cannot_work_are_refused_by_name(model_path):
    with pytest.raises(ValueError, match="unknown engine argument block_sice; known are: model"):
        LLM(str(model_path), block_sice=8)
    with pytest.raises(ConfigError, match="at most 256"):
        LLM(str(model_path), max_model_len=1000)
    with pytest.raises(SamplingError):
        SamplingParams(temperature=-1)


def test_an_interrupted_step_ends_every_request_and_leaves_a_working_engine(llm, monkeypatch):
    expected = llm.generate("Wolf", greedy(), use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream("a", greedy(100))
    next(stream)
    execute, calls = llm.model_runner.execute_model, []

    def interrupted(message):
        calls.append(message)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return execute(message)

    monkeypatch.setattr(llm.model_runner, "execute_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Wolf", "b"], greedy(), use_tqdm=False)
    assert stream.output.outputs[0].finish_reason == "abort"
    list(stream)
    assert nothing_is_left(llm)
    assert llm.generate("Wolf", greedy(), use_tqdm=False)[0].outputs[0].token_ids == expected


def test_without_a_tokenizer_ids_go_in_and_come_out(model_path, llm):
    bare = LLM(str(model_path), skip_tokenizer_init=True)
    expected = llm.generate("Wolf", greedy(), use_tqdm=False)[0].outputs[0].token_ids
    prompt = llm.tokenizer.encode("Wolf")
    output = bare.generate(prompt, greedy(), use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.text) == (expected, "")
    assert [token_id for piece in bare.stream(prompt, greedy()) for token_id in piece] == expected
    for bad in ("text", [{"role": "user", "content": "Hi"}]):
        with pytest.raises(ValueError, match="needs a tokenizer"):
            bare.generate([bad])
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        bare.generate(prompt, SamplingParams(stop="x"))


def test_the_progress_bar_counts_requests_and_tokens(llm, capsys):
    llm.generate(["a", "b"], greedy(4))
    error = capsys.readouterr().err
    assert "2/2" in error and "tok/s out" in error
