"""What every test needs: GPU tests skipped only for lack of a GPU, and property tests that repeat."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# transformers may import Triton before minivllm does, and by then the choice of the interpreter is made. Asking PyTorch
# for a GPU would import it for the engine's tests, which need none.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples everywhere, so that whoever reads about a red run can repeat it. A longer search for new ones is
# started by hand: pytest --hypothesis-profile=search
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, max_examples=100, **COMMON)
settings.register_profile("search", max_examples=2000, **COMMON)
settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return  # torch takes seconds to import, and the engine's tests need none of it
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
