"""The order of runs and the two ratios, on engines with made-up times."""

import pytest

from minivllm.bench.comparison import Timing, compare, run_in_turns
from minivllm.bench.peers import Run, padded_rows
from minivllm.bench.workloads import Workload

WORKLOAD = Workload(prompts=[[1, 2], [3]], output_lens=[2, 8], temperature=0.0)


class MadeUpEngine:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def run(self, workload: Workload) -> Run:
        self.log.append(self.name)
        return Run(1.0, 10, [[0] * length for length in workload.output_lens])


def timing(name: str, seconds: list[float], rows: int | None, ids: list[list[int]]) -> Timing:
    return Timing(name, num_output_tokens=100, runs=[Run(s, rows, ids) for s in seconds])


def test_engines_run_in_turns_and_ours_runs_last():
    log = []
    timings = run_in_turns([MadeUpEngine(name, log) for name in "abc"], WORKLOAD, warmup=1, repeats=3)
    assert "".join(log) == "abc" + "abc" + "abc" + "a"
    assert [len(t.runs) for t in timings] == [3, 2, 2]
    assert timings[0].throughput == 10.0


def test_a_single_repeat_runs_every_engine_once():
    log = []
    run_in_turns([MadeUpEngine(name, log) for name in "ab"], WORKLOAD, warmup=0, repeats=1)
    assert log == ["a", "b"]


def test_ratios_are_of_medians_against_the_faster_peer():
    ours = timing("minivllm", [2.0, 1.0, 100.0], rows=150, ids=[[1], [2]])
    slow = timing("slow", [8.0, 8.0], rows=400, ids=[[1], [2]])
    fast = timing("fast", [5.0, 5.0], rows=400, ids=[[1], [3]])
    result = compare(ours, [slow, fast])
    assert result["peer"] == "fast"
    assert result["throughput_ratio"] == pytest.approx(50 / 20)
    assert result["row_ratio"] == pytest.approx((150 / 2) / (400 / 5))
    assert result["identical_outputs"] == 1


def test_no_row_ratio_where_a_peer_does_not_count_rows():
    ours, peer = timing("minivllm", [1.0], 10, [[1]]), timing("vllm", [1.0], None, [[1]])
    assert compare(ours, [peer])["row_ratio"] is None


def test_rows_of_a_padded_batch():
    # Three rows of 5 prompt tokens, then 3 more steps: the fourth token comes from the third of them.
    assert padded_rows([5, 2, 1], num_new_tokens=4) == 3 * (5 + 3)
