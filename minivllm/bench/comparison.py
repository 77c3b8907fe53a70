"""Running engines in alternation, and what their times say about each other.

Machines get warmer, and other work comes and goes; what runs a minute later is not comparable, what runs in turns is:

    minivllm, peer A, peer B, minivllm, peer A, peer B, minivllm

Two ratios are taken, both of medians, both above 1 where minivllm is faster:

    throughput_ratio   output tokens that were asked for, per second: what a user gets
    row_ratio          rows computed per second, useful or not: what is left when the padding is taken out of the
                       peer's account. At 1 both compute a row equally fast, and all of the throughput ratio comes
                       from rows that minivllm does not compute
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.bench.peers import Engine, Run
from minivllm.bench.result_file import quartiles
from minivllm.bench.workloads import Workload


@dataclass
class Timing:
    """All timed runs of one engine on a workload with so many output tokens."""

    name: str
    num_output_tokens: int
    runs: list[Run] = field(default_factory=list)

    @property
    def throughputs(self) -> list[float]:
        """Output tokens that were asked for, per second, for each run."""
        return [self.num_output_tokens / run.seconds for run in self.runs]

    @property
    def throughput(self) -> float:
        """The median."""
        return quartiles(self.throughputs)[1]

    @property
    def rows_per_second(self) -> float | None:
        """The median; None where the engine does not say how many rows it computes."""
        rates = [run.num_rows / run.seconds for run in self.runs if run.num_rows is not None]
        return quartiles(rates)[1] if rates else None


def run_in_turns(
    engines: Sequence[Engine],
    workload: Workload,
    warmup: int,
    repeats: int,
    report: Callable[[str], None] = lambda line: None,
) -> list[Timing]:
    """Time the engines; the first is ours.

    Args:
        warmup: untimed runs of each engine.
        repeats: timed runs of the first engine; the others run in the gaps between, but at least once.
        report: is told about each run in a line.
    """
    for engine in engines:
        for _ in range(warmup):
            report(f"warm-up  {engine.name}: {engine.run(workload).seconds:.2f} s")
    timings = [Timing(engine.name, workload.num_output_tokens) for engine in engines]
    for turn in range(repeats):
        for engine, timing in zip(engines, timings, strict=True):
            is_last_of_several = turn == repeats - 1 and repeats > 1
            if is_last_of_several and engine is not engines[0]:
                continue
            run = engine.run(workload)
            timing.runs.append(run)
            report(f"run {turn + 1}    {engine.name}: {run.seconds:.2f} s, {timing.throughputs[-1]:.1f} tok/s")
    return timings


def compare(ours: Timing, peers: Sequence[Timing]) -> dict[str, Any]:
    """The two ratios against the fastest peer, ready for JSON.

    `identical_outputs` counts requests that got the same ids from both; it means something for greedy requests with
    the same weights only.
    """
    peer = max(peers, key=lambda timing: timing.throughput)
    our_rows, peer_rows = ours.rows_per_second, peer.rows_per_second
    pairs = zip(ours.runs[-1].token_ids, peer.runs[-1].token_ids, strict=True)
    return {
        "peer": peer.name,
        "throughput_ratio": ours.throughput / peer.throughput,
        "row_ratio": our_rows / peer_rows if our_rows and peer_rows else None,
        "identical_outputs": sum(mine == theirs for mine, theirs in pairs),
        "throughput_ratio_means": "output tokens that were asked for, per second: minivllm / peer",
        "row_ratio_means": (
            "rows computed per second: minivllm / peer; rows count every token of every forward pass, with the peer's "
            "padding and the tokens it computes after a request's end"
        ),
    }
