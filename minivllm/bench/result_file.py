"""Result files: measurements that carry their provenance, as JSON.

    samples -> Measurement.from_samples -> ResultFile.record -> save -> results/*.json
                                                                 load -> a plot, with `subtitle()` under it

A number without its machine, command and code is no result: `save` and `load` refuse a file that lacks any of it, and
whoever shows a recorded number shows `subtitle()` with it. `is_outdated()` says that the code has changed since.
"""

import dataclasses
import json
import math
import statistics
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from minivllm.bench.environment import (
    UNKNOWN,
    Code,
    Environment,
    current_command,
    describe_code,
    describe_environment,
    hash_sources,
)

FORMAT = 1
RESULTS = Path(__file__).resolve().parent / "results"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


class ResultFileError(ValueError):
    """A result file that cannot be trusted; the message names the file, the field and what is wrong with it."""


@dataclass(frozen=True)
class Measurement:
    """One thing that was timed, `repeats` times after `warmup` untimed runs; median and quartiles in `unit`."""

    name: str
    shapes: dict[str, Any]
    """What was computed: the sizes of tensors, or of a workload."""
    dtype: str
    unit: str
    warmup: int
    repeats: int
    median: float
    lower_quartile: float
    upper_quartile: float
    peak_memory_bytes: int | None = None
    """Of the whole process on a CPU, allocated by PyTorch on a GPU; None where it was not measured."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else is worth keeping, for this kind of benchmark."""

    @classmethod
    def from_samples(
        cls,
        name: str,
        samples: Sequence[float],
        *,
        shapes: dict[str, Any],
        dtype: str,
        unit: str,
        warmup: int,
        peak_memory_bytes: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> "Measurement":
        """Summarise the samples (in `unit`), of which there must be at least one."""
        lower, median, upper = quartiles(samples)
        repeats = len(samples)
        return cls(
            name, shapes, dtype, unit, warmup, repeats, median, lower, upper, peak_memory_bytes, dict(extra or {})
        )


@dataclass(frozen=True)
class ResultFile:
    """Everything a file holds."""

    benchmark: str
    device: str
    """ "cpu", "cuda" or "cuda:N"."""
    environment: Environment
    code: Code
    command: str
    time_utc: str
    measurements: list[Measurement]
    extra: dict[str, Any] = field(default_factory=dict)
    """What follows from several measurements, such as a ratio."""
    format: int = FORMAT

    @classmethod
    def record(
        cls,
        benchmark: str,
        device: str,
        measurements: Sequence[Measurement],
        sources: Iterable[Path] | Code,
        extra: dict[str, Any] | None = None,
    ) -> "ResultFile":
        """Measurements with the provenance of this process.

        Args:
            benchmark: what was run, such as "engine_mixed".
            device: "cpu", "cuda" or "cuda:N".
            sources: files of the package whose speed was measured; the file is outdated once they change. A long run
                describes them when it starts (`describe_code`), because somebody may edit them before it ends.
        """
        return cls(
            benchmark=benchmark,
            device=device,
            environment=describe_environment(device),
            code=sources if isinstance(sources, Code) else describe_code(sources),
            command=current_command(),
            time_utc=datetime.now(timezone.utc).strftime(_TIME_FORMAT),
            measurements=list(measurements),
            extra=dict(extra or {}),
        )

    def save(self, path: str | Path) -> None:
        """Write the file; raises ResultFileError where `load` would refuse it, and OSError."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        _parse(str(path), json.loads(text))
        Path(path).write_text(text + "\n")

    def measurement(self, name: str) -> Measurement:
        """The measurement of this name; raises KeyError."""
        for measurement in self.measurements:
            if measurement.name == name:
                return measurement
        raise KeyError(f"no measurement {name!r}; there are: {', '.join(m.name for m in self.measurements)}")

    def subtitle(self) -> str:
        """What has to stand under every figure and table made from this file."""
        env = self.environment
        cuda = (
            f"driver {env.driver}, CUDA {env.cuda}, "
            if env.gpu
            else f"{env.num_threads} thread{'s' * (env.num_threads != 1)}, "
        )
        triton = f", Triton {env.triton}" if env.triton and env.gpu else ""
        commit = self.code.commit if self.code.commit == UNKNOWN else self.code.commit[:10]
        dirty = " with local changes" if self.code.dirty else ""
        return (
            f"recorded on {env.gpu or env.cpu}, {cuda}PyTorch {env.torch}{triton}, {self.time_utc[:10]}, "
            f"commit {commit}{dirty}"
        )

    def is_outdated(self) -> bool:
        """Whether the source files that were measured have changed since."""
        return hash_sources(self.code.sources) != self.code.source_hash


def load(path: str | Path) -> ResultFile:
    """Read and check a file; raises ResultFileError."""
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as error:
        raise ResultFileError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ResultFileError(f"{path}: is not JSON ({error})") from None
    return _parse(str(path), raw)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; between two samples by linear interpolation."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return lower, median, upper


def _parse(path: str, raw: Any) -> ResultFile:
    if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
        raise ResultFileError(f"{path}: format is {raw['format']!r}, this version reads {FORMAT}: record it again")
    result = _build(ResultFile, raw, path)
    if not result.measurements:
        raise ResultFileError(f"{path}: measurements: there are none")
    if result.device.startswith("cuda"):
        lacking = [name for name in ("gpu", "driver", "cuda") if getattr(result.environment, name) is None]
        if lacking:
            raise ResultFileError(f"{path}: environment: a run on a GPU must name {', '.join(lacking)}")
    try:
        datetime.strptime(result.time_utc, _TIME_FORMAT)
    except ValueError:
        raise ResultFileError(f"{path}: time_utc: {result.time_utc!r} is not like 2026-01-31T12:00:00Z") from None
    for index, m in enumerate(result.measurements):
        where = f"{path}: measurements[{index}] ({m.name})"
        if not all(map(math.isfinite, (m.lower_quartile, m.median, m.upper_quartile))):
            raise ResultFileError(f"{where}: median and quartiles must be finite numbers")
        if not m.lower_quartile <= m.median <= m.upper_quartile:
            raise ResultFileError(f"{where}: the median must lie between the quartiles")
        if m.repeats < 1 or m.warmup < 0:
            raise ResultFileError(f"{where}: repeats must be at least 1 and warmup at least 0")
        if not m.shapes:
            raise ResultFileError(f"{where}: shapes: must say what was computed, but is empty")
    return result


def _build(kind: Any, raw: Any, where: str) -> Any:
    """A value of the annotated type `kind` from its JSON form; raises ResultFileError naming the field."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(raw, dict):
            raise ResultFileError(f"{where}: must be an object, not {type(raw).__name__}")
        names = {f.name for f in dataclasses.fields(kind)}
        lacking, unknown = sorted(names - set(raw)), sorted(set(raw) - names)
        if lacking or unknown:
            problem = f"lacks {', '.join(lacking)}" if lacking else f"has unknown {', '.join(unknown)}"
            raise ResultFileError(f"{where}: {problem}")
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], raw[name], f"{where}: {name}") for name in names})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        if not isinstance(raw, list):
            raise ResultFileError(f"{where}: must be a list, not {type(raw).__name__}")
        return [_build(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(raw)]
    accepted = arguments if origin is types.UnionType else (origin or kind,)
    if float in accepted:
        accepted += (int,)
    if not isinstance(raw, accepted) or (isinstance(raw, bool) and bool not in accepted) or raw == "":
        names = " or ".join("null" if a is types.NoneType else a.__name__ for a in accepted)
        raise ResultFileError(f"{where}: must be {names}, not {raw!r}")
    return raw
