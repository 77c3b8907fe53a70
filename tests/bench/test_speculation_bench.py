"""`bench speculation` and `bench speculation-equality`, on the tiny models that ship with the package."""

import itertools

import pytest
import torch

import minivllm.sample.rejection as rejection
from minivllm.bench import speculation_equality
from minivllm.bench.result_file import load
from minivllm.bench.speculation_equality import CHUNK_SIZES, CONDITIONS, Outcome, Preempter
from minivllm.bench.speculation_prompts import PARAGRAPH, copies, greedy_answers, stories, wide_margin_prompts
from minivllm.cli import main
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams

TARGET, DRAFT, MTP_TARGET = "tiny-qwen3", "tiny-qwen3-draft", "tiny-deepseek"
DRAFTERS = {
    "ngram": ("--model", TARGET, "--method", "ngram"),
    "draft_model": ("--model", TARGET, "--method", "draft_model", "--draft-model", DRAFT),
    "mtp": ("--model", MTP_TARGET, "--method", "mtp"),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm():
    return LLM(TARGET, dtype="float32", device="cpu", num_gpu_blocks_override=256, enable_prefix_caching=False)


def bench(command: str, *options: object) -> int:
    return main(["bench", command, "--device", "cpu", *map(str, options)])


def wrong_emit(*arguments):
    """A rejection sampler that accepts every draft there is."""
    _, draft_ids, *rest = arguments
    return EMIT(draft_ids >= 0, draft_ids, *rest)


EMIT = rejection.emit


@pytest.mark.parametrize("method", DRAFTERS)
def test_the_ratio_is_made_of_tokens_a_step_and_seconds_a_step(method, tmp_path, capsys):
    out, counts = tmp_path / "out.json", ("--k", 1, 3, "--batch-sizes", 1, 3, "--num-tokens", 12)
    assert bench("speculation", *DRAFTERS[method], *counts, "--repeats", 2, "--warmup", 0, "--json", out) == 0
    assert "float32: 9 of 9 outputs identical to plain decoding's" in capsys.readouterr().out
    result = load(out)
    assert result.benchmark == f"speculation_{method}"
    assert result.extra["identical_outputs_float32"] == {"0": 3, "1": 3, "3": 3}
    assert result.extra["least_margin_float32"] > 1e-3
    names = [f"{name}, batch {size}" for size in (1, 3) for name in ("plain", "k = 1", "k = 3")]
    assert [measurement.name for measurement in result.measurements] == names
    for measurement in result.measurements:
        extra, size = measurement.extra, measurement.shapes["batch_size"]
        plain = result.measurement(f"plain, batch {size}")
        assert measurement.shapes["output_tokens"] == 12 * size
        assert extra["ratio"] == pytest.approx(measurement.median / plain.median, rel=0.2)
        assert extra["ratio"] == pytest.approx(plain.extra["steps"] / extra["steps"] / extra["step_cost"])
        assert len(extra["acceptance_by_position"]) <= extra["k"]
        assert all(0 <= share <= 1 for share in extra["acceptance_by_position"])
        assert plain.extra["steps"] == 12
        assert extra["steps"] <= 12
    assert "speculate/proposer.py" in result.code.sources


def test_a_verification_that_accepts_too_much_is_noticed(monkeypatch, capsys):
    monkeypatch.setattr(rejection, "emit", wrong_emit)
    options = ("--k", 2, "--num-tokens", 16, "--repeats", 1, "--warmup", 0, "--batch-sizes", 4)
    assert bench("speculation", *DRAFTERS["mtp"], *options) == 1
    assert "8 of 8" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*DRAFTERS["mtp"], "--k", 0), "--k must be at least 1, not 0"),
        ((*DRAFTERS["mtp"], "--batch-sizes", 4, 0), "--batch-sizes must be at least 1, not 0"),
        ((*DRAFTERS["mtp"], "--repeats", 0), "--repeats must be at least 1, not 0"),
        ((*DRAFTERS["mtp"], "--draft-model", DRAFT), "the other methods have none"),
        (DRAFTERS["draft_model"][:4], "--method draft_model needs --draft-model"),
        ((*DRAFTERS["mtp"], "--json", "no/such/directory/out.json"), "there is no such directory"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(options, message, capsys):
    assert bench("speculation", *options) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_margins_are_those_of_the_logits_that_were_sampled_from(llm):
    prompts = stories()[:3]
    answers = greedy_answers(llm, prompts, 10)
    sampler, margins = llm.model_runner.sampler, []

    def recorded(logits, metadata):
        best_two = logits.topk(2).values[0]
        margins.append((best_two[0] - best_two[1]).item())
        return sampler(logits, metadata)

    llm.model_runner.sampler = recorded
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        margins.clear()
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == answer.token_ids
        assert min(margins) == pytest.approx(answer.margin, abs=1e-4)
    llm.model_runner.sampler = sampler


def test_prompts_with_a_close_call_are_left_out(llm):
    answers = greedy_answers(llm, stories()[:6], 10)
    between = sorted(answer.margin for answer in answers)[2]
    wide = wide_margin_prompts(llm, stories()[:6], 10, least=between)
    assert [answer.prompt_token_ids for answer in wide] == [a.prompt_token_ids for a in answers if a.margin > between]
    with pytest.raises(ValueError, match="only 3 of 6 prompts have no close call"):
        wide_margin_prompts(llm, stories()[:6], 10, between, count=4)


def test_prompts_are_all_different_and_a_copy_holds_what_is_to_be_copied():
    assert len(set(stories())) == len(stories()) >= 100
    assert all(PARAGRAPH in conversation[0]["content"] for conversation in copies())


def test_every_two_settings_of_any_two_conditions_meet():
    settings = (CHUNK_SIZES, (False, True), (False, True), (False, True))
    for first, second in itertools.combinations(range(4), 2):
        met = {(condition[first], condition[second]) for condition in CONDITIONS}
        assert met == set(itertools.product(settings[first], settings[second]))


@pytest.mark.parametrize("method", DRAFTERS)
def test_some_of_the_matrix_holds(method, monkeypatch, tmp_path, capsys):
    few = [(method, k, condition) for k, condition in zip((0, 3, 5), CONDITIONS[1::2], strict=True)]
    monkeypatch.setattr(speculation_equality, "configurations", lambda: iter(few))
    out = tmp_path / "out.json"
    assert bench("speculation-equality", "--num-prompts", 3, "--num-tokens", 16, "--json", out) == 0
    assert "all configurations hold" in capsys.readouterr().out
    result = load(out)
    assert result.extra["all_hold"] and min(result.extra["least_margin_float32"].values()) > 1e-3
    assert [m.extra["k"] for m in result.measurements] == [0, 3, 5]
    assert all(m.extra["num_preemptions"] > 0 for m in result.measurements if m.shapes["preempted"])


def test_the_matrix_notices_a_verification_that_accepts_too_much(monkeypatch, capsys):
    monkeypatch.setattr(rejection, "emit", wrong_emit)
    monkeypatch.setattr(speculation_equality, "configurations", lambda: iter([("draft_model", 3, CONDITIONS[0])]))
    assert bench("speculation-equality", "--num-prompts", 3, "--num-tokens", 16) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "spoiled",
    [{"num_equal": 4}, {"num_preemptions": 0}, {"num_cached_tokens": 0}, {"drafts": {"num_verifications": 0}}],
)
def test_a_condition_that_did_not_come_about_does_not_hold(spoiled):
    good = {"num_equal": 5, "num_outputs": 5, "num_preemptions": 2, "num_cached_tokens": 8}
    good["drafts"] = {"num_verifications": 3}
    assert Outcome(**good).holds(3, CONDITIONS[1])
    assert not Outcome(**{**good, **spoiled}).holds(3, CONDITIONS[1])


def test_everybody_is_preempted_again_and_again_and_gets_on(llm):
    preempter = Preempter(llm.engine.scheduler)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(stories()[:4], params, use_tqdm=False)
    del llm.engine.scheduler.schedule
    assert all(len(output.outputs[0].token_ids) == 20 for output in outputs)
    assert preempter.num_preemptions >= 4 * 2
