"""`bench engine` from the command line, on a model so small that only the plumbing takes time."""

import pytest

from minivllm.bench.result_file import load
from minivllm.bench.workloads import QWEN3_0_6B
from minivllm.cli import main

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Directory of a Llama with random weights, the same for both engines."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    # Larger than usual, so that the most likely token stands out and rounding does not choose another.
    LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.5)).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def one_thread():
    """A tiny model gains nothing by a second thread, and loses much where the machine is busy."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bench(*options: object) -> int:
    return main(["bench", "engine", "--device", "cpu", "--threads", "1", *map(str, options)])


def test_bench_alone_prints_a_table_and_writes_a_result(tiny, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ("--model", tiny, "--load-format", "dummy", "--num-requests", 2, "--warmup", 0, "--repeats", 2)
    assert bench(*options, "--no-memory", "--json", out) == 0
    table = capsys.readouterr().out
    assert "minivllm" in table
    assert "transformers" not in table
    result = load(out)
    measurement = result.measurement("minivllm")
    assert (result.benchmark, result.device) == ("engine_mixed", "cpu")
    assert (measurement.warmup, measurement.repeats, measurement.dtype) == (0, 2, "float32")
    assert measurement.shapes["num_requests"] == 2
    assert measurement.peak_memory_bytes is None
    assert result.extra["comparison"] is None
    assert "engine/scheduler.py" in result.code.sources
    assert not any(name.startswith("bench/") for name in result.code.sources)


def test_bench_with_transformers_gives_both_the_same_tokens_and_counts_padding(tiny, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ("--model", tiny, "--num-requests", 4, "--warmup", 0, "--repeats", 1, "--peer", "transformers")
    assert bench(*options, "--batch-size", 2, "--no-memory", "--json", out) == 0
    assert "4 of 4 outputs identical" in capsys.readouterr().out
    result = load(out)
    comparison = result.extra["comparison"]
    ours = result.measurement("minivllm")
    peers = [result.measurement(f"transformers_{cache}") for cache in ("dynamic", "static")]
    assert comparison["throughput_ratio"] == pytest.approx(ours.median / max(peer.median for peer in peers))
    useful = ours.shapes["prompt_tokens"] + ours.shapes["output_tokens"] - 4
    assert ours.extra["rows"] == useful
    assert all(peer.extra["rows"] > useful for peer in peers)


def test_peak_memory_is_that_of_a_process_of_its_own(tiny, tmp_path):
    from minivllm.bench.memory import process_peak

    ballast = bytearray(1)
    before = process_peak()
    ballast = bytearray(before)
    assert process_peak() > before + len(ballast) // 2
    out = tmp_path / "out.json"
    assert bench("--model", tiny, "--num-requests", 1, "--warmup", 0, "--repeats", 1, "--json", out) == 0
    assert 50 * 2**20 < load(out).measurements[0].peak_memory_bytes < process_peak() * 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-requests", 0), "--num-requests must be at least 1, not 0"),
        (("--repeats", 0), "--repeats must be at least 1, not 0"),
        (("--warmup", -1), "--warmup must be at least 0, not -1"),
        (("--threads", 0), "--threads must be at least 1, not 0"),
        (("--json", "no/such/directory/out.json"), "there is no such directory"),
        (("--model", "no-such-model"), "unknown model 'no-such-model'"),
        (("--attention-backend", "fast", "--num-requests", 1), "attention_backend must be one of"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(tiny, capsys, options, message):
    model = () if "--model" in options else ("--model", tiny)
    assert bench(*model, "--no-memory", *options) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("minivllm: error: ")
    assert message in error


def test_vllm_is_refused_where_it_is_not_installed(tiny, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench("--model", tiny, "--peer", "vllm") == 2
    assert "needs the package vllm, which is not installed here" in capsys.readouterr().err


def test_a_directory_without_config_is_refused(tmp_path, capsys):
    assert bench("--model", tmp_path) == 2
    assert "holds no config.json" in capsys.readouterr().err


def test_yardstick_needs_no_model_on_disk(tmp_path, monkeypatch):
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "vocab_size": 128}
    for name, value in {**small, "num_attention_heads": 2, "num_key_value_heads": 1}.items():
        monkeypatch.setitem(QWEN3_0_6B, name, value)
    out = tmp_path / "out.json"
    options = ("--workload", "yardstick", "--num-requests", 1, "--warmup", 0, "--repeats", 1, "--no-memory")
    assert bench(*options, "--json", out) == 0
    result = load(out)
    assert (result.benchmark, result.extra["load_format"]) == ("engine_yardstick", "dummy")
    assert result.measurements[0].dtype == "bfloat16"
    assert result.measurements[0].shapes["num_hidden_layers"] == 1
