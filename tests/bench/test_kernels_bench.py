"""The kernels' benchmark: what it refuses, and on a GPU what one small case yields."""

import pytest
import torch

from minivllm.bench import kernels


def test_without_a_gpu_it_says_so_and_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main(["--family", "mla"]) == 1
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize(
    "build",
    [
        lambda: kernels.flash_case(2, 256, 4, 2, 64),
        lambda: kernels.paged_case(2, 256, 4, 2, 16),
        lambda: kernels.mla_case(2, 2, 16, 128),
        lambda: kernels.mla_case(2, 1, 16, 128, fp8=True),
    ],
)
def test_a_case_measures_ours_beside_the_peers_with_a_small_error(build):
    case = build()
    found = kernels.measure(case, {"GB/s": 4000.0, "TFLOP/s": 700.0})
    assert found[0].name.endswith("/minivllm") and found[0].median > 0 and found[0].extra["relative_error"] < 0.02
    assert {m.unit for m in found} == {case.unit}
