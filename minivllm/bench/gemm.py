"""`python -m minivllm bench gemm`: matrix products in every format at the shapes of DeepSeek-V3, with the libraries.

    bf16        triton_bf16                 beside cuBLAS
    fp8_block   triton_fp8_block            beside DeepGEMM, and cuBLAS with one scale a matrix
    fp8_token   triton_int8 (fp8 operands)  beside CUTLASS
    int8        triton_int8                 beside cuBLAS

Times are of the product alone, operands quantised before, as CUDA graph replays with a cold L2 cache (kernels.py). The
error is against the product of the operands before they were quantised: it holds what the format costs.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from minivllm.bench.environment import describe_code
from minivllm.bench.kernels import Case, measure, measure_ceilings
from minivllm.bench.result_file import Measurement, ResultFile
from minivllm.gemm import dispatch, fp8_block, int8, triton_bf16
from minivllm.gemm.quantize import FP8, quantize_128x128, quantize_per_channel, quantize_per_tensor
from minivllm.gemm.quantize_kernel import quantize_activations
from minivllm.triton_env import INTERPRET

SHAPES = [(64, 2112, 7168), (128, 7168, 16384), (4096, 2112, 7168), (4096, 7168, 16384), (8192, 8192, 8192)]
FAMILIES = ("bf16", "fp8_block", "fp8_token", "int8")
_OURS = {"bf16": "triton_bf16", "fp8_block": "triton_fp8_block", "fp8_token": "triton_int8", "int8": "triton_int8"}
_SAMPLE_ROWS = 64


def gemm_case(family: str, m: int, n: int, k: int) -> Case:
    """One format at one shape, with every backend that serves it."""
    a, b = (
        torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16),
    )
    choice: tuple
    if family == "bf16":
        operands: tuple[Tensor, ...] = (a, b)
        choice = triton_bf16.choose_tiles(m, n, k, 2, a.device)
    elif family == "fp8_block":
        operands = _order(quantize_activations(a, family), quantize_128x128(b))
        choice = fp8_block.choose_tiles(m, n, k, a.device)
    else:
        dtype = torch.int8 if family == "int8" else FP8
        operands = _order(quantize_activations(a, family), quantize_per_channel(b, dtype))
        choice = int8.choose_tiles(m, n, k, a.device)
    peers = {name: _call(name, operands) for name in _serving(operands) if name not in (_OURS[family], "reference")}
    if family == "fp8_block":
        whole = _order(quantize_per_tensor(a), quantize_per_tensor(b))
        peers |= {name: _call(name, whole) for name in _serving(whole) if name == "cublas_fp8"}
    return Case(
        name=f"gemm_{family}_m{m}_n{n}_k{k}",
        shapes={"m": m, "n": n, "k": k},
        work=2.0 * m * n * k,
        unit="TFLOP/s",
        choice=str(tuple(choice)),
        ours=_call(_OURS[family], operands),
        peers=peers,
        sample=lambda out: out[:_SAMPLE_ROWS],
        wanted=lambda: a[:_SAMPLE_ROWS].double() @ b.double().T,
        dtype={"bf16": "bfloat16", "int8": "int8"}.get(family, "float8_e4m3fn"),
    )


def _order(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return a[0], b[0], a[1], b[1]


def _call(name: str, operands: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    return lambda: dispatch.gemm(*operands, backend=name)


def _serving(operands: tuple[Tensor, ...]) -> list[str]:
    """The backends that serve the operands, by the dispatch table."""
    a, b, a_scale, b_scale = (*operands, None, None)[:4]
    problem = dispatch.describe(a, b, a_scale, b_scale, torch.bfloat16)
    return [row.name for row in dispatch.TABLE if dispatch.obstacle_of(row, problem, asked=True) is None]


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a line for each backend and shape, write the result file; 1 without a GPU."""
    families = [arguments.family] if arguments.family else FAMILIES
    cases = [lambda f=family, s=shape: gemm_case(f, *s) for family in families for shape in SHAPES]
    return run_cases("gemm", cases, arguments)


def run_cases(benchmark: str, cases: list[Callable[[], Case]], arguments: argparse.Namespace) -> int:
    """What `bench gemm` and `bench moe` share: ceilings, cases one after the other, the result file."""
    if INTERPRET.value or not torch.cuda.is_available():
        print(f"bench {benchmark}: needs a GPU: interpreted kernels have no speed worth measuring", file=sys.stderr)
        return 1
    package = Path(__file__).resolve().parents[1]
    folders = [path for folder in ("gemm", "moe") for path in sorted((package / folder).glob("*.py"))]
    code = describe_code([*folders, *sorted(package.glob("triton_*.py"))])
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    print("ceilings: " + ", ".join(f"{value:.0f} {unit}" for unit, value in ceilings.items()))
    measurements: list[Measurement] = [m for build in cases for m in measure(build(), ceilings)]
    if arguments.json:
        extra = {"ceilings": ceilings} | ({"remark": arguments.remark} if arguments.remark else {})
        name = f"{benchmark}_{arguments.family or 'all'}"
        ResultFile.record(name, "cuda", measurements, code, extra=extra).save(arguments.json)
    return 0
