"""`python -m minivllm bench perplexity`: what a format costs a language model, on text that it has not seen.

    text -> tokens -> windows -> the engine's prompt_logprobs -> mean loss of a token -> perplexity = exp(mean loss)

A window is a stretch of `context` tokens, one prompt; all of its tokens but the first are predicted. Windows lie
evenly over the text, and every format reads the same ones. So the increase over bfloat16 is a difference of pairs,
and far better known than either perplexity; its standard error is taken over windows.

The file holds the text's hash and length, not the text. A format that costs more than `--limit` fails the run.
"""

import argparse
import hashlib
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.bench.environment import Code
    from minivllm.bench.result_file import Measurement, ResultFile
    from minivllm.llm import LLM

BASELINE = "bfloat16"
QUANTIZATIONS = ("fp8", "fp8_block", "int8")
SCHEMES = ("float32", BASELINE, *QUANTIZATIONS)
"""A dtype, or a quantization of a model that computes in bfloat16."""
LIMIT = 0.03
_SOURCES = ("attention", "gemm", "layers", "models", "moe", "sample", "worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m minivllm bench perplexity`."""
    parser.set_defaults(run=run)
    parser.add_argument("--text", required=True, metavar="FILE", help="held-out text, UTF-8")
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--context", type=int, default=256, metavar="N", help="tokens a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=LIMIT, help="highest relative increase (default: %(default)s)")
    parser.add_argument("--json", metavar="OUT", help="write a result file")


def run(arguments: argparse.Namespace) -> int:
    """Measure every scheme, print a line for each, write the result file; 1 where one costs more than the limit."""
    from minivllm.bench.environment import describe_code

    for option, lowest in (("context", 2), ("windows", 2)):
        if getattr(arguments, option) < lowest:
            raise ValueError(f"--{option} must be at least {lowest}, not {getattr(arguments, option)}")
    text = _read(arguments.text)
    package = Path(__file__).resolve().parents[1]
    code = describe_code([path for folder in _SOURCES for path in sorted((package / folder).glob("*.py"))])
    result = measure(
        arguments.model, text, arguments.context, arguments.windows, arguments.device, arguments.limit, code
    )
    if arguments.json:
        result.save(arguments.json)
    holds = result.extra["all_hold"]
    print(
        f"every format is within {arguments.limit:.0%}" if holds else f"a format costs more than {arguments.limit:.0%}"
    )
    return 0 if holds else 1


def measure(
    model: str, text: str, context: int, num_windows: int, device: str, limit: float, code: "Code"
) -> "ResultFile":
    """All schemes of one model on the same windows of `text`."""
    from minivllm.bench.result_file import ResultFile

    name, found = Path(model).name, {}
    for scheme in SCHEMES:
        found[scheme] = _measure_scheme(model, text, context, num_windows, device, scheme)
    baseline = found[BASELINE][0]
    measurements = []
    for scheme, (losses, extra) in found.items():
        increase, error = relative_increase(losses, baseline)
        extra |= {"relative_increase": increase, "standard_error": error, "holds": increase <= limit}
        measurements.append(_measurement(name, scheme, losses, context, extra))
        size, kept = sum(extra["weight_bytes"].values()) / 1e6, len(extra["not_quantized"])
        print(
            f"{name}/{scheme:9} perplexity {measurements[-1].median:8.3f}  {increase:+.2%} (+- {error:.2%})  "
            f"{size:6.1f} MB of weights, {kept} layers kept, {extra['seconds']:.1f} s",
            flush=True,
        )
    about_text = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "characters": len(text)}
    extra = {"text": about_text, "limit": limit, "all_hold": all(m.extra["holds"] for m in measurements)}
    return ResultFile.record(f"perplexity_{name}", device, measurements, code, extra)


def _measure_scheme(
    model: str, text: str, context: int, num_windows: int, device: str, scheme: str
) -> tuple[list[float], dict]:
    """The loss of each window, and what else is worth keeping."""
    from minivllm.bench.weights import weight_bytes
    from minivllm.llm import LLM

    is_quantized = scheme in QUANTIZATIONS
    llm = LLM(
        model,
        device=device,
        dtype=BASELINE if is_quantized else scheme,
        quantization=scheme if is_quantized else None,
        max_model_len=context + 1,
    )
    windows = cut_windows(llm.tokenizer.encode(text, add_special_tokens=False, verbose=False), context, num_windows)
    start = time.perf_counter()
    losses = window_losses(llm, windows)
    extra = {
        "seconds": round(time.perf_counter() - start, 1),
        "not_quantized": llm.model_runner.model.not_quantized,
        "weight_bytes": weight_bytes(llm.model_runner.model),
    }
    return losses, extra


def cut_windows(token_ids: Sequence[int], context: int, num_windows: int) -> list[list[int]]:
    """Windows of `context` tokens that do not overlap, spread evenly over the text.

    Raises ValueError where the text is too short.
    """
    if len(token_ids) < context * num_windows:
        raise ValueError(
            f"{num_windows} windows of {context} tokens need {context * num_windows}, the text has {len(token_ids)}: "
            "use a longer text, or fewer --windows"
        )
    starts = [index * len(token_ids) // num_windows for index in range(num_windows)]
    return [list(token_ids[start : start + context]) for start in starts]


def window_losses(llm: "LLM", windows: Sequence[list[int]]) -> list[float]:
    """For each window the mean of -log p over its tokens but the first, in nats, as the engine reports it."""
    from minivllm.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
    losses = []
    for output in llm.generate(windows, params, use_tqdm=False):
        after_the_first = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        losses.append(-statistics.fmean(entry[token_id].logprob for token_id, entry in after_the_first))
    return losses


def relative_increase(losses: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """By which share the perplexity exceeds the baseline's on the same windows, and the standard error of that."""
    differences = [loss - other for loss, other in zip(losses, baseline, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    return ratio - 1, ratio * statistics.stdev(differences) / math.sqrt(len(differences))


def _measurement(name: str, scheme: str, losses: list[float], context: int, extra: dict) -> "Measurement":
    from minivllm.bench.result_file import Measurement

    return Measurement.from_samples(
        f"{name}/{scheme}",
        [math.exp(statistics.fmean(losses))],
        shapes={"windows": len(losses), "context": context, "predicted_tokens": len(losses) * (context - 1)},
        dtype=BASELINE if scheme in QUANTIZATIONS else scheme,
        unit="perplexity",
        warmup=0,
        extra=extra,
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--text {path} cannot be read as UTF-8 text ({error}): give the path of a text file"
        ) from None
