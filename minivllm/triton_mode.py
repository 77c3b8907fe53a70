"""Whether Triton's kernels are compiled or interpreted: settled once, before Triton is imported by anybody.

Triton looks at TRITON_INTERPRET when it is imported, and some libraries import it on their own account. So whoever
may be the first to load such a library (the front door, a notebook) calls `settle_triton_mode`, which needs no Triton.
"""

import os


def settle_triton_mode() -> bool:
    """Set TRITON_INTERPRET=1 where there is no GPU and nobody has chosen; returns whether kernels are interpreted."""
    asked = os.environ.get("TRITON_INTERPRET")
    if asked is not None:
        return asked.lower() in ("1", "true", "on", "y", "yes")
    import torch

    if torch.cuda.is_available():
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    return True
