"""Which product runs: an ordered table of backends, of which the first that can serve a problem does.

    gemm(a [M, K], b [N, K], a_scale, b_scale)  ->  Problem (format, M, N, K, device)  ->  table  ->  backend

The format follows from dtype and scales:

| format | a, b | a_scale | b_scale |
|---|---|---|---|
| float32, float16, bfloat16 | that dtype | none | none |
| fp8_tensor | float8_e4m3fn | [] | [] |
| fp8_token | float8_e4m3fn | [M, 1] | [N, 1] |
| fp8_block | float8_e4m3fn | [M, K / 128] | [ceil(N / 128), K / 128] |
| int8 | int8 | [M, 1] | [N, 1] |

`explain` prints the table for a problem, with the reason why each backend that is passed over cannot serve.

Who overrides whom: `gemm(..., backend=NAME)` takes that backend or raises. A preference (the engine's gemm_backend, or
MINIVLLM_GEMM_BACKEND where that is "auto") moves a backend to the front of the table: formats and shapes that it does
not serve still go to the next one. MINIVLLM_USE_DEEP_GEMM=0 takes DeepGEMM out.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.gemm import libraries
from minivllm.gemm.quantize import BLOCK, FP8

BACKEND_VARIABLE = "MINIVLLM_GEMM_BACKEND"
DEEP_GEMM_VARIABLE = "MINIVLLM_USE_DEEP_GEMM"
FLOAT_FORMATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
FORMATS = (*FLOAT_FORMATS.values(), "fp8_tensor", "fp8_token", "fp8_block", "int8")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class Problem(NamedTuple):
    """All that the choice depends on."""

    format: str
    m: int
    n: int
    k: int
    out_dtype: torch.dtype
    capability: tuple[int, int] | None
    """Of the GPU, (9, 0) for Hopper; None on a CPU."""


class Row(NamedTuple):
    """A backend in the table: its name, the formats it knows, and why it cannot serve a problem (None: it can)."""

    name: str
    formats: tuple[str, ...]
    obstacle: Callable[[Problem], str | None]


def _on_gpu(problem: Problem, capability: tuple[int, int], multiple: int = 1) -> str | None:
    """What a library's kernel asks for: a GPU of that capability at least, N and K multiples of a number."""
    if problem.capability is None:
        return "needs a GPU"
    if problem.capability < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}"
    if problem.n % multiple or problem.k % multiple:
        return f"needs N and K that are multiples of {multiple}"
    return None


def _cutlass(problem: Problem) -> str | None:
    wrong_dtype = None if problem.out_dtype == torch.bfloat16 else "writes bfloat16 only"
    return _on_gpu(problem, (9, 0), 16) or wrong_dtype


def _deep_gemm(problem: Problem) -> str | None:
    if os.environ.get(DEEP_GEMM_VARIABLE, "1").lower() in ("0", "false", "off"):
        return f"{DEEP_GEMM_VARIABLE}=0"
    obstacle = _on_gpu(problem, (9, 0)) or _block_scales(problem)
    if obstacle:
        return obstacle
    if problem.out_dtype != torch.bfloat16:
        return "writes bfloat16 only"
    if problem.n % 8:
        return "needs N that is a multiple of 8"
    return None if libraries.find_deep_gemm() else "is not installed"


def _cublas_int8(problem: Problem) -> str | None:
    return _on_gpu(problem, (8, 0), 8) or ("needs M above 16" if problem.m <= 16 else None)


def _block_scales(problem: Problem) -> str | None:
    return f"needs K that is a multiple of {BLOCK}" if problem.k % BLOCK else None


def _triton(problem: Problem) -> str | None:
    if not _HAS_TRITON:
        return "needs Triton, which is not installed here"
    if problem.format == "fp8_block" and problem.k % BLOCK:
        return _block_scales(problem)
    needed = (8, 9) if problem.format.startswith("fp8") else (8, 0)
    return None if problem.capability is None else _on_gpu(problem, needed)


TABLE = (
    Row("deep_gemm", ("fp8_block",), _deep_gemm),
    Row("cublas", tuple(FLOAT_FORMATS.values()), lambda problem: _on_gpu(problem, (0, 0))),
    Row("cublas_fp8", ("fp8_tensor",), lambda problem: _on_gpu(problem, (8, 9), 16)),
    Row("cutlass", ("fp8_token",), _cutlass),
    Row("cublas_int8", ("int8",), _cublas_int8),
    Row("triton_bf16", tuple(FLOAT_FORMATS.values()), _triton),
    Row("triton_fp8_block", ("fp8_block",), _triton),
    Row("triton_int8", ("int8", "fp8_token"), _triton),
    Row("reference", FORMATS, lambda problem: None),
)
BACKENDS = tuple(row.name for row in TABLE)


def check_backend(name: str) -> str:
    """The name itself, if it is "auto" or in the table; else a ValueError that lists what is."""
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"gemm backend should be one of auto, {', '.join(BACKENDS)}, not {name!r}")
    return name


def obstacle_of(row: Row, problem: Problem, asked: bool = False) -> str | None:
    """Why a row of the table cannot serve, or None. `asked`: by name, which an interpreted kernel has to be."""
    if problem.format not in row.formats:
        return f"does not know {problem.format}"
    obstacle = row.obstacle(problem)
    if obstacle is None and row.name.startswith("triton") and problem.capability is None and not asked:
        return "is interpreted on a CPU: only by name"
    return obstacle


def choose(problem: Problem, backend: str = "auto", preferred: str = "auto") -> str:
    """The name of the backend. Raises ValueError where `backend` is unknown or cannot serve, with the reason."""
    if check_backend(backend) != "auto":
        (row,) = (row for row in TABLE if row.name == backend)
        obstacle = obstacle_of(row, problem, asked=True)
        if obstacle:
            raise ValueError(f"gemm backend {backend!r} {obstacle} ({_describe(problem)}): use another, or 'auto'")
        return backend
    preferred = _preference(preferred)
    return _choose(problem, preferred, os.environ.get(DEEP_GEMM_VARIABLE))


@lru_cache(maxsize=65_536)
def _choose(problem: Problem, preferred: str, deep_gemm: str | None) -> str:
    for row in _ordered(preferred):
        if obstacle_of(row, problem, asked=row.name == preferred) is None:
            return row.name
    raise AssertionError("the reference serves everything")


def explain(
    m: int,
    n: int,
    k: int,
    format: str = "bfloat16",
    device: str | torch.device = "auto",
    preferred: str = "auto",
    out_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Print the table for a product of that size: who serves, and why those before could not.

    `format` is one of FORMATS; `preferred` is an engine's gemm_backend.
    """
    if format not in FORMATS:
        raise ValueError(f"format should be one of {', '.join(FORMATS)}, not {format!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = Problem(format, m, n, k, out_dtype, capability_of(torch.device(device)))
    preferred, chosen = _preference(preferred), choose(problem, preferred=preferred)
    print(_describe(problem))
    for row in _ordered(preferred):
        obstacle = obstacle_of(row, problem, asked=row.name == preferred)
        verdict = "serves" if row.name == chosen else f"no: {obstacle}" if obstacle else "could serve"
        print(f"  {row.name:17} {verdict}")


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    preferred: str = "auto",
) -> Tensor:
    """a [M, K] times b [N, K] transposed, with the scales of the table above -> [M, N].

    out_dtype: a's own by default, bfloat16 for 8-bit operands. Raises ValueError for operands that fit no format, and
    for a `backend` that cannot serve them.
    """
    if out_dtype is None:
        out_dtype = a.dtype if a_scale is None else torch.bfloat16
    problem = describe(a, b, a_scale, b_scale, out_dtype)
    name = choose(problem, backend, preferred)
    if 0 in (problem.m, problem.n, problem.k):
        return torch.zeros(problem.m, problem.n, dtype=out_dtype, device=a.device)
    return _function(name)(a, b, a_scale, b_scale, out_dtype)


def describe(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, out_dtype: torch.dtype) -> Problem:
    """The problem that operands stand for; raises ValueError, by name, where they stand for none."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b should be [M, K] and [N, K], got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"b should be {a.dtype} on {a.device}, like a, got {b.dtype} on {b.device}")
    (m, k), n = a.shape, b.shape[0]
    format = _format(a.dtype, m, n, k, a_scale, b_scale)
    return Problem(format, m, n, k, out_dtype, capability_of(a.device))


def _format(dtype: torch.dtype, m: int, n: int, k: int, a_scale: Tensor | None, b_scale: Tensor | None) -> str:
    if dtype in FLOAT_FORMATS:
        if a_scale is not None or b_scale is not None:
            raise ValueError(f"a_scale and b_scale should be left out for {dtype}")
        return FLOAT_FORMATS[dtype]
    if dtype not in (FP8, torch.int8):
        raise ValueError(f"a should be float32, float16, bfloat16, float8_e4m3fn or int8, got {dtype}")
    if a_scale is None or b_scale is None:
        raise ValueError(f"a_scale and b_scale should be given for {dtype}")
    shapes, blocks = (tuple(a_scale.shape), tuple(b_scale.shape)), -(-k // BLOCK)
    if shapes == ((m, 1), (n, 1)):
        return "int8" if dtype == torch.int8 else "fp8_token"
    if dtype == FP8 and shapes == ((), ()):
        return "fp8_tensor"
    if dtype == FP8 and shapes == ((m, blocks), (-(-n // BLOCK), blocks)):
        return "fp8_block"
    wanted = f"[{m}, 1] and [{n}, 1]"
    if dtype == FP8:
        wanted += f", [] and [], or [{m}, {blocks}] and [{-(-n // BLOCK)}, {blocks}]"
    raise ValueError(f"a_scale and b_scale should be {wanted}, got {list(shapes[0])} and {list(shapes[1])}")


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@lru_cache
def _function(name: str) -> Callable[..., Tensor]:
    """The backend's function. Kernels are imported on first use: that settles whether Triton is interpreted."""
    if name == "triton_bf16":
        from minivllm.gemm.triton_bf16 import gemm_bf16

        return lambda a, b, a_scale, b_scale, out_dtype: gemm_bf16(a, b, out_dtype)
    if name == "triton_fp8_block":
        from minivllm.gemm.fp8_block import gemm_fp8_block

        return gemm_fp8_block
    if name == "triton_int8":
        from minivllm.gemm.int8 import gemm_row_scaled

        return gemm_row_scaled
    return getattr(libraries, name)


def _preference(preferred: str) -> str:
    """What goes to the front of the table; raises ValueError for an unknown name, here or in the environment."""
    if preferred != "auto":
        return check_backend(preferred)
    try:
        return check_backend(os.environ.get(BACKEND_VARIABLE, "auto"))
    except ValueError as error:
        raise ValueError(f"{BACKEND_VARIABLE}: {error}") from None


def _ordered(preferred: str) -> list[Row]:
    return sorted(TABLE, key=lambda row: row.name != preferred)


def _describe(problem: Problem) -> str:
    where = f"a GPU of capability {problem.capability[0]}.{problem.capability[1]}" if problem.capability else "a CPU"
    return f"{problem.format}, M {problem.m}, N {problem.n}, K {problem.k} on {where}"
