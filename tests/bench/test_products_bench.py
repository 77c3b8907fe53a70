"""The benchmarks of products and experts: what they refuse, and on a GPU what one small case yields."""

import argparse

import pytest
import torch

from minivllm import cli
from minivllm.bench import gemm, kernel_peers, kernels, moe, result_file
from minivllm.moe.experts import experts_by_loop


@pytest.mark.parametrize("benchmark", ["gemm", "moe"])
def test_without_a_gpu_it_says_so_and_measures_nothing(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", benchmark]) == 1
    assert f"bench {benchmark}: needs a GPU" in capsys.readouterr().err


def test_a_peer_that_cannot_be_loaded_says_why(tmp_path, monkeypatch):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "broken.py").write_text("import a_library_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="vllm.broken.attend is not in this run: .*a_library_that_is_missing"):
        assert kernel_peers.vllm_function("vllm.broken", "attend") is None
    with pytest.warns(UserWarning, match="no attribute 'fused'"):
        assert kernel_peers.vllm_function("vllm", "fused") is None


@pytest.mark.gpu
def test_a_result_file_holds_the_ceilings_and_the_remark(tmp_path):
    path = tmp_path / "out.json"
    arguments = argparse.Namespace(family="bf16", remark="a peer without its own activation", json=str(path))
    assert gemm.run_cases("gemm", [lambda: gemm.gemm_case("bf16", 48, 256, 512)], arguments) == 0
    found = result_file.load(path)
    assert found.extra["remark"] == "a peer without its own activation" and found.extra["ceilings"]["TFLOP/s"] > 0


def test_the_oracle_of_experts_is_the_formula():
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(*s, generator=generator) for s in ((3, 8), (4, 12, 8), (4, 8, 6)))
    weights, ids = torch.randn(3, 4, generator=generator).softmax(-1).topk(2)
    arguments = (x, weights, ids, gate_up, down)
    torch.testing.assert_close(moe.exact(*arguments).float(), experts_by_loop(*arguments), rtol=1e-4, atol=1e-5)


def test_the_command_line_names_the_families():
    assert (cli.GEMM_FAMILIES, cli.MOE_FAMILIES) == (gemm.FAMILIES, moe.FAMILIES)


def test_the_shapes_are_those_that_the_field_quotes():
    assert (4096, 7168, 16384) in gemm.SHAPES and (8192, 8192, 8192) in gemm.SHAPES
    assert moe.SHAPES[128, 8, 2048, 768] == (1, 64, 1024, 8192)


@pytest.mark.gpu
@pytest.mark.parametrize("family", gemm.FAMILIES)
@pytest.mark.parametrize("m", [48, 512])
def test_a_product_measures_ours_beside_the_libraries(family, m):
    found = kernels.measure(gemm.gemm_case(family, m, 256, 512), {"GB/s": 4000.0, "TFLOP/s": 700.0})
    assert found[0].name.endswith("/minivllm") and found[0].median > 0
    assert len(found) >= 2 and found[0].extra["relative_error"] < (0.01 if family == "bf16" else 0.06)


@pytest.mark.gpu
@pytest.mark.parametrize("family", moe.FAMILIES)
def test_a_layer_of_experts_measures_ours_beside_the_peers(family):
    found = kernels.measure(moe.moe_case(family, 64, 8, 2, 256, 128), {"GB/s": 4000.0, "TFLOP/s": 700.0})
    assert found[0].name.endswith("/minivllm") and found[0].median > 0
    assert found[0].extra["relative_error"] < (0.02 if family == "bf16" else 0.1)
