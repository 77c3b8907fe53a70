"""What README shows a newcomer works as it stands there, without a download; its links lead to files."""

import re
import shlex
from pathlib import Path

import pytest

from minivllm.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def no_download(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    yield
    assert not (tmp_path / "cache").exists()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_first_command_tells_a_tale(capsys):
    install, generate = blocks("bash")[0].strip().split(" && ")
    assert install == "pip install -r requirements.txt"
    python, m, package, *arguments = shlex.split(generate)
    assert (python, m, package) == ("python", "-m", "minivllm") and "--model" not in arguments
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert len(captured.out.split()) > 50 and "tok/s" in captured.err


def test_the_python_example_runs(capsys):
    exec(compile(blocks("python")[0], "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 60


def test_ci_runs_the_marked_command():
    marked = re.search(r"<!-- test command -->\n```bash\n(.+)\n```", README)
    assert (
        marked
        and marked[1].startswith("python -m pytest")
        and "<!-- test command -->" in (ROOT / ".ci/run").read_text()
    )


def test_links_lead_to_files():
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in target]
    assert len(targets) > 30
    assert [target for target in targets if not (ROOT / target).exists()] == []
