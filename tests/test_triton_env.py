"""Triton's mode is chosen once, before Triton is imported, and a wrong order of imports says so."""

import os
import subprocess
import sys

import pytest


def run(code: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "code, variables",
    [
        ("import torch; torch.cuda.is_available = lambda: False", {}),
        ("import torch; torch.cuda.is_available = lambda: True", {"TRITON_INTERPRET": "1"}),
    ],
)
def test_without_a_gpu_or_when_asked_kernels_are_interpreted_and_it_is_said_once(code, variables):
    done = run(
        code + "\nfrom minivllm.triton_env import INTERPRET, tl"
        "\nimport minivllm.attention.common"
        "\nfrom triton.runtime.interpreter import InterpretedFunction"
        "\nassert INTERPRET.value and isinstance(tl.cdiv, InterpretedFunction)",
        **variables,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("interpreter") == 1


def test_with_a_gpu_kernels_are_compiled_silently():
    done = run(
        "import torch; torch.cuda.is_available = lambda: True"
        "\nfrom minivllm.triton_env import INTERPRET"
        "\nassert not INTERPRET.value"
    )
    assert done.returncode == 0 and done.stderr == ""


def test_triton_imported_before_in_the_other_mode_is_refused_with_the_way_out():
    done = run(
        "import triton.language, torch; torch.cuda.is_available = lambda: False\nimport minivllm.triton_env",
        TRITON_INTERPRET="0",
    )
    assert done.returncode == 0, "an explicit choice counts"
    done = run("import triton.language, torch; torch.cuda.is_available = lambda: False\nimport minivllm.triton_env")
    assert done.returncode == 1
    assert "RuntimeError: triton was imported before minivllm, in compiled mode" in done.stderr
    assert "set TRITON_INTERPRET=1" in done.stderr


def test_a_platform_without_triton_is_told_what_to_use_in_one_line():
    done = run(
        "import importlib.util, sys\nsys.platform = 'darwin'\nfind = importlib.util.find_spec"
        "\nimportlib.util.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)"
        "\nimport minivllm.triton_env"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ") and "use Linux" in done.stderr.splitlines()[-1]
