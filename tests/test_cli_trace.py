"""`trace` records, `plot` draws: what goes where, and how errors read."""

import json
import subprocess
import sys

import matplotlib.image
import pytest
from test_cli import run
from tiny_chat_model import save_tiny_chat_model

from minivllm.engine.trace_file import load_trace


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory):
    """A simulation with drafts, a shared prefix and preemptions."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    command = f"trace --simulate --out {path} --num-requests 12 --rate 200 --num-blocks 24 --shared-tokens 20"
    done = subprocess.run(
        [sys.executable, "-m", "minivllm", *command.split(), "--num-drafts", "2"], capture_output=True, check=True
    )
    assert done.stdout == b"" and b"12 of 12 requests finished" in done.stderr
    return str(path)


def test_the_real_engine_is_recorded_while_it_answers(capsys, model_path, tmp_path):
    out = str(tmp_path / "trace.json")
    code, stdout, stderr = run(
        capsys, "trace", "--model", model_path, "--out", out, "--max-tokens", "5", "--block-size", "4",
        "--num-blocks", "32", "--max-num-batched-tokens", "6", "--max-num-seqs", "2", "Wolf", "Woods",
    )  # fmt: skip
    trace = load_trace(out)
    assert code == 0 and stdout.startswith("--- Wolf\n") and "\n--- Woods\n" in stdout
    assert (trace.source, trace.block_size, trace.num_blocks, trace.max_num_batched_tokens) == ("engine", 4, 32, 6)
    assert [request.num_prompt_tokens for request in trace.requests.values()] == [4, 5]
    assert trace.steps[0].num_scheduled_tokens == 6
    assert "2 of 2 requests finished" in stderr and "time to first token: median" in stderr


def test_a_bad_prompt_is_reported_and_the_others_are_recorded(capsys, model_path, tmp_path):
    out = str(tmp_path / "trace.json")
    code, stdout, stderr = run(capsys, "trace", "--model", model_path, "--out", out, "--max-tokens", "3", "b", "")
    assert code == 2 and stdout.startswith("--- b\n")
    assert "minivllm: error: '': the prompt is empty" in stderr
    assert len(load_trace(out).requests) == 1


def test_a_simulation_does_what_its_options_say(trace_path):
    trace = load_trace(trace_path)
    assert (trace.source, len(trace.requests), trace.num_blocks) == ("simulation", 12, 24)
    assert any(event.preempted for event in trace.steps)
    assert any(row.num_drafts == 2 for event in trace.steps for row in event.scheduled)
    assert {hit for event in trace.steps[1:] for hit, _ in event.prefix_hits.values()} >= {16}


def test_the_same_seed_records_the_same_simulation(capsys, tmp_path):
    for name in ("a", "b"):
        run(capsys, "trace", "--simulate", "--seed", "3", "--num-requests", "4", "--out", str(tmp_path / name))
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()


def test_a_small_budget_lowers_the_number_of_running_requests_by_itself(capsys, tmp_path):
    out = str(tmp_path / "trace.json")
    code, _, _ = run(capsys, "trace", "--simulate", "--out", out, "--max-num-batched-tokens", "5")
    assert code == 0 and load_trace(out).max_num_seqs == 5


@pytest.mark.parametrize("kind", ["timeline", "blocks", "budget", "occupancy"])
def test_each_kind_of_plot_is_a_picture_beside_the_trace(capsys, trace_path, kind):
    code, stdout, stderr = run(capsys, "plot", trace_path, "--kind", kind)
    assert (code, stderr) == (0, "")
    assert stdout == trace_path.removesuffix(".json") + f"-{kind}.png\n"
    height, width, _ = matplotlib.image.imread(stdout.strip()).shape
    assert width == 700 and 200 < height <= 800


def test_the_timeline_is_the_default_and_out_says_where_to(capsys, trace_path, tmp_path):
    out = str(tmp_path / "picture.svg")
    code, stdout, _ = run(capsys, "plot", trace_path, "--first", "3", "--steps", "10", "--out", out)
    assert (code, stdout) == (0, f"{out}\n")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_perfetto_gets_its_own_file(capsys, trace_path):
    code, stdout, _ = run(capsys, "plot", trace_path, "--kind", "chrome")
    assert code == 0 and stdout.endswith("-chrome.json\n")
    with open(stdout.strip()) as file:
        assert json.load(file)["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "--out", "{tmp}/t.json"], "nothing to trace: give prompts, or --simulate"),
        (["trace", "--out", "{tmp}/t.json", "--simulate", "x"], "--simulate makes its own requests"),
        (["trace", "--out", "{tmp}/no/t.json", "--simulate"], "there is no directory"),
        (["trace", "--out", "{tmp}", "--simulate"], "Is a directory"),
        (["trace", "--out", "{tmp}/t.json", "--model", "gpt-9", "x"], "unknown model 'gpt-9'"),
        (["trace", "--out", "{tmp}/t.json", "--simulate", "--block-size", "0"], "block_size must be a positive"),
        (["trace", "--out", "{tmp}/t.json", "--simulate", "--num-blocks", "2"], "lower max_model_len to at most 32"),
        (["trace", "--out", "{tmp}/t.json", "--simulate", "--num-requests", "0"], "--num-requests must be 1 or more"),
        (["trace", "--out", "{tmp}/t.json", "--simulate", "--shared-tokens", "-1"], "--shared-tokens must be 0"),
        (["trace", "--out", "{tmp}/t.json", "--simulate", "--num-drafts", "-1"], "--num-drafts must be 0 or more"),
        (["trace", "--out", "{tmp}/t.json", "--simulate", "--rate", "0"], "rate must be positive"),
        (["trace", "--out", "{tmp}/t.json", "--simulate", "--max-num-batched-tokens", "0"], "max_num_batched_tokens"),
        (["plot", "{tmp}/none.json"], "No such file"),
        (["plot", "{trace}", "--first", "100000"], "steps"),
        (["plot", "{trace}", "--steps", "0"], "--steps must be 1 or more"),
        (["plot", "{trace}", "--out", "{tmp}/no/x.png"], "there is no directory"),
        (["plot", "{trace}", "--out", "{tmp}/x.xyz"], "xyz"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(capsys, arguments, message, tmp_path, trace_path):
    code, out, err = run(capsys, *(argument.format(tmp=tmp_path, trace=trace_path) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("minivllm: error: ") and err.count("\n") == 1
    assert message in err


def test_a_file_that_is_no_trace_is_named(capsys, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    code, _, err = run(capsys, "plot", str(tmp_path / "other.json"))
    assert code == 2 and f"{tmp_path / 'other.json'} is no trace" in err


def test_plot_without_matplotlib_says_what_to_install(capsys, trace_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "plot", trace_path)
    assert code == 2 and 'pip install "minivllm[notebooks]"' in err


@pytest.mark.parametrize("command", ["trace", "plot"])
def test_help_is_there(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and out.startswith(f"usage: python -m minivllm {command}")


def test_simulating_and_plotting_need_no_torch(tmp_path):
    out = tmp_path / "trace.json"
    code = (
        "import sys; from minivllm.cli import main\n"
        f"assert main(['trace', '--simulate', '--num-requests', '3', '--out', {str(out)!r}]) == 0\n"
        f"assert main(['plot', {str(out)!r}]) == 0\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
