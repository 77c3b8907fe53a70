"""The command line: what goes to stdout, what to stderr, and how it ends."""

import json
import signal
import subprocess
import sys
import time

import pytest
from tiny_chat_model import save_tiny_chat_model

from minivllm.cli import main


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("tiny")))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_prompt_is_streamed_and_its_speed_told_on_stderr(capsys, model_path):
    code, out, err = run(capsys, "generate", "--model", model_path, "--max-tokens", "8", "--ignore-eos", "Wolf")
    assert code == 0
    assert out.endswith("\n") and len(out) > 1
    assert "8 tokens in" in err and "tok/s, first token after" in err


def test_several_prompts_give_what_each_gives_alone(capsys, model_path):
    options = ("--model", model_path, "--max-tokens", "8", "--ignore-eos", "--json")
    _, together, _ = run(capsys, "generate", *options, "Wolf", "b")
    alone = [run(capsys, "generate", *options, prompt)[1] for prompt in ("Wolf", "b")]
    ids = [json.loads(line)["outputs"][0]["token_ids"] for line in together.splitlines()]
    assert ids == [json.loads(line)["outputs"][0]["token_ids"] for line in alone]


def test_json_is_one_object_a_prompt_with_everything_in_it(capsys, model_path):
    code, out, _ = run(
        capsys, "generate", "--model", model_path, "--max-tokens", "4", "--temperature", "0.9", "--seed", "1",
        "--stop", "zzz", "--json", "Wölfe", "b",
    )  # fmt: skip
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [record["prompt"] for record in records] == ["Wölfe", "b"]
    assert all(record["outputs"][0]["finish_reason"] in ("length", "stop") for record in records)
    assert all(record["metrics"]["time_to_first_token"] > 0 for record in records)


def test_chat_goes_through_the_template(capsys, model_path):
    _, out, _ = run(capsys, "generate", "--model", model_path, "--max-tokens", "2", "--chat", "--json", "Hi")
    assert len(json.loads(out)["prompt_token_ids"]) == len("<user>Hi<assistant>")


def test_one_bad_prompt_is_reported_and_the_other_is_printed(capsys, model_path):
    code, out, err = run(capsys, "generate", "--model", model_path, "--max-tokens", "4", "--ignore-eos", "b", "")
    assert code == 2
    assert out.startswith("--- b\n")
    assert "minivllm: error: '': the prompt is empty" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model", "x"], "unknown model 'no-such-model'; known names: tiny-deepseek, "),
        (["--temperature", "-1", "x"], "temperature must be 0 (greedy) or positive, not -1.0"),
        (["--top-p", "0", "x"], "top_p must be in (0, 1]"),
        (["--max-tokens", "0", "x"], "max_tokens must be 1 or more"),
        (["--stop", "", "x"], "stop must not hold an empty string"),
        (["--block-size", "0", "x"], "block_size must be a positive whole number"),
        (["--attention-backend", "cuda", "x"], "attention_backend must be one of"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, "generate", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("minivllm: error: ") and err.count("\n") == 1
    assert message in err


def test_a_directory_without_a_config_is_named(capsys, tmp_path):
    code, _, err = run(capsys, "generate", "--model", str(tmp_path), "x")
    assert code == 2 and f"{tmp_path} has no config.json" in err


def test_a_missing_prompt_shows_the_usage(capsys):
    code, _, err = run(capsys, "generate")
    assert code == 2 and "PROMPT" in err


@pytest.mark.parametrize("command", [[], ["generate"], ["fetch"], ["models"], ["bench"], ["bench", "engine"]])
def test_help_is_there_for_every_command(capsys, command):
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0 and out.startswith("usage: python -m minivllm")


def test_models_lists_names_sizes_and_licences(capsys):
    code, out, _ = run(capsys, "models")
    assert code == 0
    assert "smollm2-135m" in out and "Apache-2.0" in out
    assert [line for line in out.splitlines() if line.startswith("tiny-")] == [
        "tiny-deepseek  (in the package)",
        "tiny-qwen3  (in the package)",
        "tiny-qwen3-draft  (in the package)",
    ]


def test_without_a_model_named_the_one_in_the_package_continues_a_text_and_nothing_is_fetched(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    code, out, err = run(capsys, "generate", "--max-tokens", "8", "Once upon a time")
    assert code == 0 and len(out.split()) >= 4 and "8 tokens in" in err
    assert not (tmp_path / "cache").exists()


def test_the_default_model_does_not_chat_and_says_which_one_does(capsys):
    code, out, err = run(capsys, "generate", "--chat", "Why is the sky blue?")
    assert (code, out) == (2, "") and "not trained to chat" in err and "smollm2-135m" in err


@pytest.mark.parametrize(
    ("model", "drafter"),
    [
        ("tiny-deepseek", ("--speculate", "mtp", "--num-speculative-tokens", "3")),
        ("tiny-qwen3", ("--speculate", "draft_model", "--draft-model", "tiny-qwen3-draft")),
    ],
)
def test_drafts_of_shipped_models_change_no_token_and_are_counted(capsys, model, drafter):
    command = ("generate", "--model", model, "--max-tokens", "24", "--dtype", "float32", "--json", "Once upon a time")
    plain, drafted = (json.loads(run(capsys, *command, *options)[1]) for options in ((), drafter))
    assert drafted["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    assert sum(drafted["spec_decode"]["accepted"]) > 0 and plain["spec_decode"] is None


def test_fetching_a_shipped_model_prints_its_directory(capsys):
    code, out, _ = run(capsys, "fetch", "tiny-deepseek")
    assert code == 0 and out.rstrip().endswith("tiny-deepseek")


def test_fetch_refuses_an_unknown_name(capsys):
    code, _, err = run(capsys, "fetch", "gpt-9")
    assert code == 2 and "unknown model name 'gpt-9'" in err


def test_help_needs_no_torch():
    code = "import sys; sys.argv[1:] = ['--help']\ntry:\n    from minivllm.cli import main; main()\n"
    code += "except SystemExit:\n    print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_ctrl_c_ends_with_130_and_no_traceback(model_path):
    command = [sys.executable, "-m", "minivllm", "generate", "--model", model_path, "--max-tokens", "250"]
    process = subprocess.Popen([*command, "--ignore-eos", "Wolf"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1)  # it is generating
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert process.returncode == 130
    assert b"interrupted" in err and b"Traceback" not in err


def test_a_closed_pipe_is_no_error(model_path):
    command = (
        f"{sys.executable} -m minivllm generate --model {model_path} --max-tokens 200 --ignore-eos Wolf | head -c 1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
