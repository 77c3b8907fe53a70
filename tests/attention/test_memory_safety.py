"""No kernel touches a byte that is not its own: watched by memcheck, or by poison around the inputs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import memory_cases
import pytest
import torch


def test_poison_around_the_inputs_reaches_no_output():
    assert memory_cases.run_all(memory_cases.guarded) == list(memory_cases.CASES)


def test_the_poison_is_noticed_where_it_is_read(monkeypatch):
    """The test above can fail: an output that holds poison is named."""
    one_too_far = {"leaky": lambda wrap: [wrap(torch.ones(4)).as_strided((5,), (1,), memory_cases.GUARD)]}
    monkeypatch.setattr(memory_cases, "CASES", one_too_far)
    with pytest.raises(AssertionError, match="leaky"):
        memory_cases.run_all(memory_cases.guarded)


@pytest.mark.gpu
def test_memcheck_finds_nothing_in_a_small_case_of_each_kernel():
    """Where the machine has no compute-sanitizer the cases run with poison alone."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    script = Path(memory_cases.__file__)
    command = [sys.executable, str(script), "--guard"]
    if tool:
        command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ran flash" in done.stdout
    assert not tool or "ERROR SUMMARY: 0 errors" in done.stdout
