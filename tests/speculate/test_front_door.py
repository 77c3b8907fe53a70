"""Speculation through the front door: stop strings, streams, statistics, traces, the command line."""

import json

import pytest
from tiny_chat_model import save_tiny_chat_model

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.engine.recorder import record
from minivllm.engine.trace_metrics import spec_decode, summarise

PROMPTS = ["a", "Wolf and kids", "x" * 40]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("tiny")))


def load(model_path, k=3, **more):
    draft = {"method": "draft_model", "model": model_path, "num_speculative_tokens": k, **more}
    return LLM(model_path, dtype="float32", device="cpu", num_gpu_blocks_override=64, speculative_config=draft)


@pytest.fixture(scope="module")
def plain(model_path):
    return LLM(model_path, dtype="float32", device="cpu", num_gpu_blocks_override=64)


@pytest.fixture(scope="module")
def fast(model_path):
    return load(model_path)


def greedy(**params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **params})


@pytest.mark.parametrize("min_tokens", [0, 9])
def test_stop_strings_end_the_same_text_with_the_same_tokens(plain, fast, min_tokens):
    texts = [output.outputs[0].text for output in plain.generate(PROMPTS, greedy(), use_tqdm=False)]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        for place in range(0, len(text) - 2, 3):
            params = greedy(stop=[text[place : place + 2], text[place + 2]], logprobs=0, min_tokens=min_tokens)
            want, got = (llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for llm in (plain, fast))
            assert (got.text, got.token_ids, got.stop_reason) == (want.text, want.token_ids, want.stop_reason)
            assert len(got.logprobs) == len(got.token_ids)


def test_a_stream_shows_the_same_text(plain, fast):
    texts = []
    for llm in (plain, fast):
        with llm.stream(PROMPTS[1], greedy()) as stream:
            texts.append("".join(stream))
    assert texts[0] == texts[1]


def test_the_output_says_what_became_of_the_drafts_and_the_trace_says_the_same(plain, fast):
    with record(fast.engine.scheduler) as trace:
        outputs = fast.generate(PROMPTS, greedy(n=2), use_tqdm=False)
    stats = [output.spec_decode for output in outputs]
    assert all(own.num_accepted == own.num_drafted > 0 for own in stats), "the model is its own draft"
    # 24 tokens: one from the prompt, five verifications of three drafts with a bonus, then what max_tokens lets through
    assert all(own.emitted[0] == own.num_verifications for own in stats)
    traced = spec_decode(trace)
    assert traced.accepted == [sum(column) for column in zip(*(own.accepted for own in stats), strict=True)]
    assert traced.emitted == [sum(column) for column in zip(*(own.emitted for own in stats), strict=True)]
    summary = summarise(trace)
    assert summary.acceptance_rate == 1.0
    assert summary.mean_acceptance_length == traced.mean_acceptance_length > 3
    assert plain.generate(PROMPTS[0], greedy(), use_tqdm=False)[0].spec_decode is None


def test_the_command_line_speculates_and_says_how_well(model_path, capsys):
    texts = []
    for flags in ([], ["--speculate", "draft_model", "--draft-model", model_path, "--num-speculative-tokens", "2"]):
        run = ["generate", "--model", model_path, "--max-tokens", "12", "--json", *flags, "Wolf"]
        assert main(run) == 0
        shown = capsys.readouterr()
        texts.append(json.loads(shown.out)["outputs"][0]["text"])
        assert ("drafts accepted (100%)" in shown.err) == bool(flags)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculate", "luck"], "method must be one of ngram, draft_model, mtp, not 'luck'"),
        (["--speculate", "draft_model"], "'model' must name the draft model"),
        (["--draft-model", "x"], "--draft-model needs --speculate draft_model"),
        (["--speculate", "mtp"], "has no MTP layers"),
        (["--speculate", "ngram", "--num-speculative-tokens", "-1"], "num_speculative_tokens must be 0"),
    ],
)
def test_the_command_line_refuses_what_cannot_work(model_path, capsys, flags, message):
    assert main(["generate", "--model", model_path, *flags, "a"]) == 2
    assert message in capsys.readouterr().err


def test_a_draft_model_with_other_words_for_the_same_ids_is_refused(model_path, tmp_path):
    other = save_tiny_chat_model(tmp_path / "other")
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the vocabularies differ: 'a' is"):
        load(model_path, model=str(other))
