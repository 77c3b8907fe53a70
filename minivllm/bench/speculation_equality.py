"""`python -m minivllm bench speculation-equality`: drafts change no greedy token, whatever else goes on.

    {ngram, draft_model, mtp} x k = 0 .. 5 x conditions

A condition is a chunk size, forced preemptions or none, prefix caching or none, and company: each prompt alone, or all
in one batch. Of the 24 conditions six are run for each method and k, so chosen that every pair of settings of any two
of these meets. What is compared with is plain decoding of each prompt by itself: nothing cached, no chunks, nobody
preempted. Prompts are those without a close call in float32.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.engine.spec_stats import SpecDecodeStats
from minivllm.speculative_config import METHODS

if TYPE_CHECKING:
    from minivllm.bench.speculation_prompts import GreedyAnswer
    from minivllm.engine.messages import SchedulerOutput
    from minivllm.engine.scheduler import Scheduler

BLOCK_SIZE = 8
FLOAT32_MARGIN = 1e-3
LARGEST_K = 5
TOKENS_BETWEEN_PREEMPTIONS = 6
BEGINNING = "This is a tale that my grandmother told us by the fire when the nights were long and the snow lay deep. "
"""Of every prompt: something to share for the prefix cache, several blocks long."""


class Condition(NamedTuple):
    """What must not matter; chunk_size 0 is the whole prompt at once."""

    chunk_size: int
    preempted: bool
    caching: bool
    alone: bool

    def __str__(self) -> str:
        chunks = f"chunks of {self.chunk_size}" if self.chunk_size else "whole"
        preempted = ", preempted" if self.preempted else ""
        return f"{chunks}{preempted}{', cached' if self.caching else ''}, {'alone' if self.alone else 'in company'}"


CONDITIONS = (
    Condition(0, False, False, False),
    Condition(0, True, True, True),
    Condition(5, False, False, True),
    Condition(5, True, True, False),
    Condition(16, False, True, False),
    Condition(16, True, False, True),
)
CHUNK_SIZES = (0, 5, 16)


@dataclass
class Outcome:
    """One configuration: how many outputs are those of plain decoding, and what happened on the way."""

    num_equal: int
    num_outputs: int
    num_preemptions: int
    num_cached_tokens: int
    drafts: dict[str, Any] = field(default_factory=dict)

    def holds(self, k: int, condition: Condition) -> bool:
        """All equal, and the condition was not an empty promise."""
        happened = (
            (self.num_preemptions > 0) == condition.preempted
            and (self.num_cached_tokens > 0) == condition.caching
            and (self.drafts["num_verifications"] > 0) == (k > 0)
        )
        return happened and self.num_equal == self.num_outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `bench speculation-equality` its options."""
    parser.description = "Compare greedy ids with drafts to those of plain decoding."
    parser.set_defaults(run=run)
    for name in ("target", "draft-model", "mtp-target"):
        default = {"target": "tiny-qwen3", "draft-model": "tiny-qwen3-draft", "mtp-target": "tiny-deepseek"}[name]
        parser.add_argument(f"--{name}", metavar="MODEL", default=default, help="default: %(default)s")
    parser.add_argument("--num-prompts", type=int, default=50, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-tokens", type=int, default=24, metavar="N", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--json", metavar="OUT", help="write a result file")


def run(arguments: argparse.Namespace) -> int:
    """The whole matrix; exit code 1 if anything differs."""
    from minivllm.bench.environment import describe_code
    from minivllm.bench.result_file import Measurement, ResultFile

    package = Path(__file__).resolve().parents[1]
    folders = ("engine", "worker", "sample", "speculate", "attention", "layers", "models")
    code = describe_code([path for folder in folders for path in sorted((package / folder).glob("*.py"))])
    answers = {
        target: _answers(arguments, target) for target in dict.fromkeys((arguments.target, arguments.mtp_target))
    }
    measurements = []
    for method, k, condition in configurations():
        start = time.perf_counter()
        target = arguments.mtp_target if method == "mtp" else arguments.target
        outcome = run_configuration(arguments, target, answers[target], method, k, condition)
        holds = outcome.holds(k, condition)
        name = f"{method}, k = {k}, {condition}"
        print(
            f"{name}: {outcome.num_equal} of {outcome.num_outputs}{'' if holds else f' FAILED {outcome}'}", flush=True
        )
        measurements.append(
            Measurement.from_samples(
                name,
                [outcome.num_equal],
                shapes={
                    "model": Path(target).name,
                    "prompts": outcome.num_outputs,
                    "output_tokens": arguments.num_tokens,
                    "block_size": BLOCK_SIZE,
                    **condition._asdict(),
                },
                dtype="float32",
                unit="outputs equal to plain decoding's",
                warmup=0,
                extra={
                    "method": method, "k": k, **asdict(outcome), "holds": holds,
                    "seconds": round(time.perf_counter() - start, 2),
                },
            )
        )  # fmt: skip
    is_good = all(measurement.extra["holds"] for measurement in measurements)
    margins = {Path(target).name: min(answer.margin for answer in given) for target, given in answers.items()}
    extra = {"all_hold": is_good, "least_margin_float32": margins}
    result = ResultFile.record("speculation_equality", arguments.device, measurements, code, extra)
    if arguments.json:
        result.save(arguments.json)
        print(f"wrote {arguments.json}: {result.subtitle()}", file=sys.stderr)
    print("all configurations hold" if is_good else "some configurations FAILED")
    return 0 if is_good else 1


def configurations() -> Iterator[tuple[str, int, Condition]]:
    """Every method with every k under each of the six conditions."""
    for method in METHODS:
        for k in range(LARGEST_K + 1):
            for condition in CONDITIONS:
                yield method, k, condition


def run_configuration(
    arguments: argparse.Namespace,
    target: str,
    answers: "list[GreedyAnswer]",
    method: str,
    k: int,
    condition: Condition,
) -> Outcome:
    """Generate what the answers hold, with drafts and under one condition."""
    from minivllm.llm import LLM
    from minivllm.sampling_params import SamplingParams

    longest = max(len(answer.prompt_token_ids) for answer in answers) + arguments.num_tokens + 1
    model = {"model": arguments.draft_model} if method == "draft_model" else {}
    llm = LLM(
        target,
        dtype="float32",
        device=arguments.device,
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        max_num_seqs=len(answers),
        num_gpu_blocks_override=len(answers) * (-(-longest // BLOCK_SIZE) + 1),
        long_prefill_token_threshold=condition.chunk_size,
        enable_prefix_caching=condition.caching,
        speculative_config={"method": method, "num_speculative_tokens": k, **model},
    )
    preempter = Preempter(llm.engine.scheduler) if condition.preempted else None
    params = SamplingParams(temperature=0, max_tokens=arguments.num_tokens, ignore_eos=True)
    prompts = [answer.prompt_token_ids for answer in answers]
    # In one step all prompts are looked up before any is computed: the first goes ahead.
    batches = [[prompt] for prompt in prompts] if condition.alone else [prompts[:1], prompts[1:]]
    outputs = [output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)]
    equal = [output.outputs[0].token_ids == answer.token_ids for output, answer in zip(outputs, answers, strict=True)]
    return Outcome(
        num_equal=sum(equal),
        num_outputs=len(equal),
        num_preemptions=preempter.num_preemptions if preempter else 0,
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        drafts=vars(SpecDecodeStats.total(output.spec_decode for output in outputs if output.spec_decode)),
    )


class Preempter:
    """Takes the blocks of one request away before each step, of each every few tokens: often, and all get on."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self.scheduler, self.num_preemptions = scheduler, 0
        self._last: dict[str, int] = {}
        self._schedule = scheduler.schedule
        scheduler.schedule = self.schedule

    def schedule(self) -> "SchedulerOutput":
        for request in self.scheduler.running:
            done = request.num_output_tokens
            if done >= self._last.get(request.request_id, 0) + TOKENS_BETWEEN_PREEMPTIONS:
                self._last[request.request_id] = done
                self.scheduler.preempt(request)
                self.num_preemptions += 1
                break
        return self._schedule()


def _answers(arguments: argparse.Namespace, target: str) -> "list[GreedyAnswer]":
    """Prompts without a close call; what plain decoding makes of each by itself."""
    from minivllm.bench.speculation_prompts import GreedyAnswer, stories, wide_margin_prompts
    from minivllm.llm import LLM
    from minivllm.sampling_params import SamplingParams

    llm = LLM(target, dtype="float32", device=arguments.device, num_gpu_blocks_override=1024)
    prompts = [BEGINNING + story for story in stories()]
    wide = wide_margin_prompts(llm, prompts, arguments.num_tokens, FLOAT32_MARGIN, arguments.num_prompts)
    params = SamplingParams(temperature=0, max_tokens=arguments.num_tokens, ignore_eos=True)
    plain = LLM(
        target, dtype="float32", device=arguments.device, num_gpu_blocks_override=1024, enable_prefix_caching=False
    )
    alone = [plain.generate(answer.prompt_token_ids, params, use_tqdm=False)[0] for answer in wide]
    return [
        GreedyAnswer(answer.prompt_token_ids, output.outputs[0].token_ids, answer.margin)
        for answer, output in zip(wide, alone, strict=True)
    ]
