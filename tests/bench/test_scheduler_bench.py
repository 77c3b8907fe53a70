"""`bench scheduler` from the command line: what it measures, and what it writes."""

import pytest

from minivllm.bench.result_file import load
from minivllm.bench.scheduler import decoding_scheduler
from minivllm.cli import main


def test_the_batch_that_is_measured_decodes_and_some_of_it_opens_a_block_in_every_step():
    scheduler = decoding_scheduler(num_requests=32, context=64, num_steps=20)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {str(index): 1 for index in range(32)}
    assert sum(map(len, output.scheduled_cached_reqs.new_block_ids)) == 2


def test_a_step_is_measured_at_both_contexts(tmp_path, capsys):
    out = tmp_path / "cost.json"
    assert main(["bench", "scheduler", "--num-requests=4", "--warmup=1", "--repeats=5", f"--json={out}"]) == 0
    result = load(out)
    assert [m.name for m in result.measurements] == ["4 decodes at context 64", "4 decodes at context 4096"]
    assert all(m.median > 0 and m.repeats == 5 for m in result.measurements)
    assert "context 4096 / context 64: " in capsys.readouterr().out


def test_histories_are_run_and_counted(tmp_path):
    out = tmp_path / "histories.json"
    assert main(["bench", "scheduler", "--histories=20", f"--json={out}"]) == 0
    measured = load(out).measurement("histories")
    assert measured.extra["histories"] >= 20 and measured.extra["tokens"] > 0


@pytest.mark.parametrize("option", ["--num-requests=0", "--warmup=-1", "--repeats=0", "--histories=-1"])
def test_numbers_that_cannot_work_are_refused_by_name(option, capsys):
    assert main(["bench", "scheduler", option]) == 2
    assert f"{option.split('=')[0]} must be at least" in capsys.readouterr().err
