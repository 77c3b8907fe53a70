"""From a directory in Hugging Face format to a model that is ready to run.

    load_config(path)        config.json -> Hugging Face config of an architecture that we know
    resolve_dtype(...)       what the user asked for, the device and the checkpoint -> torch.dtype
    load_model(path, ...)    all of it: build, fill, finalize
    load_mtp(path, ...)      the multi-token prediction layers of the same checkpoint, for those who ask for them

transformers parses config.json (it knows the defaults of every model family, and old spellings); it is
imported on first use, because that takes seconds.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from minivllm.checkpoints.errors import CheckpointError
from minivllm.engine.stages import Stage, split_layers
from minivllm.gemm.quantize import BLOCK
from minivllm.layers.quantization import quantize_model
from minivllm.layers.sharding import Slot
from minivllm.models.deepseek import DeepseekForCausalLM, DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, mtp_prefixes
from minivllm.models.deepseek_mtp import DeepseekMTP
from minivllm.models.llama import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from minivllm.models.loader import fill_dummy, load_weights, tensor_names
from minivllm.worker.tensor_parallel import SINGLE_RANK, TensorParallelGroup, building_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ARCHITECTURES: dict[str, type[nn.Module]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
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
    if raw.get("quantization_config") and not is_block_fp8(raw["quantization_config"]):
        raise CheckpointError(
            f"{path} is of a quantized checkpoint of a kind that is not supported: use the unquantized one, or one in "
            "fp8 with weight_block_size [128, 128] and dynamic activations, as DeepSeek-V3's"
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is not a usable config: {error}") from None
    return config


def is_block_fp8(settings: dict | None) -> bool:
    """Whether a config's quantization_config is DeepSeek-V3's: e4m3, a scale for each 128 x 128."""
    settings = settings or {}
    return (
        settings.get("quant_method") == "fp8"
        and list(settings.get("weight_block_size") or ()) == [BLOCK, BLOCK]
        and settings.get("activation_scheme", "dynamic") == "dynamic"
        and settings.get("fmt", "e4m3") == "e4m3"
    )


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
    quantization: str | None = None,
    gemm_backend: str = "auto",
    pipeline_stage: tuple[int, int] = (0, 1),
    tensor_parallel: TensorParallelGroup | None = None,
) -> tuple[nn.Module, "PretrainedConfig"]:
    """Builds the model of a local directory on `device` and fills it; returns it with its config.

    load_format "auto" reads the safetensors files; "dummy" needs config.json only and draws random weights
    from `seed`. max_model_len bounds the positions that the model can embed (None: the config's own limit).
    quantization is "fp8", "fp8_block", "int8" or None, which means fp8_block for a checkpoint in fp8 and none for
    others; what it leaves as it was is listed in the model's `not_quantized`. gemm_backend prefers a backend of
    gemm/dispatch.py. pipeline_stage (index, size) builds and reads the layers of one stage only.
    tensor_parallel is this rank's group: the model is then its part of the whole one, and forward passes and logits
    need all ranks. Building and loading need none of them; but threads of one process have to load one after another.
    Raises CheckpointError for a checkpoint that does not fit, ValueError for an option or a config that is
    not supported, or that the ranks cannot divide.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"unknown load_format {load_format!r}; known: {', '.join(LOAD_FORMATS)}")
    directory, device = Path(model_path), torch.device(device)
    config = load_config(directory)
    if max_model_len is None:
        max_model_len = config.max_position_embeddings
    index, size = pipeline_stage
    stage, group = split_layers(config.num_hidden_layers, size)[index], tensor_parallel or SINGLE_RANK
    with _defaults(resolve_dtype(dtype, device, config), device), building_for(group):
        model = ARCHITECTURES[config.architectures[0]](config, max_model_len, stage).eval()
    model.tensor_parallel = group
    if load_format == "dummy":
        fill_dummy(model, seed)
    else:

        def is_unused(name: str) -> bool:
            is_tied_head = config.tie_word_embeddings and name == "lm_head.weight"
            is_mtp = isinstance(model, DeepseekForCausalLM) and model.is_unused(config, name)
            return is_tied_head or is_mtp or is_elsewhere(name, stage, config.num_hidden_layers)

        _load_or_explain(model, model.slots(), config, directory, is_unused)
    if quantization is None and getattr(config, "quantization_config", None):
        quantization = "fp8_block"
    model.not_quantized = quantize_model(model, quantization, gemm_backend)
    model.finalize()
    return model, config


def is_elsewhere(name: str, stage: Stage, num_layers: int) -> bool:
    """Whether a tensor of that name belongs to another stage of the pipeline."""
    if name.startswith("model.layers."):
        number = name.split(".")[2]
        return number.isdecimal() and int(number) < num_layers and int(number) not in stage.layers
    if name.startswith("model.embed_tokens."):
        return not stage.is_first
    return name.startswith(("model.norm.", "lm_head.")) and not stage.is_last


def load_mtp(
    model_path: str | Path, target: nn.Module, config: "PretrainedConfig", load_format: str = "auto", seed: int = 0
) -> DeepseekMTP:
    """The MTP layers of `target`'s checkpoint, on its device and in its dtype; target and config as `load_model` gave.

    Where the target is one rank's part, so are they, and every pass needs all ranks.

    Raises CheckpointError, by name, where the architecture, the config or the checkpoint has no such layers.
    """
    directory = Path(model_path)
    prefixes = mtp_prefixes(config) if isinstance(target, DeepseekForCausalLM) else ()
    if not prefixes:
        raise CheckpointError(
            f"{directory} has no MTP layers (multi-token prediction): its config.json says architecture "
            f"{config.architectures[0]!r}, num_nextn_predict_layers "
            f"{getattr(config, 'num_nextn_predict_layers', None)}; use another way of speculation, or none"
        )
    if load_format == "dummy":
        names = frozenset(
            prefix + own for prefix in prefixes for own in ("embed_tokens.weight", "shared_head.head.weight")
        )
    else:
        names = tensor_names(directory)
        absent = [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)]
        if absent:
            raise CheckpointError(
                f"{directory} has no MTP layers: config.json says num_nextn_predict_layers {len(prefixes)}, but no "
                f"tensor's name begins with {absent[0]!r}; use another way of speculation, or none"
            )
    weight = target.norm.weight
    with _defaults(weight.dtype, weight.device), building_for(target.tensor_parallel):
        mtp = DeepseekMTP(config, target, names).eval()
    if load_format == "dummy":
        fill_dummy(mtp, seed)
    else:
        _load_or_explain(target, mtp.slots(), config, directory, lambda name: not name.startswith(prefixes))
    mtp.finalize()
    return mtp


def _load_or_explain(
    model: nn.Module,
    slots: Iterator[tuple[str, Slot]],
    config: "PretrainedConfig",
    directory: Path,
    is_unused: Callable[[str], bool],
) -> None:
    """load_weights; where shapes do not fit, the error says from which settings the expected ones follow."""
    try:
        load_weights(slots, directory, is_unused)
    except CheckpointError as error:
        if "wrong shape" in str(error) and isinstance(model, DeepseekForCausalLM):
            settings = model.describe_shapes(config)
            raise CheckpointError(f"{error}. Shapes follow from config.json: {settings}") from None
        raise


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
