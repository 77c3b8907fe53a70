"""Recorded speeds of the three attention kernels, as a figure wants them: one entry a shape, ours beside the best peer.

`python -m minivllm bench kernels` names its measurements shape/implementation, such as flash_b4_s4096_h32_8_d128/FA3.
The operations and bytes of a shape follow from its sizes (kv_calculator.py), so every entry has a place under the
roofline, whatever unit it was quoted in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minivllm.bench.kv_calculator import BFLOAT16, FP8, AttentionShape, Work, flash_prefill, mla_decode, paged_decode
from minivllm.bench.result_file import RESULTS, Measurement, ResultFile, load

OURS = "minivllm"
FAMILIES = ("flash", "paged", "mla")
_DEEPSEEK = AttentionShape(1, 128, 128, 192, 128, latent_dim=512, rope_dim=64)
_PAGED_HEAD_DIM = 128


@dataclass(frozen=True)
class KernelSpeed:
    """One shape as it was measured; speeds in `unit`."""

    case: str
    family: str
    """flash, paged or mla."""
    label: str
    """The shape in words."""
    unit: str
    ours: float
    ceiling: float
    """What this GPU reached in the same run: a read of memory in GB/s, a large product in TFLOP/s."""
    peer: str | None
    """The fastest peer that took the shape, None if there was none."""
    peer_speed: float | None
    work: Work
    """Of the whole batch."""
    microseconds: float
    recorded: str
    """What has to stand under a figure or table that shows it: the file's subtitle."""

    @property
    def flops_per_second(self) -> float:
        return self.work.flops / self.microseconds * 1e6

    @property
    def share_of_ceiling(self) -> float:
        return self.ours / self.ceiling


def load_kernel_results(folder: Path = RESULTS) -> list[ResultFile]:
    """All recorded runs of `bench kernels`, the latest first; an empty list where there is none."""
    results = [load(path) for path in sorted(folder.glob("kernels_*.json"))]
    return sorted(results, key=lambda result: result.time_utc, reverse=True)


def kernel_speeds(results: Sequence[ResultFile]) -> list[KernelSpeed]:
    """Every shape that was measured, flash before paged before mla; the first run that has it counts."""
    speeds: dict[str, KernelSpeed] = {}
    for result in results:
        by_case: dict[str, dict[str, Measurement]] = {}
        for measurement in result.measurements:
            case, _, implementation = measurement.name.partition("/")
            by_case.setdefault(case, {})[implementation] = measurement
        for case, found in by_case.items():
            speeds.setdefault(case, _speed(case, found, result))
    return sorted(speeds.values(), key=lambda speed: FAMILIES.index(speed.family))


def _speed(case: str, found: dict[str, Measurement], result: ResultFile) -> KernelSpeed:
    ours = found[OURS]
    peers = {name: m.median for name, m in found.items() if name != OURS}
    peer = max(peers, key=lambda name: peers[name], default=None)
    family = case.partition("_")[0]
    one = _work(family, ours.shapes, FP8 if case.endswith("_fp8") else BFLOAT16)
    batch = ours.shapes["batch"]
    return KernelSpeed(
        case=case,
        family=family,
        label=_label(family, ours.shapes, case.endswith("_fp8")),
        unit=ours.unit,
        ours=ours.median,
        ceiling=result.extra["ceilings"][ours.unit],
        peer=peer,
        peer_speed=None if peer is None else peers[peer],
        work=Work(batch * one.flops, batch * one.num_bytes),
        microseconds=ours.extra["microseconds"],
        recorded=result.subtitle(),
    )


def _work(family: str, shapes: dict[str, int], cache: str) -> Work:
    """Of one request, from the sizes that `bench kernels` records."""
    if family == "mla":
        return mla_decode(_DEEPSEEK, shapes["context"], shapes["s_q"], shapes["heads"], cache)
    d = shapes.get("head_dim", _PAGED_HEAD_DIM)
    shape = AttentionShape(1, shapes["heads"], shapes["kv_heads"], d, d)
    return flash_prefill(shape, shapes["length"]) if family == "flash" else paged_decode(shape, shapes["context"])


def _label(family: str, shapes: dict[str, int], fp8: bool) -> str:
    if family == "flash":
        heads = f"heads {shapes['heads']}/{shapes['kv_heads']}"
        return f"prompt {shapes['batch']} x {shapes['length']:,}, {heads}, D {shapes['head_dim']}"
    size = f"decode {shapes['batch']} x {shapes['context']:,}"
    if family == "paged":
        return f"{size}, heads {shapes['heads']}/{shapes['kv_heads']}, page {shapes['block_size']}"
    tokens = f", {shapes['s_q']} tokens" if shapes["s_q"] > 1 else ""
    return f"{size}, {shapes['heads']} heads{tokens}{', FP8' if fp8 else ''}"
