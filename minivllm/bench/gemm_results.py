"""Recorded speeds of matrix products, as a figure wants them: an entry a format and shape, ours beside the libraries.

`python -m minivllm bench gemm` names its measurements gemm_FAMILY_mM_nN_kK/IMPLEMENTATION, such as
gemm_fp8_block_m4096_n2112_k7168/deep_gemm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minivllm.bench.result_file import RESULTS, Measurement, ResultFile, load

OURS = "minivllm"
_BLOCK = 128


@dataclass(frozen=True)
class GemmSpeed:
    """One product as it was measured; speeds in TFLOP/s."""

    family: str
    """bf16, fp8_block, fp8_token or int8."""
    m: int
    n: int
    k: int
    ours: float
    peers: dict[str, float]
    relative_error: float
    """Of ours, against the product of the operands before they were quantised."""
    recorded: str
    """What has to stand under a figure or table that shows it: the file's subtitle."""

    @property
    def intensity(self) -> float:
        """FLOP for each byte of operands, scales and result, each moved once."""
        return 2 * self.m * self.n * self.k / product_bytes(self.family, self.m, self.n, self.k)

    @property
    def best_peer(self) -> str | None:
        """The fastest library that took the shape with the same format, None if there was none."""
        return max(self.peers, key=lambda name: self.peers[name], default=None)


def product_bytes(family: str, m: int, n: int, k: int) -> int:
    """Operands and scales read once, a result in bfloat16 written once."""
    if family == "bf16":
        return 2 * (m * k + n * k + m * n)
    scales = m * -(-k // _BLOCK) + -(-n // _BLOCK) * -(-k // _BLOCK) if family == "fp8_block" else m + n
    return m * k + n * k + 2 * m * n + 4 * scales


def load_gemm_results(folder: Path = RESULTS) -> list[ResultFile]:
    """All recorded runs of `bench gemm`, the latest first; an empty list where there is none."""
    results = [load(path) for path in sorted(folder.glob("gemm_*.json"))]
    return sorted(results, key=lambda result: result.time_utc, reverse=True)


def gemm_speeds(results: Sequence[ResultFile]) -> list[GemmSpeed]:
    """Every product that was measured; the first run that has it counts.

    cuBLAS with one scale a matrix is measured beside the block-scaled products, but is another format: no peer.
    """
    speeds: dict[str, GemmSpeed] = {}
    for result in results:
        by_case: dict[str, dict[str, Measurement]] = {}
        for measurement in result.measurements:
            case, _, implementation = measurement.name.partition("/")
            by_case.setdefault(case, {})[implementation] = measurement
        for case, found in by_case.items():
            ours, shapes = found[OURS], found[OURS].shapes
            speed = GemmSpeed(
                family=case.removeprefix("gemm_").rpartition("_m")[0],
                m=shapes["m"],
                n=shapes["n"],
                k=shapes["k"],
                ours=ours.median,
                peers={name: m.median for name, m in found.items() if name not in (OURS, "cublas_fp8")},
                relative_error=ours.extra["relative_error"],
                recorded=result.subtitle(),
            )
            speeds.setdefault(case, speed)
    return list(speeds.values())
