"""`python -m minivllm bench scheduler`: what a step costs before any model runs, and whether the scheduler holds.

    python -m minivllm bench scheduler                                  256 decodes at a short and a long context
    python -m minivllm bench scheduler --histories 20000 --json OUT     so many random histories instead

The scheduler is pure Python and runs between any two steps of the model, so its time is lost to the device. It must
not grow with the length of the requests: `schedule` and `update_from_output` touch only what a step changes.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.messages import ModelRunnerOutput
from minivllm.engine.request import Request
from minivllm.engine.scheduler import Scheduler
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.bench.result_file import Measurement

CONTEXTS = (64, 4096)
BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
MEASURED = ("block_pool", "in_flight", "kv_cache", "messages", "request", "request_queue", "scheduler")
"""Files of the engine that take part."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `bench scheduler` its options."""
    parser.description = "Measure the scheduler's own time per step, and run random histories of it."
    parser.set_defaults(run=run)
    parser.add_argument("--num-requests", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--warmup", type=int, default=20, metavar="N", help="untimed steps (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=400, metavar="N", help="timed steps (default: %(default)s)")
    parser.add_argument(
        "--histories",
        type=int,
        default=0,
        metavar="N",
        help="run random histories instead (needs the repository's tests)",
    )
    parser.add_argument("--json", metavar="OUT", help="write a result file")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and write the file; returns the exit code."""
    for option, lowest in (("num_requests", 1), ("warmup", 0), ("repeats", 1), ("histories", 0)):
        if getattr(arguments, option) < lowest:
            raise ValueError(f"--{option.replace('_', '-')} must be at least {lowest}")
    if arguments.histories:
        name, measurements = "scheduler_histories", [measure_histories(arguments.histories)]
        extra: dict[str, Any] = {}
        print("\n".join(f"{count:>9}  {what}" for what, count in measurements[0].extra.items()))
    else:
        name, measurements = "scheduler_cost", measure_cost(arguments.num_requests, arguments.warmup, arguments.repeats)
        extra = {"ratio": measurements[-1].median / measurements[0].median}
        for m in measurements:
            print(f"{m.name}: {m.median:.3f} ms a step ({m.lower_quartile:.3f} to {m.upper_quartile:.3f})")
        print(f"context {CONTEXTS[-1]} / context {CONTEXTS[0]}: {extra['ratio']:.3f}x")
    if arguments.json:
        from minivllm.bench.result_file import ResultFile

        engine = Path(__file__).resolve().parents[1] / "engine"
        sources = [engine / f"{module}.py" for module in MEASURED]
        result = ResultFile.record(name, "cpu", measurements, sources, extra)
        result.save(arguments.json)
        print(f"wrote {arguments.json}: {result.subtitle()}", file=sys.stderr)
    return 0


def measure_cost(num_requests: int, warmup: int, repeats: int) -> "list[Measurement]":
    """Milliseconds of `schedule` + `update_from_output` per step, at each context.

    The contexts take turns step by step, so that whatever else the machine does falls on all of them alike.
    """
    from minivllm.bench.result_file import Measurement

    num_steps = warmup + repeats
    schedulers = {context: decoding_scheduler(num_requests, context, num_steps) for context in CONTEXTS}
    samples: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    for index in range(num_steps):
        for context, scheduler in schedulers.items():
            milliseconds = _timed_step(scheduler)
            if index >= warmup:
                samples[context].append(milliseconds)
    return [
        Measurement.from_samples(
            f"{num_requests} decodes at context {context}",
            samples[context],
            shapes={"requests": num_requests, "context": context, "block_size": BLOCK_SIZE},
            dtype="int64",
            unit="ms",
            warmup=warmup,
        )
        for context in CONTEXTS
    ]


def decoding_scheduler(num_requests: int, context: int, num_steps: int) -> Scheduler:
    """A scheduler whose requests have about `context` tokens and decode for `num_steps` more.

    Their lengths differ by up to a block, so that in every step some of them need a new one.
    """
    max_model_len = context + num_steps + 2
    blocks_of_one = -(-max_model_len // BLOCK_SIZE)
    manager = KVCacheManager(num_requests * blocks_of_one, BLOCK_SIZE, max_model_len)
    scheduler = Scheduler(manager, max_model_len, num_requests, num_requests * max_model_len)
    for index in range(num_requests):
        prompt = [(index * 7919 + position) % VOCAB_SIZE for position in range(context - index % BLOCK_SIZE)]
        params = SamplingParams(temperature=0, max_tokens=max_model_len, seed=0)
        scheduler.add_request(Request(str(index), prompt, params))
    _timed_step(scheduler)
    return scheduler


def _timed_step(scheduler: Scheduler) -> float:
    """One step in which every request gets a token; what the model runner would do is not timed."""
    start = time.perf_counter()
    scheduler_output = scheduler.schedule()
    scheduled = time.perf_counter()
    model_output = ModelRunnerOutput({req_id: [1] for req_id in scheduler_output.num_scheduled_tokens})
    sampled = time.perf_counter()
    scheduler.update_from_output(scheduler_output, model_output)
    return (time.perf_counter() - sampled + scheduled - start) * 1e3


def measure_histories(num_histories: int) -> "Measurement":
    """Run the state machine of the tests; raises ValueError where there are no tests, AssertionError where it fails."""
    from minivllm.bench.result_file import Measurement

    tests = Path(__file__).resolve().parents[2] / "tests"
    if not (tests / "engine" / "scheduler_histories.py").is_file():
        raise ValueError("--histories runs the state machine of the tests: start it in a clone of the repository")
    sys.path[:0] = [str(tests), str(tests / "engine")]
    histories: Any = importlib.import_module("scheduler_histories")
    start = time.perf_counter()
    counts = histories.run_histories(num_histories)
    seconds = time.perf_counter() - start
    return Measurement.from_samples(
        "histories",
        [seconds],
        shapes={"histories": num_histories, "rules": histories.NUM_RULES},
        dtype="int64",
        unit="s",
        warmup=0,
        extra=dict(sorted(counts.items())),
    )
