"""Recorded kernel speeds are read as they were written, beside their best peer, with their provenance."""

from pathlib import Path

import pytest

from minivllm.bench.environment import Code, Environment
from minivllm.bench.kernel_results import kernel_speeds, load_kernel_results
from minivllm.bench.result_file import Measurement, ResultFile

ENVIRONMENT = Environment("a CPU", 1, "Linux", "3.11", "2.11", "3.6", "5.17", "NVIDIA H200", "570.1", "12.8")
CODE = Code("0123456789abcdef", False, ["attention/flash.py"], "a hash")
FLASH = ("flash_b4_s4096_h32_8_d128", {"batch": 4, "length": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128})
PAGED = ("paged_b64_c4096_h32_8_p16", {"batch": 64, "context": 4096, "heads": 32, "kv_heads": 8, "block_size": 16})
MLA = ("mla_b128_q2_h128_c4096", {"batch": 128, "s_q": 2, "heads": 128, "context": 4096, "block_size": 64})
MLA_FP8 = ("mla_b128_q1_h16_c4096_fp8", {"batch": 128, "s_q": 1, "heads": 16, "context": 4096, "block_size": 64})


def measured(shape: tuple, implementation: str, speed: float, unit: str, microseconds: float = 1000.0) -> Measurement:
    case, shapes = shape
    extra = {"microseconds": microseconds, "relative_error": 0.001}
    name = f"{case}/{implementation}"
    return Measurement.from_samples(name, [speed], shapes=shapes, dtype="bfloat16", unit=unit, warmup=5, extra=extra)


def recorded(*measurements: Measurement, day: str = "01") -> ResultFile:
    ceilings = {"ceilings": {"GB/s": 4600.0, "TFLOP/s": 700.0}}
    time = f"2026-01-{day}T12:00:00Z"
    return ResultFile("kernels_all", "cuda", ENVIRONMENT, CODE, "bench kernels", time, list(measurements), ceilings)


def test_without_recorded_files_there_are_no_speeds(tmp_path: Path):
    assert load_kernel_results(tmp_path) == []
    assert kernel_speeds([]) == []


def test_files_are_loaded_latest_first_and_others_are_left_alone(tmp_path: Path):
    for name, day in (("kernels_flash", "01"), ("kernels_paged", "03"), ("engine_mixed", "05")):
        recorded(measured(FLASH, "minivllm", 480.0, "TFLOP/s"), day=day).save(tmp_path / f"{name}.json")
    assert [result.time_utc[8:10] for result in load_kernel_results(tmp_path)] == ["03", "01"]


def test_the_best_peer_stands_beside_ours():
    result = recorded(
        measured(FLASH, "FA2", 300.0, "TFLOP/s"),
        measured(FLASH, "minivllm", 490.0, "TFLOP/s"),
        measured(FLASH, "FA3", 560.0, "TFLOP/s"),
        measured(PAGED, "minivllm", 4140.0, "GB/s"),
    )
    flash, paged = kernel_speeds([result])
    assert (flash.ours, flash.peer, flash.peer_speed, flash.unit) == (490.0, "FA3", 560.0, "TFLOP/s")
    assert (paged.ours, paged.peer, paged.peer_speed) == (4140.0, None, None)
    assert flash.share_of_ceiling == pytest.approx(0.7) and paged.share_of_ceiling == pytest.approx(0.9)
    assert flash.recorded == result.subtitle() and "NVIDIA H200" in flash.recorded


def test_of_two_runs_the_first_that_has_a_shape_counts():
    new = recorded(measured(FLASH, "minivllm", 500.0, "TFLOP/s"), day="03")
    old = recorded(measured(FLASH, "minivllm", 400.0, "TFLOP/s"), measured(MLA, "minivllm", 300.0, "TFLOP/s"))
    flash, mla = kernel_speeds([new, old])
    assert (flash.ours, mla.ours) == (500.0, 300.0)
    assert "2026-01-03" in flash.recorded and "2026-01-01" in mla.recorded


def test_families_come_in_the_order_of_the_chapters():
    shapes = [(MLA, "TFLOP/s"), (PAGED, "GB/s"), (FLASH, "TFLOP/s")]
    result = recorded(*(measured(shape, "minivllm", 100.0, unit) for shape, unit in shapes))
    assert [speed.family for speed in kernel_speeds([result])] == ["flash", "paged", "mla"]


@pytest.mark.parametrize(
    ("shape", "unit", "flops", "num_bytes"),
    [
        (FLASH, "TFLOP/s", 4 * 32 * 4096**2 * 256, 4 * 2 * 4096 * (32 + 8) * 256),
        (PAGED, "GB/s", 64 * 2 * 32 * 4096 * 256, 64 * 4096 * 8 * 256 * 2),
        (MLA, "TFLOP/s", 128 * 2 * 2 * 128 * 4096 * 1088, 128 * 4096 * 1152),
        (MLA_FP8, "GB/s", 128 * 2 * 16 * 4096 * 1088, 128 * 4096 * 656),
    ],
)
def test_the_work_of_a_shape_is_that_of_its_whole_batch(shape, unit, flops, num_bytes):
    (speed,) = kernel_speeds([recorded(measured(shape, "minivllm", 100.0, unit, microseconds=500.0))])
    assert (speed.work.flops, speed.work.num_bytes) == (flops, num_bytes)
    assert speed.flops_per_second == pytest.approx(flops / 500e-6)


def test_a_shape_is_told_in_words():
    units = {"flash": "TFLOP/s", "paged": "GB/s", "mla": "GB/s"}
    shapes = (FLASH, PAGED, MLA, MLA_FP8)
    result = recorded(*(measured(shape, "minivllm", 1.0, units[shape[0].partition("_")[0]]) for shape in shapes))
    assert [speed.label for speed in kernel_speeds([result])] == [
        "prompt 4 x 4,096, heads 32/8, D 128",
        "decode 64 x 4,096, heads 32/8, page 16",
        "decode 128 x 4,096, 128 heads, 2 tokens",
        "decode 128 x 4,096, 16 heads, FP8",
    ]
