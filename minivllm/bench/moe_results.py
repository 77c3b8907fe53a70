"""Recorded times of a layer's experts, as a figure wants them: an entry a format and shape, ours beside the libraries.

`python -m minivllm bench moe` names its measurements moe_FAMILY_tT_eE_kK_hH_iI/IMPLEMENTATION, such as
moe_bf16_t64_e128_k8_h2048_i768/vllm_fused_moe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minivllm.bench.result_file import RESULTS, Measurement, ResultFile, load

OURS = "minivllm"


@dataclass(frozen=True)
class MoeTime:
    """One layer at one number of tokens, as it was measured; times in microseconds."""

    family: str
    """bf16 or fp8_block."""
    num_tokens: int
    num_experts: int
    top_k: int
    hidden: int
    width: int
    ours: float
    peers: dict[str, float]
    recorded: str
    """What has to stand under a figure or table that shows it: the file's subtitle."""

    @property
    def flops(self) -> int:
        """Gate, up and down of each pair."""
        return 6 * self.num_tokens * self.top_k * self.hidden * self.width

    def speedup(self, peer: str) -> float | None:
        """The peer's time over ours, above 1 where ours is faster; None if the peer was not measured."""
        return self.peers[peer] / self.ours if peer in self.peers else None


def load_moe_results(folder: Path = RESULTS) -> list[ResultFile]:
    """All recorded runs of `bench moe`, the latest first; an empty list where there is none."""
    results = [load(path) for path in sorted(folder.glob("moe_*.json"))]
    return sorted(results, key=lambda result: result.time_utc, reverse=True)


def moe_times(results: Sequence[ResultFile]) -> list[MoeTime]:
    """Every layer that was measured, in the order of the file; the first run that has it counts."""
    times: dict[str, MoeTime] = {}
    for result in results:
        by_case: dict[str, dict[str, Measurement]] = {}
        for measurement in result.measurements:
            case, _, implementation = measurement.name.partition("/")
            by_case.setdefault(case, {})[implementation] = measurement
        for case, found in by_case.items():
            microseconds = {name: m.extra["microseconds"] for name, m in found.items()}
            family = case.removeprefix("moe_").rpartition("_t")[0]
            ours = microseconds.pop(OURS)
            times.setdefault(case, MoeTime(family, **found[OURS].shapes, ours=ours, peers=microseconds,
                                           recorded=result.subtitle()))  # fmt: skip
    return list(times.values())
