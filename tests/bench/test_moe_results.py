"""Recorded layers of experts: names, peers, work by hand, and which of two files counts."""

import pytest

from minivllm.bench.environment import Code, Environment
from minivllm.bench.moe_results import load_moe_results, moe_times
from minivllm.bench.result_file import Measurement, ResultFile

SHAPES = {"num_tokens": 64, "num_experts": 128, "top_k": 8, "hidden": 2048, "width": 768}


def result(time_utc: str, ours: float) -> ResultFile:
    gpu = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0"}
    environment = Environment("a CPU", 2, "Linux", "3.11", "2.11.0", "3.6.0", None, **gpu)
    times = {
        "bf16": {"minivllm": ours, "vllm_fused_moe": 320.0, "torch_grouped": 500.0},
        "fp8_block": {"minivllm": 150.0},
    }
    found = [
        Measurement.from_samples(
            f"moe_{family}_t64_e128_k8_h2048_i768/{name}", [1.0], shapes=SHAPES, dtype="x", unit="TFLOP/s", warmup=0,
            extra={"microseconds": microseconds},
        )
        for family, calls in times.items()
        for name, microseconds in calls.items()
    ]  # fmt: skip
    return ResultFile("moe_all", "cuda", environment, Code("0123456789abcdef", False, [], "hash"), "x", time_utc, found)


def test_the_latest_file_counts_and_peers_are_told_apart(tmp_path):
    for name, time_utc, ours in (("moe_a", "2026-12-01T00:00:00Z", 400.0), ("moe_b", "2026-12-02T00:00:00Z", 160.0)):
        result(time_utc, ours).save(tmp_path / f"{name}_h200.json")
    bf16, block = moe_times(load_moe_results(tmp_path))
    assert (bf16.family, bf16.num_tokens, bf16.num_experts, bf16.ours) == ("bf16", 64, 128, 160.0)
    assert bf16.peers == {"vllm_fused_moe": 320.0, "torch_grouped": 500.0}
    assert bf16.speedup("vllm_fused_moe") == pytest.approx(2.0)
    assert (block.family, block.ours, block.peers, block.speedup("vllm_fused_moe")) == ("fp8_block", 150.0, {}, None)
    assert "NVIDIA H200" in bf16.recorded and "2026-12-02" in bf16.recorded


def test_the_work_is_three_products_a_pair(tmp_path):
    result("2026-12-01T00:00:00Z", 400.0).save(tmp_path / "moe_a_h200.json")
    assert moe_times(load_moe_results(tmp_path))[0].flops == 2 * 3 * (64 * 8) * 2048 * 768


def test_without_files_there_is_nothing(tmp_path):
    assert load_moe_results(tmp_path) == [] and moe_times([]) == []
