"""From a directory in Hugging Face format to a model that is ready to run.

    load_config(path)        config.json -> Hugging Face config of an architecture that we know
    resolve_dtype(...)       what the user asked for, the device and the checkpoint -> torch.dtype
    load_model(path, ...)    all of it: build, fill, finalize

transformers parses config.json (it knows the defaults of every model family, and old spellings); it is
imported on first use, because that takes seconds.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from minivllm.checkpoints.errors import CheckpointError
from minivllm.models.llama import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from minivllm.models.loader import fill_dummy, load_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ARCHITECTURES: dict[str, type[nn.Module]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOAD_FORMATS = ("auto", "dummy")


def load_config(model_path: str | Path) -> "PretrainedConfig":
    """Reads config.json. Raises CheckpointError if it is absent, broken or of an unknown architecture."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{model_path} has no config.json: a model is a directory in Hugging Face format "
            "(config.json, *.safetensors, tokenizer.json)"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        architecture = (raw.get("architectures") or [None])[0]
    except (ValueError, AttributeError):
        raise CheckpointError(f"{path} is not a JSON object: download it again") from None
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        what = f"names the unknown architecture {architecture!r}" if architecture else "names no architecture"
        raise CheckpointError(f"{path} {what}; known architectures: {known}")
    if raw.get("quantization_config"):
        raise CheckpointError(f"{path} is of a quantized checkpoint, which is not supported: use the unquantized one")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is not a usable config: {error}") from None
    return config


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, config: "PretrainedConfig") -> torch.dtype:
    """The dtype of weights and activations.

    "auto" is the checkpoint's own dtype on a GPU (float32 if it does not say), and float32 on a CPU: half the
    speed of bfloat16 on recent CPUs, but the same on all of them, and the reference that everything else is
    compared with. Raises ValueError for a dtype that is not in DTYPES.
    """
    if dtype == "auto":
        declared = config.dtype if device.type != "cpu" else None
        dtype = getattr(torch, declared) if isinstance(declared, str) else declared or torch.float32
    resolved = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if resolved not in DTYPES.values():
        raise ValueError(f"unknown dtype {dtype!r}; known: auto, {', '.join(DTYPES)}")
    return resolved


def load_model(
    model_path: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    max_model_len: int | None = None,
    seed: int = 0,
) -> tuple[nn.Module, "PretrainedConfig"]:
    """Builds the model of a local directory on `device` and fills it; returns it with its config.

    load_format "auto" reads the safetensors files; "dummy" needs config.json only and draws random weights
    from `seed`. max_model_len bounds the positions that the model can embed (None: the config's own limit).
    Raises CheckpointError for a checkpoint that does not fit, ValueError for an option or a config that is
    not supported.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"unknown load_format {load_format!r}; known: {', '.join(LOAD_FORMATS)}")
    directory, device = Path(model_path), torch.device(device)
    config = load_config(directory)
    if max_model_len is None:
        max_model_len = config.max_position_embeddings
    with _defaults(resolve_dtype(dtype, device, config), device):
        model = ARCHITECTURES[config.architectures[0]](config, max_model_len).eval()
    if load_format == "dummy":
        fill_dummy(model, seed)
    else:
        ignored = frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset()
        load_weights(model.slots(), directory, ignored)
    model.finalize()
    return model, config


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Tensors made inside get this dtype and device, so that layers need not be told."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
