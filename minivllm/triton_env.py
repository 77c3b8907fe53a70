"""The one door through which this package imports Triton.

Every kernel file says `from minivllm.triton_env import triton, tl`. With a GPU, kernels are compiled.
Without one they run in Triton's interpreter: each program is executed by NumPy, one after the other, so a
laptop can step through the very code that a GPU runs. The interpreter is chosen by TRITON_INTERPRET=1 at
the moment that Triton is imported, so the choice has to be made here, before that.

INTERPRET is a constexpr for use inside kernels: NumPy has no bfloat16 and the interpreter keeps such values
as bare 16-bit integers, so arithmetic on them is silently wrong there. Kernels convert to float32 under `if
INTERPRET`.
"""

import importlib.util
import logging
import sys

from minivllm.triton_mode import settle_triton_mode

logger = logging.getLogger("minivllm")


def _check_mode(interpret: bool) -> None:
    """Raise RuntimeError if Triton's own library was made for the other mode than the one wanted."""
    from triton.runtime.interpreter import InterpretedFunction

    imported_interpreted = isinstance(tl.cdiv, InterpretedFunction)
    if imported_interpreted != interpret:
        modes = {True: "interpreted", False: "compiled"}
        raise RuntimeError(
            f"triton was imported before minivllm, in {modes[imported_interpreted]} mode, but here kernels "
            f"have to be {modes[interpret]}: import minivllm.triton_env first, or set TRITON_INTERPRET="
            f"{int(interpret)} before the first import of triton"
        )


if importlib.util.find_spec("triton") is None:
    raise ImportError(
        f"minivllm's kernels need Triton, which has no wheels for {sys.platform}: use Linux (WSL, a "
        "container or a hosted notebook will do)"
    )

_interpret = settle_triton_mode()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

_check_mode(_interpret)
if _interpret:
    logger.warning("kernels run in Triton's interpreter (no GPU, or TRITON_INTERPRET=1): correct, but slow")

INTERPRET = tl.constexpr(_interpret)

__all__ = ["INTERPRET", "TensorDescriptor", "tl", "triton"]
