"""What the chapters share: one call that prepares a notebook, and two that show the real code and the real objects.

A chapter shows production code, never a copy of it, so that what a reader sees is what runs. Everything printed here
is the same on every machine, so that stored outputs can be compared; only the line of `setup_notebook` is not.
"""

import dataclasses
import enum
import importlib.util
import inspect
import logging
import math
import os
import platform
import random
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.triton_mode import settle_triton_mode

_ROOT = Path(__file__).parents[1]
_MOST_VALUES = 32


def setup_notebook(seed: int = 0) -> None:
    """Prepare a notebook, in its first code cell: Triton's mode, seeds, plotting style, quiet libraries.

    Prints one line with the device and the versions.

    Raises:
        RuntimeError: Triton was imported earlier, in a mode that does not fit this machine.
    """
    _quieten_libraries()
    triton_mode = _choose_triton_mode()
    import numpy as np
    import torch

    from minivllm import __version__
    from minivllm.plotting.style import use_style

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    use_style()
    threads = f"CPU, {torch.get_num_threads()} threads"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else threads
    versions = f"minivllm {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{device} | {versions} | {triton_mode}")


def show_source(obj: Callable[..., Any] | type) -> None:
    """Display the code of a function, a method, a class or a kernel of this package, with its file and line."""
    obj = inspect.unwrap(getattr(obj, "fn", obj))  # a Triton kernel holds its function so
    lines, first_line = inspect.getsourcelines(obj)
    file = Path(inspect.getsourcefile(obj)).relative_to(_ROOT).as_posix()
    code = textwrap.dedent("".join(lines)).rstrip()
    _display_markdown(f"`{file}:{first_line}`\n\n```python\n{code}\n```")


def show_fields(obj: Any, *names: str) -> None:
    """Print attributes of an object, one a line; arrays and tensors with shape and dtype, values if they are few.

    Args:
        names: which attributes, properties included; none named: all fields of a dataclass.
    """
    names = names or tuple(field.name for field in dataclasses.fields(obj) if field.repr)
    width = max(len(name) for name in names)
    print(type(obj).__name__)
    for name in names:
        print(f"  {name:<{width}}  {_describe(getattr(obj, name))}")


def _describe(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if not hasattr(value, "dtype"):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    values = f"  {value.tolist()}" if math.prod(value.shape) <= _MOST_VALUES else ""
    return f"{list(value.shape)} {dtype}{values}"


def _display_markdown(text: str) -> None:
    from IPython.display import Markdown, display

    display(Markdown(text))


def _quieten_libraries() -> None:
    """No warnings or progress bars of libraries in stored outputs; must come before the libraries are imported."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns when a process forks after its first use
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    logging.getLogger("minivllm").setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def _choose_triton_mode() -> str:
    """Settle by the rule of `triton_env` how kernels will run, and say so; imports Triton only to check it.

    A chapter without kernels pays nothing: until Triton is imported, the environment variable is the whole choice.
    """
    if importlib.util.find_spec("triton") is None:
        return f"no Triton on {sys.platform}: chapters with kernels need Linux (WSL, a container or a hosted notebook)"
    interpreted = settle_triton_mode()
    if "triton" in sys.modules:
        import minivllm.triton_env  # noqa: F401  (raises where Triton's mode is the wrong one)
    return "Triton kernels are interpreted" if interpreted else "Triton kernels are compiled"
