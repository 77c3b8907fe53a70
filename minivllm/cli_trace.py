"""`python -m minivllm trace …` records what the engine does in each step; `… plot` draws a recording.

trace PROMPT …     the real engine answers, and is watched
trace --simulate   the real scheduler, a worker that only knows what a step costs, a clock that runs ahead
plot trace.json    timeline, blocks, budget or occupancy as a picture, or a file for ui.perfetto.dev
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.engine.trace import Trace

KINDS = ("timeline", "blocks", "budget", "occupancy", "chrome")


def add_trace(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", default_model: str) -> None:
    parser = commands.add_parser(
        "trace",
        help="record what the engine does in each step",
        description="Answer prompts and record what the engine does in each step, or simulate many requests. "
        "Look at the recording with `python -m minivllm plot`.",
    )
    parser.set_defaults(run=_trace)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to complete, all submitted at once")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the recording goes, as JSON")
    parser.add_argument("--simulate", action="store_true", help="no model and no prompts: simulate requests instead")
    parser.add_argument("--model", default=default_model, help="name, directory or Hub id (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="longest output (default: 32)")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a block (default: 16)")
    engine.add_argument("--num-blocks", type=int, default=256, metavar="N", help="blocks in the pool (default: 256)")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=256, metavar="N", help="token budget of a step (default: 256)"
    )
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="most running requests (default: 16)")

    simulation = parser.add_argument_group("with --simulate")
    simulation.add_argument("--num-requests", type=int, default=32, metavar="N", help="default: %(default)s")
    simulation.add_argument(
        "--rate", type=float, default=10.0, metavar="R", help="requests a second, Poisson (default: %(default)s)"
    )
    simulation.add_argument(
        "--prompt-tokens", type=int, default=200, metavar="N", help="longest prompt; the shortest has half of it"
    )
    simulation.add_argument(
        "--shared-tokens", type=int, default=0, metavar="N", help="tokens of a text in front of every prompt"
    )
    simulation.add_argument("--num-drafts", type=int, default=0, metavar="K", help="drafts a step (default: none)")
    simulation.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")


def add_plot(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plot",
        help="draw a recording",
        description="Draw a recording that `python -m minivllm trace` made. timeline: what each request did in each "
        "step; blocks: who held which block of the KV cache; budget: what the tokens of each step were; occupancy: "
        "what the cache held, against contiguous allocation; chrome: a JSON file to open in ui.perfetto.dev.",
    )
    parser.set_defaults(run=_plot)
    parser.add_argument("trace", metavar="TRACE", help="the recording")
    parser.add_argument("--kind", choices=KINDS, default="timeline", help="default: %(default)s")
    parser.add_argument("--out", metavar="FILE", help="picture or file to write (default: TRACE-KIND.png or .json)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first step to draw (default: 0)")
    parser.add_argument(
        "--steps", type=int, default=120, metavar="N", help="most steps to draw (default: %(default)s; not occupancy)"
    )


def _trace(arguments: argparse.Namespace) -> int:
    if arguments.simulate and arguments.prompts:
        raise ValueError("--simulate makes its own requests: leave out either it or the prompts")
    if not arguments.simulate and not arguments.prompts:
        raise ValueError("nothing to trace: give prompts, or --simulate")
    from minivllm.engine.trace_file import save_trace

    _require_directory(arguments.out)
    trace, code = _simulation(arguments) if arguments.simulate else _recording(arguments)
    with _writing(arguments.out):
        save_trace(trace, arguments.out)
    _print_summary(trace)
    print(f"recorded in {arguments.out}: see `python -m minivllm plot --help`", file=sys.stderr)
    return code


def _recording(arguments: argparse.Namespace) -> "tuple[Trace, int]":
    """The trace of the real engine, and the exit code; completions are printed."""
    from minivllm.cli import print_output
    from minivllm.engine.recorder import record
    from minivllm.llm import LLM
    from minivllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    llm = LLM(
        arguments.model,
        block_size=arguments.block_size,
        num_gpu_blocks_override=arguments.num_blocks,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_num_seqs=_max_num_seqs(arguments),
    )
    with record(llm.engine.scheduler) as trace:
        outputs = llm.generate(arguments.prompts, params, use_tqdm=False)
    for prompt, output in zip(arguments.prompts, outputs, strict=True):
        print_output(prompt, output, as_json=False)
    return trace, 2 if any(output.error for output in outputs) else 0


def _simulation(arguments: argparse.Namespace) -> "tuple[Trace, int]":
    from minivllm.engine.simulate import simulate
    from minivllm.engine.workload import make_workload, poisson_arrivals

    for name in ("num_requests", "prompt_tokens", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(arguments, name)}")
    for name in ("shared_tokens", "num_drafts"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(arguments, name)}")
    shared, own, output = arguments.shared_tokens, arguments.prompt_tokens, arguments.max_tokens
    workload = make_workload(
        poisson_arrivals(arguments.num_requests, arguments.rate, arguments.seed),
        prompt_lengths=(shared + (own + 1) // 2, shared + own),
        output_lengths=((output + 3) // 4, output),
        num_shared_tokens=shared,
        seed=arguments.seed,
    )
    trace = simulate(
        workload,
        num_blocks=arguments.num_blocks,
        block_size=arguments.block_size,
        max_model_len=shared + own + output,
        max_num_seqs=_max_num_seqs(arguments),
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        num_drafts=arguments.num_drafts,
        seed=arguments.seed,
    )
    return trace, 0


def _max_num_seqs(arguments: argparse.Namespace) -> int:
    """More requests than the budget has tokens could not all run: without a word from the user, fewer may."""
    if arguments.max_num_seqs is None:
        return max(1, min(16, arguments.max_num_batched_tokens))
    return arguments.max_num_seqs


def _print_summary(trace: "Trace") -> None:
    from minivllm.engine.trace_metrics import occupancy, percentile, summarise

    summary = summarise(trace)
    print(
        f"{summary.num_finished} of {summary.num_requests} requests finished in {summary.num_steps} steps and "
        f"{trace.duration:.2f} s ({trace.source}): {summary.output_tokens_per_second:.1f} tok/s",
        file=sys.stderr,
    )
    for label, times in (
        ("time to first token", summary.times_to_first_token),
        ("time per output token", summary.times_per_output_token),
        ("end-to-end latency", summary.end_to_end_latencies),
    ):
        if times:
            median, tail = percentile(times, 50) * 1e3, percentile(times, 99) * 1e3
            print(f"    {label}: median {median:.1f} ms, 99th percentile {tail:.1f} ms", file=sys.stderr)
    print(
        f"    {summary.num_preemptions} preemptions, {summary.num_recomputed_tokens} tokens recomputed, prefix cache "
        f"hit rate {summary.hit_rate:.0%}, {occupancy(trace).shares[0]:.0%} of the reserved slots held a token",
        file=sys.stderr,
    )


def _plot(arguments: argparse.Namespace) -> int:
    from minivllm.engine.trace_file import load_trace, save_chrome_trace

    trace = load_trace(arguments.trace)
    if not 0 <= arguments.first < len(trace.steps):
        raise ValueError(f"--first {arguments.first}: {arguments.trace} holds {len(trace.steps)} steps")
    if arguments.steps < 1:
        raise ValueError(f"--steps must be 1 or more, not {arguments.steps}")
    suffix = "json" if arguments.kind == "chrome" else "png"
    out = arguments.out or str(Path(arguments.trace).with_suffix("")) + f"-{arguments.kind}.{suffix}"
    _require_directory(out)
    with _writing(out):
        if arguments.kind == "chrome":
            save_chrome_trace(trace, out)
        else:
            _save_figure(trace, arguments.kind, arguments.first, arguments.steps, out)
    print(out)
    return 0


def _save_figure(trace: "Trace", kind: str, first: int, num_steps: int, out: str) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError('plot needs matplotlib: pip install "minivllm[notebooks]"') from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from minivllm.engine import trace_metrics, trace_views
    from minivllm.plotting import cache, timeline
    from minivllm.plotting.style import use_style

    use_style()
    end = min(first + num_steps, len(trace.steps))
    shown = "" if end - first == len(trace.steps) else f" (steps {first} to {end - 1} of {len(trace.steps)})"
    if kind == "timeline":
        summary = trace_metrics.summarise(trace)
        title = f"{summary.num_requests} requests, {summary.num_preemptions} preemptions{shown}"
        fig, _ = timeline.request_timeline(trace_views.timeline(trace, first, end), title)
    elif kind == "budget":
        use = trace_metrics.budget_use(trace)[first:end]
        title = f"Of the token budget {sum(use) / len(use):.0%} is used{shown}"
        parts = {part: counts[first:end] for part, counts in trace_metrics.tokens_by_part(trace).items()}
        fig, _ = timeline.token_budget(parts, trace.max_num_batched_tokens, title, first)
    elif kind == "blocks":
        most = max(event.num_used_blocks for event in trace.steps[first:end])
        title = f"At most {most} of {trace.num_blocks} blocks are held{shown}"
        spans = trace_views.block_spans(trace)
        fig, _ = cache.blocks_over_time(spans, list(trace.requests), trace.num_blocks, end - first, title, first)
    else:
        occupancy = trace_metrics.occupancy(trace)
        title = f"Of the slots reserved {occupancy.shares[0]:.0%} hold a token"
        fig, _ = cache.cache_occupancy(occupancy, title, trace.duration)
    fig.savefig(out)
    plt.close(fig)


def _require_directory(path: str) -> None:
    """A file that cannot be written is better refused before the work than after it."""
    if not Path(path).parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no directory {Path(path).parent}")


@contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
