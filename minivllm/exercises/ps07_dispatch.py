"""Set 7, the dispatch rule: the first row of a table that can serve a product, after the one that is preferred.

The table is that of `minivllm/gemm/dispatch.py` in small: each row says which formats it knows and what it needs.
"""

from collections.abc import Mapping
from typing import Any

from minivllm.exercises.checking import Case, Exercise

TABLE = [
    {"name": "deep_gemm", "formats": ["fp8_block"], "capability": (9, 0), "multiple": 128},
    {"name": "cublas", "formats": ["bfloat16"], "capability": (0, 0), "multiple": 1},
    {"name": "cutlass", "formats": ["fp8_token"], "capability": (9, 0), "multiple": 16},
    {"name": "cublas_int8", "formats": ["int8"], "capability": (8, 0), "multiple": 8},
    {"name": "triton", "formats": ["bfloat16", "fp8_token", "int8"], "capability": (8, 9), "multiple": 1},
    {"name": "reference", "formats": ["bfloat16", "fp8_token", "fp8_block", "int8"], "capability": None, "multiple": 1},
]


def choose_backend(
    table: list[dict[str, Any]], format: str, n: int, k: int, capability: tuple[int, int] | None, preferred: str
) -> str:
    """The name of the first row that can serve, the preferred one being asked first; `capability` None is a CPU."""
    ordered = sorted(table, key=lambda row: row["name"] != preferred)
    return next(row["name"] for row in ordered if obstacle(row, format, n, k, capability) is None)


def obstacle(row: Mapping[str, Any], format: str, n: int, k: int, capability: tuple[int, int] | None) -> str | None:
    """Why a row cannot serve, None if it can."""
    if format not in row["formats"]:
        return f"does not know {format}"
    needed, multiple = row["capability"], row["multiple"]
    if needed is not None and capability is None:
        return "needs a GPU"
    if needed is not None and capability < needed:
        return f"needs capability {needed}, this GPU has {capability}"
    if n % multiple or k % multiple:
        return f"needs N and K that are multiples of {multiple}, they are {n} and {k}"
    return None


def judge_choice(expected: str, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Say why the row that was chosen cannot serve, or which one is asked before it."""
    if not isinstance(got, str):
        return f"the answer is a {type(got).__name__}, not the name of a row"
    if got == expected:
        return None
    rows = {row["name"]: row for row in inputs["table"]}
    if got not in rows:
        return f"no row is called {got!r}"
    why = obstacle(rows[got], *(inputs[name] for name in ("format", "n", "k", "capability")))
    if why:
        return f"{got} {why}"
    if expected == inputs["preferred"]:
        return f"{got} could serve, but {expected} is preferred and can serve as well"
    return f"{got} could serve, but {expected} stands before it in the table and can serve as well"


def case(
    format: str, n: int, k: int, capability: tuple[int, int] | None, preferred: str = "auto", **about: Any
) -> Case:
    return Case((TABLE, format, n, k, capability, preferred), **about)


CHOOSE_BACKEND = Exercise(
    name="ps07.choose_backend",
    oracle=choose_backend,
    judge=judge_choice,
    hint="put the preferred row in front, keep the order of the others, and take the first that has no obstacle",
    cases=(
        case("bfloat16", 2112, 7168, (9, 0), hint="the first row that knows the format"),
        case("fp8_token", 2112, 7168, (9, 0), hint="cutlass stands before triton"),
        case("fp8_token", 2111, 7168, (9, 0), hint="2,111 is no multiple of 16"),
        case("bfloat16", 2112, 7168, (9, 0), "triton", hint="the preferred row is asked first"),
        case("bfloat16", 2112, 7168, None, hint="a CPU: only a row without a capability serves"),
        case("fp8_block", 1536, 576, (9, 0), hidden=True, hint="N is a multiple of 128, K is not"),
        case("fp8_block", 1536, 7168, (9, 0), "triton", hidden=True, hint="preferred, but it does not know the format"),
        case("int8", 2112, 7168, (8, 0), "triton", hidden=True, hint="(8, 0) is less than (8, 9)"),
        case(
            "fp8_token", 2112, 7168, (10, 0), hidden=True, hint="(10, 0) is more than (9, 0): compare numbers, not text"
        ),
        case("fp8_token", 2112, 7168, (8, 9), hidden=True, hint="cutlass wants (9, 0), triton (8, 9)"),
        case("int8", 2112, 7168, (9, 0), "reference", hidden=True, hint="slow, but it was asked for"),
        case("int8", 2112, 7168, None, "cublas_int8", hidden=True, hint="preferred, but it needs a GPU"),
    ),
)
