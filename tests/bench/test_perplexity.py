"""`bench perplexity`: windows, losses, the paired increase, and what the committed files must say."""

import json
import math

import pytest
import torch
from tiny_chat_model import save_tiny_chat_model

from minivllm import LLM
from minivllm.bench import perplexity
from minivllm.bench.result_file import RESULTS, load
from minivllm.cli import main
from minivllm.layers.quantization import FORMATS

TEXT = "The king had three daughters, and the youngest was so fair that the sun itself was astonished. " * 3
RECORDED = sorted(RESULTS.glob("perplexity_*.json"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_chat_model(tmp_path_factory.mktemp("perplexity") / "tiny")


def test_the_schemes_are_the_dtypes_and_every_quantization():
    assert tuple(FORMATS) == perplexity.QUANTIZATIONS
    assert ("float32", "bfloat16", *FORMATS) == perplexity.SCHEMES


def test_windows_lie_evenly_over_the_text_and_share_no_token():
    windows = perplexity.cut_windows(list(range(103)), context=10, num_windows=4)
    assert [window[0] for window in windows] == [0, 25, 51, 77]
    assert all(len(window) == 10 for window in windows)
    assert len({token for window in windows for token in window}) == 40
    with pytest.raises(ValueError, match="11 windows of 10 tokens need 110, the text has 103"):
        perplexity.cut_windows(list(range(103)), context=10, num_windows=11)


def test_the_loss_of_a_window_is_that_of_the_model_in_transformers(model):
    from transformers import AutoModelForCausalLM

    llm = LLM(str(model), dtype="float32")
    windows = perplexity.cut_windows(llm.tokenizer.encode(TEXT), context=24, num_windows=3)
    losses = perplexity.window_losses(llm, windows)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor(windows)
    with torch.inference_mode():
        wanted = torch.nn.functional.cross_entropy(
            reference(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        ).mean(1)
    assert losses == pytest.approx(wanted.tolist(), rel=1e-4)


def test_the_increase_is_of_pairs():
    increase, error = perplexity.relative_increase([1.1, 3.1, 2.1], [1.0, 3.0, 2.0])
    assert increase == pytest.approx(math.exp(0.1) - 1) and error == pytest.approx(0, abs=1e-12)
    increase, error = perplexity.relative_increase([1.0, 1.2], [1.0, 1.0])
    assert increase == pytest.approx(math.exp(0.1) - 1)
    assert error == pytest.approx(math.exp(0.1) * 0.1)


def test_every_scheme_is_measured_and_written(model, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "perplexity.json"
    text.write_text(TEXT)
    options = [f"--text={text}", f"--model={model}", "--context=16", "--windows=4", "--limit=0.5", f"--json={out}"]
    assert main(["bench", "perplexity", *options]) == 0
    result = load(out)
    assert [m.name for m in result.measurements] == [f"tiny/{scheme}" for scheme in perplexity.SCHEMES]
    assert result.measurement("tiny/bfloat16").extra["relative_increase"] == 0
    quantized = [result.measurement(f"tiny/{scheme}") for scheme in FORMATS]
    plain = result.measurement("tiny/bfloat16").median
    assert all(m.median == pytest.approx(plain * (1 + m.extra["relative_increase"])) for m in quantized)
    # 64 and 96 inputs are no multiples of 128: fp8_block leaves all eight linear layers as they are.
    assert [len(m.extra["not_quantized"]) for m in quantized] == [0, 8, 0]
    assert quantized[1].extra["relative_increase"] == 0 != quantized[0].extra["relative_increase"]
    assert "every format is within 50%" in capsys.readouterr().out
    assert TEXT[:40] not in out.read_text() and len(result.extra["text"]["sha256"]) == 64


def test_a_format_that_costs_more_than_the_limit_fails_the_run(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = [f"--text={text}", f"--model={model}", "--context=16", "--windows=4", "--limit=-0.9"]
    assert main(["bench", "perplexity", *options]) == 1
    assert "a format costs more than" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text=nowhere.txt"], "--text nowhere.txt cannot be read"),
        (["--text=pyproject.toml", "--context=1"], "--context must be at least 2, not 1"),
        (["--text=pyproject.toml", "--windows=1"], "--windows must be at least 2, not 1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, message, capsys):
    assert main(["bench", "perplexity", *options]) == 2
    assert message in capsys.readouterr().err


MUST_HOLD = {
    "smollm2-135m": ("fp8", "int8"),
    "tiny-deepseek": ("fp8", "fp8_block"),
    "tiny-qwen3": ("fp8", "fp8_block", "int8"),
}


def test_the_models_that_must_hold_are_recorded():
    assert {path.stem.removeprefix("perplexity_") for path in RECORDED} >= set(MUST_HOLD)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_formats_stay_within_three_per_cent_of_bfloat16(path):
    result = load(path)
    name = result.benchmark.removeprefix("perplexity_")
    for scheme in MUST_HOLD[name]:
        assert result.measurement(f"{name}/{scheme}").extra["relative_increase"] <= 0.03
    assert result.measurement(f"{name}/bfloat16").shapes["predicted_tokens"] >= 8_000
    assert "fairy" not in json.dumps(result.extra)
