"""Is it the same text? Greedy tokens of the engine against transformers', over everything that must not matter.

    block size x chunk size x company (alone, in a batch, in a pool so small that requests are preempted)

Two implementations add floating-point numbers in different orders, so their logits differ a little; greedy tokens
must agree wherever the best token leads by more than that. In float32, prompts are kept whose lead ("margin") stays
above 1e-3 at every step, and then all tokens must be equal. In bfloat16 the first difference, if there is one, is
wanted on a position whose margin is below 0.1, as the float32 model sees it: a bfloat16 logit between 16 and 32 is a
multiple of 0.125, so its own margins are 0, 0.125, 0.25, … and say little about how close a call was. Rounding alone
moves smollm2's logits by more than that now and then, with either implementation; `holds` says where.
"""

import argparse
import inspect
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from minivllm.llm import LLM

BLOCK_SIZES = (1, 8, 16, 64, 256)
CHUNK_SIZES = (1, 7, 16, 0)
"""Tokens of one request in one step; 0 is the whole prompt."""
COMPANIES = ("alone", "batch", "crowded")
FLOAT32_MARGIN = 1e-3
BFLOAT16_MARGIN = 0.1

_TALES = (
    "Once upon a time a wolf lived in the",
    "The king had three daughters, and the youngest",
    "In the middle of the forest stood a house made of",
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "A computer program is",
    "The three primary colours are red,",
    "My grandmother always told me that",
    "To bake a loaf of bread you need flour,",
    "The moon goes around the Earth once every",
    "Dear Sir or Madam, I am writing to",
    "Photosynthesis is the process by which",
    "The opposite of hot is cold. The opposite of big is",
    "In 1969 the first humans walked on",
    "A triangle with three equal sides is called",
    "The ship left the harbour at dawn, and",
    "Q: What is the largest animal on Earth?\nA:",
    "import numpy as np\n\n# create an array of zeros\nx =",
    "The old clock on the wall had stopped at",
    "She opened the letter and began to read:",
    "Gravity is the force that",
    "The recipe is simple. First,",
    "Monday, Tuesday, Wednesday,",
)


def prompts() -> list[str]:
    """Short beginnings, and some so long that several of them cross a block border of 256 tokens while they grow."""
    long = [" ".join(f"{i} and {i} make {2 * i}." for i in range(start, start + 20)) for start in (10, 11, 12, 13, 14)]
    return [*_TALES, *long]


@dataclass
class Reference:
    """What transformers makes of a prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    margins: list[float]
    """For each output token, by how much the best logit leads the second best, in float32."""
    logits: "torch.Tensor"
    """[output tokens, V] float32."""


def transformers_reference(
    model_path: Path, texts: list[str], num_tokens: int, dtype: str, device: str = "cpu"
) -> list[Reference]:
    """Greedy outputs of `num_tokens` tokens, EOS ignored, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).to(device).eval()
    # transformers renamed the argument in 2026.
    cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    references = []
    for text in texts:
        ids = tokenizer.encode(text)
        rows, cache, step_input = [], DynamicCache(), torch.tensor([ids], device=device)
        output: list[int] = []
        with torch.inference_mode():
            for _ in range(num_tokens):
                step = model(step_input, **{cache_argument: cache})
                rows.append(step.logits[0, -1].float().cpu())
                output.append(int(rows[-1].argmax()))
                step_input = torch.tensor([[output[-1]]], device=device)
        references.append(Reference(ids, output, _margins(torch.stack(rows)), torch.stack(rows)))
    if dtype != "float32":
        exact = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device).eval()
        for reference in references:
            read = torch.tensor([reference.prompt_token_ids + reference.token_ids], device=device)
            with torch.inference_mode():
                logits = exact(read).logits[0, len(reference.prompt_token_ids) - 1 : -1]
            reference.margins = _margins(logits)
    return references


def _margins(logits: "torch.Tensor") -> list[float]:
    top_two = logits.topk(2).values
    return (top_two[:, 0] - top_two[:, 1]).tolist()


@dataclass
class Outcome:
    """One configuration: how many outputs agree, and what happened on the way."""

    num_equal: int
    num_outputs: int
    num_preemptions: int
    max_logit_difference: float | None
    first_differences: list[float]
    """For each output that differs, the reference's margin where it first does."""


def run_configuration(
    model_path: Path,
    references: list[Reference],
    block_size: int,
    chunk_size: int,
    company: str,
    **engine_args: Any,
) -> Outcome:
    """Generate what the references hold, under one configuration.

    The logits are compared where requests run alone: there each step's single row belongs to a known token.
    """
    from minivllm.llm import LLM
    from minivllm.sampling_params import SamplingParams

    num_tokens = len(references[0].token_ids)
    longest = max(len(reference.prompt_token_ids) for reference in references) + num_tokens + 1
    # Room for all at their longest; or, in a crowd, for five prompts without outputs, which then evict each other.
    num_blocks = len(references) * -(-longest // block_size)
    if company == "crowded":
        of_prompts = sorted(-(-len(reference.prompt_token_ids) // block_size) for reference in references)
        num_blocks = max(-(-longest // block_size), sum(of_prompts[-5:]))
    llm = LLM(
        str(model_path),
        block_size=block_size,
        long_prefill_token_threshold=chunk_size,
        max_model_len=longest,
        num_gpu_blocks_override=num_blocks,
        **engine_args,
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    preempted = _count_preemptions(llm)
    prompt_ids = [reference.prompt_token_ids for reference in references]
    difference = None
    if company == "alone":
        recorder = llm.model_runner.sampler = _RecordingSampler(llm.model_runner.sampler)
        outputs, difference = [], 0.0
        for reference in references:
            recorder.rows.clear()
            outputs += llm.generate(reference.prompt_token_ids, params, use_tqdm=False)
            own = outputs[-1].outputs[0].token_ids
            difference = max(difference, _largest_difference(recorder.rows, reference, own))
    else:
        outputs = llm.generate(prompt_ids, params, use_tqdm=False)
    ids = [output.outputs[0].token_ids for output in outputs]
    first = [_margin_of_first_difference(own, ref) for own, ref in zip(ids, references, strict=True)]
    differing = [margin for margin in first if margin is not None]
    return Outcome(len(first) - len(differing), len(first), len(preempted), difference, differing)


class _RecordingSampler:
    """A sampler that keeps the logits of the single row that each step samples from."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.rows: list[torch.Tensor] = []

    def __call__(self, logits: "torch.Tensor", metadata: Any) -> "torch.Tensor":
        self.rows.append(logits[0].float().cpu().clone())
        return self._sampler(logits, metadata)


def _largest_difference(rows: "list[torch.Tensor]", reference: Reference, token_ids: list[int]) -> float:
    """Over the positions that both reached with the same tokens."""
    largest = 0.0
    for row, expected, own, token_id in zip(rows, reference.logits, token_ids, reference.token_ids, strict=True):
        largest = max(largest, float((row - expected).abs().max()))
        if own != token_id:
            break
    return largest


def _margin_of_first_difference(token_ids: list[int], reference: Reference) -> float | None:
    for own, token_id, margin in zip(token_ids, reference.token_ids, reference.margins, strict=True):
        if own != token_id:
            return margin
    return None


def _count_preemptions(llm: "LLM") -> list[str]:
    """A list that grows by a request id with every preemption."""
    preempted: list[str] = []
    execute = llm.model_runner.execute_model

    def counting(message: Any) -> Any:
        preempted.extend(message.preempted_req_ids)
        return execute(message)

    llm.model_runner.execute_model = counting
    return preempted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m minivllm bench equality`."""
    parser.set_defaults(run=run)
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--num-prompts", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--attention-backend", default="auto", help="default: %(default)s")
    parser.add_argument("--json", metavar="OUT", help="write a result file")


def run(arguments: argparse.Namespace) -> int:
    """The whole matrix; exit code 1 if anything differs that must not."""
    from minivllm.bench.environment import describe_code
    from minivllm.bench.result_file import Measurement, ResultFile
    from minivllm.checkpoints import resolve

    package = Path(__file__).resolve().parents[1]
    folders = ("engine", "worker", "sample", "attention", "layers", "models")
    code = describe_code([path for folder in folders for path in sorted((package / folder).glob("*.py"))])
    model_path = resolve(arguments.model)
    dtype = arguments.dtype
    references = transformers_reference(model_path, prompts(), arguments.num_tokens, dtype, arguments.device)
    if dtype == "float32":
        references = [reference for reference in references if min(reference.margins) > FLOAT32_MARGIN]
    # Long prompts come last in the list and are what crowds a pool of large blocks: take from both ends.
    references = references[: arguments.num_prompts - 5] + references[-5:]
    print(f"{dtype}: {len(references)} prompts, {arguments.num_tokens} tokens each", file=sys.stderr)
    measurements = []
    for block_size, chunk_size, company in _configurations(dtype):
        start = time.perf_counter()
        options = {"dtype": dtype, "device": arguments.device, "attention_backend": arguments.attention_backend}
        outcome = run_configuration(model_path, references, block_size, chunk_size, company, **options)
        holds = _holds(outcome, dtype, company)
        name = f"{dtype} block {block_size} chunk {chunk_size or 'whole'} {company}"
        print(f"{name}: {outcome} {'' if holds else 'FAILED'}", file=sys.stderr, flush=True)
        measurements.append(
            Measurement.from_samples(
                name,
                [outcome.num_equal],
                shapes={"prompts": len(references), "output_tokens": arguments.num_tokens, "block_size": block_size},
                dtype=dtype,
                unit="equal outputs",
                warmup=0,
                extra={**vars(outcome), "holds": holds, "seconds": round(time.perf_counter() - start, 2)},
            )
        )
    is_good = all(measurement.extra["holds"] for measurement in measurements)
    result = ResultFile.record("equality", arguments.device, measurements, code, extra={"all_hold": is_good})
    if arguments.json:
        result.save(arguments.json)
    print("all configurations hold" if is_good else "some configurations FAILED")
    return 0 if is_good else 1


def _configurations(dtype: str) -> list[tuple[int, int, str]]:
    if dtype == "bfloat16":
        return [(16, 0, "alone"), (16, 0, "batch"), (16, 7, "batch"), (64, 16, "crowded")]
    return [(b, c, company) for b in BLOCK_SIZES for c in CHUNK_SIZES for company in COMPANIES]


def _holds(outcome: Outcome, dtype: str, company: str) -> bool:
    if company == "crowded" and outcome.num_preemptions == 0:
        return False
    if dtype == "bfloat16":
        return all(margin < BFLOAT16_MARGIN for margin in outcome.first_differences)
    close = outcome.max_logit_difference is None or outcome.max_logit_difference < 1e-3
    return close and outcome.num_equal == outcome.num_outputs
