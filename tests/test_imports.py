"""What an import costs: the engine room comes without torch, and so does the bare package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import minivllm.engine

HEAVY = ["torch", "transformers", "numpy", "triton"]


def heavy_modules_after(*modules: str) -> list[str]:
    """The heavy packages that a fresh interpreter holds after importing `modules`."""
    code = f"import json, sys\nimport {', '.join(modules)}\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_the_package_alone_imports_nothing_heavy():
    assert heavy_modules_after("minivllm") == []


def test_the_engine_room_imports_no_torch():
    rooms = [path.stem for path in Path(minivllm.engine.__file__).parent.glob("*.py")]
    assert {"core", "scheduler", "simulate", "trace"} <= set(rooms)
    modules = [f"minivllm.engine.{room}" for room in rooms if room != "__init__"]
    assert heavy_modules_after(*modules, "minivllm.config", "minivllm.sampling_params") == []


def test_the_probe_sees_torch_where_it_is_imported():
    assert "torch" in heavy_modules_after("minivllm.sample.sampler")


def test_exports_are_found_on_first_use_and_unknown_names_are_refused():
    import minivllm
    from minivllm.config import EngineConfig
    from minivllm.sampling_params import SamplingParams

    assert minivllm.EngineConfig is EngineConfig and minivllm.SamplingParams is SamplingParams
    assert set(minivllm.__all__) == set(dir(minivllm))
    with pytest.raises(AttributeError, match="module 'minivllm' has no attribute 'LLMM'"):
        minivllm.LLMM  # noqa: B018
