"""The table: who serves, who says why not, and who overrides whom."""

import pytest
import torch

from minivllm.gemm import dispatch, libraries
from minivllm.gemm.dispatch import BACKENDS, FORMATS, Problem, choose, explain, gemm

HOPPER, ADA, AMPERE = (9, 0), (8, 9), (8, 0)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (dispatch.BACKEND_VARIABLE, dispatch.DEEP_GEMM_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=[False, True], ids=["no DeepGEMM", "DeepGEMM"])
def has_deep_gemm(request, monkeypatch):
    monkeypatch.setattr(libraries, "find_deep_gemm", lambda: object() if request.param else None)
    dispatch._choose.cache_clear()
    yield request.param
    dispatch._choose.cache_clear()


def problem(format, m=64, n=2112, k=7168, out_dtype=torch.bfloat16, capability=HOPPER):
    return Problem(format, m, n, k, out_dtype, capability)


def test_on_a_hopper_the_libraries_serve_and_our_kernels_fill_the_gaps(has_deep_gemm):
    ours = {"bfloat16": "triton_bf16", "fp8_block": "triton_fp8_block", "int8": "triton_int8"}
    assert choose(problem("bfloat16")) == "cublas"
    assert choose(problem("fp8_tensor")) == "cublas_fp8"
    assert choose(problem("fp8_token")) == "cutlass"
    assert choose(problem("fp8_block")) == ("deep_gemm" if has_deep_gemm else ours["fp8_block"])
    assert choose(problem("int8")) == "cublas_int8"
    assert choose(problem("int8", m=16)) == ours["int8"]
    assert choose(problem("fp8_token", n=2111)) == ours["int8"]
    assert choose(problem("fp8_token", out_dtype=torch.float16)) == ours["int8"]
    assert choose(problem("fp8_block", k=100)) == "reference"
    assert all(choose(problem(format), backend=ours[format]) == ours[format] for format in ours)


def test_older_gpus_get_what_they_can_run():
    assert choose(problem("fp8_token", capability=ADA)) == "triton_int8"
    assert choose(problem("fp8_tensor", capability=ADA)) == "cublas_fp8"
    assert choose(problem("fp8_tensor", capability=AMPERE)) == "reference"
    assert choose(problem("int8", capability=AMPERE)) == "cublas_int8"


@pytest.mark.parametrize("format", FORMATS)
def test_a_cpu_is_served_by_the_reference(format):
    assert choose(problem(format, capability=None)) == "reference"


def test_explain_prints_each_backend_with_its_reason(has_deep_gemm, capsys):
    explain(64, 2112, 7168, "fp8_block", device="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fp8_block, M 64, N 2112, K 7168 on a CPU"
    assert [line.split()[0] for line in lines[1:]] == list(BACKENDS)
    reasons = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:]}
    assert reasons["deep_gemm"] == "no: needs a GPU" and reasons["cublas"] == "no: does not know fp8_block"
    assert reasons["triton_fp8_block"] == "no: is interpreted on a CPU: only by name"
    assert reasons["reference"] == "serves"


def test_explain_on_a_hopper_names_what_could_serve_too(has_deep_gemm, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "capability_of", lambda device: HOPPER)
    explain(64, 2112, 7168, "fp8_block", device="cuda")
    out = capsys.readouterr().out
    assert "deep_gemm         serves" in out if has_deep_gemm else "deep_gemm         no: is not installed" in out
    assert f"triton_fp8_block  {'could serve' if has_deep_gemm else 'serves'}" in out


def test_a_backend_by_name_serves_or_says_why_not():
    assert choose(problem("bfloat16", capability=None), backend="triton_bf16") == "triton_bf16"
    with pytest.raises(ValueError, match=r"'cublas_int8' needs M above 16 \(int8, M 7, .*use another, or 'auto'"):
        choose(problem("int8", m=7), backend="cublas_int8")
    with pytest.raises(ValueError, match="'cublas' does not know int8"):
        choose(problem("int8"), backend="cublas")
    with pytest.raises(ValueError, match=r"should be one of auto, .*reference, not 'magma'"):
        gemm(torch.ones(1, 1), torch.ones(1, 1), backend="magma")


def test_a_preference_comes_first_where_it_serves_and_yields_where_it_does_not():
    assert choose(problem("int8"), preferred="triton_int8") == "triton_int8"
    assert choose(problem("bfloat16"), preferred="triton_int8") == "cublas"
    assert choose(problem("int8", m=7), preferred="cublas_int8") == "triton_int8"


def test_the_environment_is_a_preference_where_the_config_has_none(monkeypatch):
    monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "triton_bf16")
    assert choose(problem("bfloat16")) == "triton_bf16"
    assert choose(problem("bfloat16", capability=None)) == "triton_bf16"
    assert choose(problem("bfloat16"), preferred="cublas") == "cublas"
    monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "magma")
    with pytest.raises(ValueError, match="MINIVLLM_GEMM_BACKEND: gemm backend should be one of"):
        choose(problem("bfloat16"))


def test_deep_gemm_can_be_taken_out(monkeypatch):
    monkeypatch.setattr(libraries, "find_deep_gemm", lambda: object())
    dispatch._choose.cache_clear()
    assert choose(problem("fp8_block")) == "deep_gemm"
    monkeypatch.setenv(dispatch.DEEP_GEMM_VARIABLE, "0")
    assert choose(problem("fp8_block")) == "triton_fp8_block"
    with pytest.raises(ValueError, match="MINIVLLM_USE_DEEP_GEMM=0"):
        choose(problem("fp8_block"), backend="deep_gemm")
    dispatch._choose.cache_clear()


def test_importing_the_table_leaves_triton_alone():
    import subprocess
    import sys

    code = "import sys, minivllm.gemm.dispatch; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
