"""minivllm: an LLM inference engine to learn from.

The exports are lazy, so that `import minivllm.engine.scheduler` costs no import of torch: the scheduler, the
KV cache manager and the trace run in a millisecond in a notebook or a property test.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from minivllm.config import EngineConfig
    from minivllm.llm import LLM
    from minivllm.sampling_params import SamplingParams

_EXPORTS = {
    "LLM": "minivllm.llm",
    "SamplingParams": "minivllm.sampling_params",
    "EngineConfig": "minivllm.config",
    "RequestOutput": "minivllm.outputs",
    "CompletionOutput": "minivllm.outputs",
}

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'minivllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
