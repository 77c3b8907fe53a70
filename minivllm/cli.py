"""`python -m minivllm …`: generate text, trace and draw steps, fetch and list models, run benchmarks.

Text goes to stdout, everything about it (progress, speed, errors) to stderr. Errors are one line and exit code 2;
Ctrl-C ends with 130; the death of a pipeline's stage, told with its traceback or signal, with 1.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm import cli_trace
from minivllm.engine.batch_queue import StageDied
from minivllm.engine.spec_stats import SpecDecodeStats

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.outputs import RequestOutput
    from minivllm.sampling_params import SamplingParams

DEFAULT_MODEL = "tiny-deepseek"
GEMM_FAMILIES, MOE_FAMILIES = ("bf16", "fp8_block", "fp8_token", "int8"), ("bf16", "fp8_block")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ValueError as error:
        print(f"minivllm: error: {error}", file=sys.stderr)
        return 2
    except StageDied as error:
        print(f"minivllm: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nminivllm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has left (`| head`); there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minivllm", description="An LLM inference engine to learn from: generate text and look inside."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_generate(commands)
    cli_trace.add_trace(commands, DEFAULT_MODEL)
    cli_trace.add_plot(commands)
    fetch = commands.add_parser(
        "fetch", help="download a named model", description="Download a named model and print its directory."
    )
    fetch.add_argument("name", help="a name that `models` lists")
    fetch.set_defaults(run=_fetch)
    models = commands.add_parser("models", help="list the named models", description="List the named models.")
    models.set_defaults(run=_models)
    bench = commands.add_parser(
        "bench", help="measure and write result files", description="Measure and write result files."
    )
    bench_commands = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    from minivllm.bench import engine, equality, parallel, perplexity, scheduler, speculation, speculation_equality

    engine.add_arguments(bench_commands.add_parser("engine", help="throughput of the whole engine, with peers"))
    _add_kernels(bench_commands.add_parser("kernels", help="the attention kernels at well-known shapes, with peers"))
    _add_products(bench_commands, "gemm", "matrix products in 16 and 8 bits, with the libraries", GEMM_FAMILIES)
    _add_products(bench_commands, "moe", "the experts of a layer, with peers", MOE_FAMILIES)
    equality.add_arguments(bench_commands.add_parser("equality", help="greedy tokens against transformers'"))
    parallel.add_arguments(bench_commands.add_parser("parallel", help="greedy tokens of pipelines against one process"))
    perplexity.add_arguments(bench_commands.add_parser("perplexity", help="what each format costs a model"))
    scheduler.add_arguments(bench_commands.add_parser("scheduler", help="a step's cost before any model runs"))
    speculation.add_arguments(bench_commands.add_parser("speculation", help="decoding with drafts against plain"))
    speculation_equality.add_arguments(
        bench_commands.add_parser("speculation-equality", help="greedy tokens with drafts against those without")
    )
    return parser


def _add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="complete prompts",
        description="Complete prompts. One prompt is streamed as it is written; several run as a batch.",
    )
    parser.set_defaults(run=_generate)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="the text to complete")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, directory or Hub id (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="treat each prompt as a question to an instruct model")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="default: all tokens")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: all tokens")
    sampling.add_argument("--seed", type=int, metavar="S", help="makes a sampled text repeatable")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    engine.add_argument("--device", default="auto", help="auto, cpu or cuda")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt and output together")
    engine.add_argument("--block-size", type=int, metavar="N", help="tokens in one KV cache block")
    engine.add_argument("--quantization", choices=("fp8", "fp8_block", "int8"), help="default: none")
    engine.add_argument("--attention-backend", default="auto", help="auto, torch or reference")
    engine.add_argument("--pipeline-parallel-size", type=int, default=1, metavar="N", help="stages (default: 1)")
    engine.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks a layer (default: 1)")
    engine.add_argument("--pp-token-feedback", choices=("scheduler", "broadcast"), default="scheduler",
                        help="how stages learn what was sampled (default: %(default)s)")  # fmt: skip
    engine.add_argument("--speculate", metavar="METHOD", help="ngram, draft_model or mtp (default: no drafts)")
    engine.add_argument("--num-speculative-tokens", type=int, default=4, metavar="K", help="drafts a step (default: 4)")
    engine.add_argument("--draft-model", metavar="MODEL", help="for --speculate draft_model: name, directory or Hub id")


def _generate(arguments: argparse.Namespace) -> int:
    from minivllm.llm import LLM
    from minivllm.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
    )
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        block_size=arguments.block_size,
        quantization=arguments.quantization,
        attention_backend=arguments.attention_backend,
        speculative_config=_speculative_config(arguments),
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        tensor_parallel_size=arguments.tensor_parallel_size,
        pp_token_feedback=arguments.pp_token_feedback,
    )
    prompts = arguments.prompts
    if arguments.chat:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    start = time.perf_counter()
    if len(prompts) == 1 and not arguments.json:
        outputs = [_print_stream(llm, prompts[0], params)]
    else:
        run = llm.chat if arguments.chat else llm.generate
        outputs = run(prompts, params, use_tqdm=sys.stderr.isatty())
        for prompt, output in zip(arguments.prompts, outputs, strict=True):
            print_output(prompt, output, arguments.json)
    _print_speed(outputs, time.perf_counter() - start)
    return 2 if any(output.error for output in outputs) else 0


def _speculative_config(arguments: argparse.Namespace) -> dict[str, object] | None:
    if arguments.speculate is None:
        if arguments.draft_model is not None:
            raise ValueError("--draft-model needs --speculate draft_model")
        return None
    settings = {"method": arguments.speculate, "num_speculative_tokens": arguments.num_speculative_tokens}
    return settings if arguments.draft_model is None else {**settings, "model": arguments.draft_model}


def _print_stream(llm: "LLM", prompt: "str | list[dict[str, str]]", params: "SamplingParams") -> "RequestOutput":
    with llm.stream(prompt, params) as stream:
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        return stream.output


def print_output(prompt: str, output: "RequestOutput", as_json: bool) -> None:
    if as_json:
        record = dataclasses.asdict(output)
        record["prompt"] = prompt
        print(json.dumps(record, ensure_ascii=False))
    elif output.error:
        print(f"minivllm: error: {prompt!r}: {output.error}", file=sys.stderr)
    else:
        print(f"--- {prompt}\n{output.outputs[0].text}")


def _print_speed(outputs: "list[RequestOutput]", seconds: float) -> None:
    done = [output for output in outputs if not output.error]
    num_tokens = sum(len(output.outputs[0].token_ids) for output in done)
    first = min((output.metrics.time_to_first_token for output in done), default=0.0)
    print(
        f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tok/s, first token after {first:.3f} s",
        file=sys.stderr,
    )
    drafts = SpecDecodeStats.total(output.spec_decode for output in done if output.spec_decode)
    if drafts.num_verifications:
        print(
            f"{drafts.num_accepted} of {drafts.num_drafted} drafts accepted ({drafts.acceptance_rate:.0%}), "
            f"{drafts.mean_acceptance_length:.2f} tokens a verification",
            file=sys.stderr,
        )


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    """Declared here, so that help needs no Triton."""
    parser.set_defaults(run=_bench_kernels)
    parser.add_argument("--family", choices=("flash", "paged", "mla"), help="default: all three")
    parser.add_argument("--json", metavar="OUT", help="write a result file")


def _add_products(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str, families: tuple[str, ...]
) -> None:
    parser = commands.add_parser(name, help=what)
    parser.set_defaults(run=_bench_products, benchmark=name)
    parser.add_argument("--family", choices=families, help="default: all of them")
    parser.add_argument("--remark", help="what a reader of the result file should know of this run, such as of a peer")
    parser.add_argument("--json", metavar="OUT", help="write a result file")


def _bench_products(arguments: argparse.Namespace) -> int:
    module = importlib.import_module(f"minivllm.bench.{arguments.benchmark}")
    return module.run(arguments)


def _bench_kernels(arguments: argparse.Namespace) -> int:
    from minivllm.bench.kernels import run

    return run(arguments)


def _fetch(arguments: argparse.Namespace) -> int:
    from minivllm.checkpoints import fetch

    print(fetch(arguments.name))
    return 0


def _models(arguments: argparse.Namespace) -> int:
    from minivllm.checkpoints import list_models

    for model in list_models():
        where = "in the package" if model.shipped else "in the cache" if model.cached else "not fetched yet"
        print(f"{model.name}  ({where})")
        print(f"    {model.description}\n    {model.size}; {model.source}; licence {model.licence}")
    return 0
