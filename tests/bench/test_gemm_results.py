"""Recorded products: names, bytes by hand, peers, and which of two files counts."""

import dataclasses

import pytest

from minivllm.bench.environment import Code, Environment
from minivllm.bench.gemm_results import GemmSpeed, gemm_speeds, load_gemm_results, product_bytes
from minivllm.bench.result_file import Measurement, ResultFile


def environment() -> Environment:
    gpu = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0"}
    return Environment("a CPU", 2, "Linux", "3.11", "2.11.0", "3.6.0", None, **gpu)


def measured(name: str, tflops: float, m: int, n: int, k: int) -> Measurement:
    extra = {"relative_error": 0.03, "microseconds": 1.0}
    shapes = {"m": m, "n": n, "k": k}
    return Measurement.from_samples(name, [tflops], shapes=shapes, dtype="x", unit="TFLOP/s", warmup=0, extra=extra)


def result(time_utc: str, tflops: float) -> ResultFile:
    case = "gemm_fp8_block_m4096_n2112_k7168"
    speeds = {"minivllm": tflops, "deep_gemm": 1138.0, "cublas_fp8": 1164.0}
    found = [measured(f"{case}/{name}", speed, 4096, 2112, 7168) for name, speed in speeds.items()]
    found.append(measured("gemm_bf16_m64_n2112_k7168/minivllm", 100.0, 64, 2112, 7168))
    code = Code("0123456789abcdef", False, [], "hash")
    return ResultFile("gemm_all", "cuda", environment(), code, "python -m minivllm bench gemm", time_utc, found)


def test_bytes_by_hand():
    assert product_bytes("bf16", 2, 3, 5) == 2 * (10 + 15 + 6)
    assert product_bytes("int8", 2, 3, 5) == product_bytes("fp8_token", 2, 3, 5) == 10 + 15 + 12 + 4 * 5
    assert product_bytes("fp8_block", 2, 130, 256) == 512 + 130 * 256 + 2 * 260 + 4 * (2 * 2 + 2 * 2)


def test_the_latest_file_counts_and_another_format_is_no_peer(tmp_path):
    for name, time_utc, tflops in (
        ("gemm_a", "2026-12-01T00:00:00Z", 900.0),
        ("gemm_b", "2026-12-02T00:00:00Z", 1200.0),
    ):
        result(time_utc, tflops).save(tmp_path / f"{name}_h200.json")
    block, bf16 = gemm_speeds(load_gemm_results(tmp_path))
    assert (block.family, block.m, block.n, block.k, block.ours) == ("fp8_block", 4096, 2112, 7168, 1200.0)
    assert block.peers == {"deep_gemm": 1138.0} and block.best_peer == "deep_gemm"
    assert "NVIDIA H200" in block.recorded and "2026-12-02" in block.recorded
    assert (bf16.family, bf16.peers, bf16.best_peer) == ("bf16", {}, None)


def test_intensity_is_flop_over_bytes():
    speed = GemmSpeed("bf16", 8192, 8192, 8192, 1.0, {}, 0.0, "")
    assert speed.intensity == pytest.approx(8192 / 3)
    assert dataclasses.replace(speed, family="int8").intensity == pytest.approx(8192 / 2, rel=1e-3)


def test_without_files_there_is_nothing(tmp_path):
    assert load_gemm_results(tmp_path) == [] and gemm_speeds([]) == []
