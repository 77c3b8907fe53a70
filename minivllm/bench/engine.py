"""`python -m minivllm bench engine`: throughput of the whole engine, alone or side by side with a peer.

    python -m minivllm bench engine                                     the mixed workload on smollm2-135m
    python -m minivllm bench engine --peer transformers --json OUT      the same against transformers.generate
    python -m minivllm bench engine --workload yardstick                nano-vllm's yardstick, for a GPU

`workloads.py` says what is run, `peers.py` by whom, `comparison.py` in which order and what the ratios mean.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.workloads import SPECS, Workload, WorkloadSpec, draw_workload, model_shape, write_qwen3_config

if TYPE_CHECKING:
    from minivllm.bench.comparison import Timing
    from minivllm.bench.peers import Setup

UNIT = "output tokens/s"
DTYPES = ("auto", "float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `bench engine` its options."""
    parser.description = "Measure the throughput of the whole engine, alone or against a peer."
    parser.set_defaults(run=run)
    parser.add_argument("--json", metavar="OUT", help="write a result file")
    what = parser.add_argument_group("what is run")
    what.add_argument("--workload", choices=SPECS, default="mixed", help="default: %(default)s")
    what.add_argument("--num-requests", type=int, metavar="N", help="default: as the workload says")
    what.add_argument("--model", help="name, directory or Hub id (default: the workload's)")
    what.add_argument(
        "--load-format", choices=("auto", "dummy"), help="dummy: random weights (default: the workload's)"
    )
    what.add_argument("--dtype", choices=DTYPES, help="default: the workload's")
    what.add_argument("--device", default="auto", help="auto, cpu or cuda")
    what.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch (default: its own choice)")
    what.add_argument("--attention-backend", default="auto", help="of minivllm (default: auto)")
    what.add_argument("--gpu-memory-utilization", type=float, metavar="F", help="default: 0.9, with a peer 0.4")
    peer = parser.add_argument_group("compared with what")
    peer.add_argument("--peer", choices=("transformers", "vllm"), help="run this engine too, in turns")
    peer.add_argument("--cache", choices=("dynamic", "static", "both"), default="both", help="of transformers")
    peer.add_argument("--batch-size", type=int, default=32, metavar="N", help="of transformers (default: %(default)s)")
    how = parser.add_argument_group("how often")
    how.add_argument("--warmup", type=int, default=1, metavar="N", help="untimed runs of each (default: %(default)s)")
    how.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="timed runs; a peer gets one less (default: 3)"
    )
    how.add_argument("--profile", action="store_true", help="also record where a step's time goes: two more runs")
    how.add_argument("--no-memory", action="store_true", help="do not measure peak memory, which takes one more run")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, print a table, and write the file; returns the exit code."""
    _check(arguments)
    spec = SPECS[arguments.workload]
    with tempfile.TemporaryDirectory() as scratch:
        name, path = _find_model(arguments.model or spec.model, Path(scratch))
        setup = _make_setup(arguments, spec, path)
        config = json.loads((path / "config.json").read_text())
        workload = draw_workload(spec, arguments.num_requests, config["vocab_size"])
        _tell(
            f"{spec.name}: {len(workload.prompts)} requests, {workload.num_prompt_tokens} tokens in, "
            f"{workload.num_output_tokens} out; {name}, {setup.dtype}, {setup.device}"
        )
        _measure(arguments, setup, workload, {"model": name, **model_shape(config)})
    return 0


def _measure(arguments: argparse.Namespace, setup: "Setup", workload: Workload, shape: dict[str, Any]) -> None:
    from minivllm.bench.comparison import compare, run_in_turns
    from minivllm.bench.environment import describe_code, imported_sources
    from minivllm.bench.memory import peak_memory
    from minivllm.bench.peers import make_engine
    from minivllm.bench.profile import profile
    from minivllm.bench.result_file import Measurement, ResultFile

    names = _engine_names(arguments)
    peaks = {name: None if arguments.no_memory else peak_memory(name, setup, workload) for name in names}
    engines = [make_engine(name, setup) for name in names]
    code = describe_code(imported_sources())
    timings = run_in_turns(engines, workload, arguments.warmup, arguments.repeats, _tell)
    ours, *peers = timings
    comparison = compare(ours, peers) if peers else None
    _print_table(timings, peaks, comparison, len(workload.prompts))
    profiled = profile(engines[0].llm, workload) if arguments.profile else None
    if profiled:
        print(json.dumps(profiled, indent=1))
    if arguments.json:
        shapes = {**_workload_shape(arguments.workload, workload), **shape}
        measurements = [
            Measurement.from_samples(
                timing.name,
                timing.throughputs,
                shapes=shapes,
                dtype=setup.dtype,
                unit=UNIT,
                warmup=arguments.warmup,
                peak_memory_bytes=peaks[timing.name],
                extra={
                    "seconds": [run.seconds for run in timing.runs],
                    "rows": timing.runs[-1].num_rows,
                    "rows_per_second": timing.rows_per_second,
                },
            )
            for timing in timings
        ]
        extra = {"load_format": setup.load_format, "temperature": workload.temperature, "comparison": comparison}
        if profiled:
            extra["profile"] = profiled
        result = ResultFile.record(f"engine_{arguments.workload}", setup.device, measurements, code, extra)
        result.save(arguments.json)
        _tell(f"wrote {arguments.json}: {result.subtitle()}")


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded; raises ValueError."""
    for option, lowest in (("num_requests", 1), ("threads", 1), ("batch_size", 1), ("warmup", 0), ("repeats", 1)):
        value = getattr(arguments, option)
        if value is not None and value < lowest:
            raise ValueError(f"--{option.replace('_', '-')} must be at least {lowest}, not {value}")
    if arguments.json and not Path(arguments.json).resolve().parent.is_dir():
        raise ValueError(f"--json {arguments.json}: there is no such directory")


def _engine_names(arguments: argparse.Namespace) -> list[str]:
    from minivllm.bench.peers import TRANSFORMERS_CACHES, require_vllm

    if arguments.peer == "vllm":
        require_vllm()
        return ["minivllm", "vllm"]
    if arguments.peer == "transformers":
        caches = TRANSFORMERS_CACHES if arguments.cache == "both" else (arguments.cache,)
        return ["minivllm", *(f"transformers_{cache}" for cache in caches)]
    return ["minivllm"]


def _find_model(model: str | None, scratch: Path) -> tuple[str, Path]:
    """What to call the model in the result, and its directory."""
    from minivllm.checkpoints import resolve

    if model is None:
        write_qwen3_config(scratch)
        return "Qwen3-0.6B's shape", scratch
    path = resolve(model)
    if not (path / "config.json").is_file():
        raise ValueError(f"{model} holds no config.json")
    return (path.name if Path(model).is_dir() else model), path


def _make_setup(arguments: argparse.Namespace, spec: WorkloadSpec, path: Path) -> "Setup":
    from minivllm.bench.peers import Setup
    from minivllm.worker.model_runner import resolve_device

    device = resolve_device(arguments.device)
    dtype = arguments.dtype or spec.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    return Setup(
        model_path=path,
        load_format=arguments.load_format or spec.load_format,
        dtype=dtype,
        device=str(device),
        max_model_len=spec.max_model_len,
        attention_backend=arguments.attention_backend,
        gpu_memory_utilization=arguments.gpu_memory_utilization or (0.4 if arguments.peer else 0.9),
        batch_size=arguments.batch_size,
        num_threads=arguments.threads,
    )


def _workload_shape(name: str, workload: Workload) -> dict[str, Any]:
    prompt_lens = [len(prompt) for prompt in workload.prompts]
    return {
        "workload": name,
        "num_requests": len(prompt_lens),
        "prompt_lens": [min(prompt_lens), max(prompt_lens)],
        "output_lens": [min(workload.output_lens), max(workload.output_lens)],
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
    }


def _print_table(
    timings: "list[Timing]", peaks: dict[str, int | None], comparison: dict[str, Any] | None, num_requests: int
) -> None:
    print(f"{'engine':<22}{UNIT:>16}{'rows/s':>10}{'rows':>10}{'peak memory':>14}")
    for timing in timings:
        rate, rows, peak = timing.rows_per_second, timing.runs[-1].num_rows, peaks[timing.name]
        print(
            f"{timing.name:<22}{timing.throughput:>16.1f}{'-' if rate is None else f'{rate:.0f}':>10}"
            f"{'-' if rows is None else rows:>10}{'-' if peak is None else f'{peak / 2**20:.0f} MiB':>14}"
        )
    if comparison:
        per_row = comparison["row_ratio"]
        print(
            f"minivllm / {comparison['peer']}: {comparison['throughput_ratio']:.2f}x in output tokens/s"
            + ("" if per_row is None else f", {per_row:.2f}x in rows/s")
            + f"; {comparison['identical_outputs']} of {num_requests} outputs identical"
        )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
