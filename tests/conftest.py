"""What every test needs: GPU tests skipped only for lack of a GPU, and property tests that repeat."""

import pytest
from hypothesis import HealthCheck, settings

# Deterministic everywhere: a red run can be repeated by whoever reads about it. MINUTES of search are started by hand
# with `pytest --hypothesis-profile=search`.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return  # torch takes seconds to import, and the engine's tests need none of it
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
