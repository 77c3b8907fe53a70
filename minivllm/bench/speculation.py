"""`python -m minivllm bench speculation`: decoding with drafts against plain decoding, in one run.

    python -m minivllm bench speculation --model tiny-deepseek --method mtp --k 1 2 3 --batch-sizes 1 8 32
    python -m minivllm bench speculation --model tiny-qwen3 --method draft_model --draft-model tiny-qwen3-draft
    python -m minivllm bench speculation --model smollm2-135m --method ngram --prompts copies --k 4 8

All engines have the same settings but for the drafts, and take turns: plain, k = 1, k = 2, plain, k = 1, … Greedy
requests, so every engine writes the same text, and does: where ids differ in float32 from the plain engine's, on
prompts without a close call, the run fails.

    ratio     output tokens a second: with drafts / plain
    = tokens a step, with drafts / plain              what acceptance brings
    / seconds a step, with drafts / plain             what drafting and the wider verification cost
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.bench.speculation_timing import SpeculatingEngine, Timing, time_in_turns
from minivllm.speculative_config import METHODS

if TYPE_CHECKING:
    from minivllm.bench.result_file import Measurement
    from minivllm.bench.speculation_prompts import GreedyAnswer

UNIT = "output tokens/s"
FLOAT32_MARGIN = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `bench speculation` its options."""
    parser.description = "Measure decoding with drafts against plain decoding."
    parser.set_defaults(run=run)
    parser.add_argument("--json", metavar="OUT", help="write a result file")
    what = parser.add_argument_group("what is run")
    what.add_argument("--model", required=True, help="the target: name, directory or Hub id")
    what.add_argument("--method", required=True, choices=METHODS, help="who drafts")
    what.add_argument("--draft-model", metavar="MODEL", help="for draft_model: name or directory")
    what.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4], metavar="K", help="default: 1 2 3 4")
    what.add_argument("--batch-sizes", type=int, nargs="+", default=[1], metavar="B", help="default: 1")
    what.add_argument("--prompts", choices=("stories", "copies"), default="stories", help="default: %(default)s")
    what.add_argument("--num-tokens", type=int, default=64, metavar="N", help="of each output (default: %(default)s)")
    what.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    what.add_argument("--device", default="auto", help="auto, cpu or cuda")
    what.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch (default: its own choice)")
    how = parser.add_argument_group("how often")
    how.add_argument("--warmup", type=int, default=1, metavar="N", help="untimed runs of each (default: %(default)s)")
    how.add_argument("--repeats", type=int, default=5, metavar="N", help="timed runs of each (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, print a table, write the file; exit code 1 where ids differ."""
    _check(arguments)
    from minivllm.bench.environment import describe_code, imported_sources
    from minivllm.bench.result_file import ResultFile

    if arguments.threads is not None:
        import torch

        torch.set_num_threads(arguments.threads)
    answers = _answers(arguments)
    engines = [_make_engine(arguments, k, answers, arguments.dtype) for k in (0, *arguments.k)]
    code, measurements = describe_code(imported_sources()), []
    print(f"{'':<16}{UNIT:>16}{'ratio':>8}{'accepted':>10}{'a verification':>16}{'step cost':>11}")
    for batch_size in arguments.batch_sizes:
        batch = [answers[index % len(answers)] for index in range(batch_size)]
        timings = time_in_turns(engines, batch, arguments.num_tokens, arguments.warmup, arguments.repeats)
        measurements += [_measurement(arguments, timing, timings[0], batch) for timing in timings]
        _print_rows(measurements[-len(timings) :])
    identical = _identical(arguments, engines, answers)
    num_equal, num_outputs = sum(identical.values()), len(identical) * len(answers)
    print(f"float32: {num_equal} of {num_outputs} outputs identical to plain decoding's")
    if arguments.json:
        extra = {
            "method": arguments.method,
            "prompts": arguments.prompts,
            "identical_outputs_float32": identical,
            "num_prompts": len(answers),
            "least_margin_float32": min(answer.margin for answer in answers),
        }
        device = str(engines[0].llm.model_runner.device)
        result = ResultFile.record(f"speculation_{arguments.method}", device, measurements, code, extra)
        result.save(arguments.json)
        print(f"wrote {arguments.json}: {result.subtitle()}", file=sys.stderr)
    return 0 if num_equal == num_outputs else 1


def _answers(arguments: argparse.Namespace) -> "list[GreedyAnswer]":
    """Prompts without a close call, and what plain decoding in float32 makes of them."""
    from minivllm.bench.speculation_prompts import PROMPTS, wide_margin_prompts
    from minivllm.llm import LLM

    llm = LLM(arguments.model, dtype="float32", device=arguments.device, num_gpu_blocks_override=512)
    candidates = PROMPTS[arguments.prompts]()
    return wide_margin_prompts(llm, candidates, arguments.num_tokens, FLOAT32_MARGIN)[: max(arguments.batch_sizes)]


def _make_engine(arguments: argparse.Namespace, k: int, answers: "list[GreedyAnswer]", dtype: str) -> SpeculatingEngine:
    from minivllm.llm import LLM

    model = {"model": arguments.draft_model} if arguments.method == "draft_model" else {}
    # Room for all drafts of the last step: near max_model_len drafts are cut.
    longest = max(len(answer.prompt_token_ids) for answer in answers) + arguments.num_tokens + max(arguments.k) + 2
    llm = LLM(
        arguments.model,
        dtype=dtype,
        device=arguments.device,
        max_model_len=longest,
        max_num_seqs=max(arguments.batch_sizes),
        num_gpu_blocks_override=max(arguments.batch_sizes) * -(-longest // 16),
        enable_prefix_caching=False,  # a second run of the same prompts would skip them
        speculative_config={"method": arguments.method, "num_speculative_tokens": k, **model} if k else None,
    )
    return SpeculatingEngine(llm, k)


def _identical(
    arguments: argparse.Namespace, engines: list[SpeculatingEngine], answers: "list[GreedyAnswer]"
) -> dict[str, int]:
    """For each k, how many outputs equal the plain ones in float32."""
    if arguments.dtype != "float32":
        engines = [_make_engine(arguments, k, answers, "float32") for k in (0, *arguments.k)]
    identical = {}
    for engine in engines:
        timing = Timing(engine.k)
        engine.run(answers, arguments.num_tokens, timing)
        identical[str(engine.k)] = len(answers) - timing.num_different
    return identical


def _measurement(
    arguments: argparse.Namespace, timing: Timing, plain: Timing, batch: "list[GreedyAnswer]"
) -> "Measurement":
    from minivllm.bench.result_file import Measurement, quartiles

    num_tokens, drafts = len(batch) * arguments.num_tokens, timing.drafts
    seconds, plain_seconds = quartiles(timing.seconds)[1], quartiles(plain.seconds)[1]
    step_cost = (seconds / timing.num_steps) / (plain_seconds / plain.num_steps)
    positions = zip(drafts.drafted, drafts.accepted, strict=True)
    return Measurement.from_samples(
        f"{f'k = {timing.k}' if timing.k else 'plain'}, batch {len(batch)}",
        [num_tokens / value for value in timing.seconds],
        shapes={
            "model": Path(arguments.model).name,
            "batch_size": len(batch),
            "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in batch),
            "output_tokens": num_tokens,
        },
        dtype=arguments.dtype,
        unit=UNIT,
        warmup=arguments.warmup,
        extra={
            "k": timing.k,
            "ratio": plain_seconds / seconds,
            "steps": timing.num_steps,
            "step_cost": step_cost,
            "acceptance_rate": drafts.acceptance_rate,
            "mean_acceptance_length": drafts.mean_acceptance_length,
            "acceptance_by_position": [accepted / drafted for drafted, accepted in positions if drafted],
            "drafts": vars(drafts),
            "seconds": timing.seconds,
        },
    )


def _print_rows(measurements: "list[Measurement]") -> None:
    for m in measurements:
        row = f"{m.name:<16}{m.median:>16.1f}{m.extra['ratio']:>8.2f}"
        if m.extra["k"]:
            row += f"{m.extra['acceptance_rate']:>10.0%}{m.extra['mean_acceptance_length']:>16.2f}"
            row += f"{m.extra['step_cost']:>11.2f}"
        print(row, flush=True)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded; raises ValueError."""
    lowest = {"k": 1, "batch_sizes": 1, "num_tokens": 1, "warmup": 0, "repeats": 1, "threads": 1}
    for option, least in lowest.items():
        value = getattr(arguments, option)
        for entry in value if isinstance(value, list) else [value]:
            if entry is not None and entry < least:
                raise ValueError(f"--{option.replace('_', '-')} must be at least {least}, not {entry}")
    if (arguments.method == "draft_model") != bool(arguments.draft_model):
        raise ValueError("--method draft_model needs --draft-model, and the other methods have none")
    if arguments.json and not Path(arguments.json).resolve().parent.is_dir():
        raise ValueError(f"--json {arguments.json}: there is no such directory")
