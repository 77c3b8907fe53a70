"""What chapters share: a prepared kernel, shown code and shown objects that are the same on every machine."""

import enum
import os
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest

from minivllm.engine.scheduler import Scheduler
from minivllm.notebook import show_fields, show_source

NEEDS_TRITON = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    """A fresh interpreter that sees no GPU and no choice of Triton's mode but those in `env`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**clean, **NO_GPU, **env}
    )


def test_setup_says_device_and_versions_in_one_line_and_nothing_on_stderr():
    done = run_python("from minivllm.notebook import setup_notebook; setup_notebook()")
    assert done.returncode == 0 and done.stderr == ""
    [line] = done.stdout.splitlines()
    assert line.startswith("CPU, ") and "torch 2." in line and "minivllm 0." in line


@NEEDS_TRITON
def test_setup_chooses_the_interpreter_where_there_is_no_gpu_without_importing_triton():
    done = run_python(
        "import os, sys; from minivllm.notebook import setup_notebook; setup_notebook()\n"
        "assert 'triton' not in sys.modules and os.environ['TRITON_INTERPRET'] == '1'\n"
        "from minivllm.triton_env import INTERPRET; print(INTERPRET.value)"
    )
    assert "kernels are interpreted" in done.stdout and done.stdout.endswith("True\n"), done.stderr
    assert done.stderr == "", "the warning of triton_env would reach stored outputs"


@NEEDS_TRITON
def test_setup_leaves_a_mode_that_the_reader_chose():
    done = run_python("from minivllm.notebook import setup_notebook; setup_notebook()", TRITON_INTERPRET="0")
    assert "kernels are compiled" in done.stdout


@NEEDS_TRITON
def test_setup_refuses_a_triton_that_was_imported_in_the_wrong_mode():
    done = run_python("import triton; from minivllm.notebook import setup_notebook; setup_notebook()")
    assert done.returncode != 0
    assert "RuntimeError: triton was imported before minivllm, in compiled mode" in done.stderr


def test_setup_says_what_to_use_where_triton_does_not_exist():
    done = run_python(
        "import importlib.util, sys, torch, matplotlib.pyplot\n"
        "find_spec = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find_spec(name, *rest)\n"
        "sys.platform = 'darwin'\n"
        "from minivllm.notebook import setup_notebook; setup_notebook()"
    )
    assert "no Triton on darwin: chapters with kernels need Linux" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_setup_makes_random_numbers_repeatable():
    done = run_python(
        "import random, numpy, torch; from minivllm.notebook import setup_notebook\n"
        "for seed in (1, 1, 2):\n"
        "    setup_notebook(seed); print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    )
    first, again, other = (line.split() for line in done.stdout.splitlines()[1::2])
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr("IPython.display.display", lambda markdown: texts.append(markdown.data))
    return texts


def test_source_is_shown_with_its_file_and_line_and_without_its_indent(shown):
    show_source(Scheduler.num_new_tokens)
    head, code = shown[0].split("\n\n", 1)
    line = Scheduler.num_new_tokens.__code__.co_firstlineno
    assert head == f"`minivllm/engine/scheduler.py:{line}`"
    assert code.startswith("```python\ndef num_new_tokens(self") and code.endswith("\n```")


def test_source_of_a_class_and_of_a_decorated_function_can_be_shown(shown):
    from minivllm.forward_context import set_forward_context

    show_source(Scheduler)
    show_source(set_forward_context)
    assert "class Scheduler:" in shown[0]
    assert "@contextmanager\ndef set_forward_context(" in shown[1]


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Thing:
    name: str = "x"
    colour: Colour = Colour.RED
    few: np.ndarray = field(default_factory=lambda: np.arange(3, dtype=np.int32))
    many: np.ndarray = field(default_factory=lambda: np.zeros((10, 10)))
    hidden: object = field(default_factory=object, repr=False)

    @property
    def length(self) -> int:
        return len(self.name)


def test_fields_are_printed_one_a_line_with_shape_dtype_and_few_values(capsys):
    show_fields(Thing())
    assert capsys.readouterr().out.splitlines() == [
        "Thing",
        "  name    'x'",
        "  colour  RED",
        "  few     [3] int32  [0, 1, 2]",
        "  many    [10, 10] float64",
    ]


def test_named_fields_and_properties_are_printed_in_the_order_asked(capsys):
    show_fields(Thing(), "length", "name")
    assert capsys.readouterr().out.splitlines() == ["Thing", "  length  1", "  name    'x'"]


def test_tensors_are_described_like_arrays(capsys):
    import torch

    show_fields(Thing(few=torch.tensor([[1, 2]])), "few")
    assert capsys.readouterr().out.splitlines()[1] == "  few  [1, 2] int64  [[1, 2]]"
