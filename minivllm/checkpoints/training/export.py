"""A finished model as a directory in Hugging Face layout, with the tensor names that DeepSeek-V3's checkpoints use.

    model.layers.1.mlp.experts.gate_up_proj [E, 2 I, d]  ->  model.layers.1.mlp.experts.0.gate_proj.weight [I, d] ...
    MTP layer, L = num_hidden_layers                     ->  model.layers.L.{enorm, hnorm, eh_proj, shared_head.norm}
                                                             model.layers.L.{self_attn, mlp, *_layernorm}
                                                             model.layers.L.{embed_tokens, shared_head.head}

The last two are copies of the main model's embedding and head, as in DeepSeek-V3's files. A tied head is stored once.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from minivllm.checkpoints.training.model import experts_option, prepare_routers
from minivllm.checkpoints.training.mtp import MTPLayer
from minivllm.checkpoints.training.tokenizer import BOS_ID, EOS_ID, PAD_ID

_BIAS = "e_score_correction_bias"
_MTP_NAMES = {"block.": "", "norm.": "shared_head.norm."}


def checkpoint_tensors(model: PreTrainedModel, mtp: MTPLayer | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors under their published names, on the CPU; the routers' biases stay in float32."""
    tensors = dict(model.state_dict())
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if mtp is not None:
        prefix = _mtp_prefix(model)
        for name, tensor in mtp.state_dict().items():
            tensors[prefix + _published(name)] = tensor
        tensors[prefix + "embed_tokens.weight"] = embedding
        tensors[prefix + "shared_head.head.weight"] = head
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        split |= _split_experts(name, tensor)
    return {
        name: tensor.detach().to("cpu", torch.float32 if name.endswith(_BIAS) else dtype).contiguous()
        for name, tensor in split.items()
    }


def save_checkpoint(model: PreTrainedModel, mtp: MTPLayer | None, directory: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors, in bfloat16."""
    tensors = checkpoint_tensors(model, mtp, torch.bfloat16)
    # A tensor that shares memory with another is refused, so copies are made here.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    (directory / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    config = model.config.to_diff_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    )


def load_checkpoint(directory: Path, device: torch.device) -> tuple[PreTrainedModel, MTPLayer | None]:
    """The model through transformers, and the MTP layer if there is one, in float32, for measuring."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list the MTP layer's tensors as unexpected
    try:
        plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        options = experts_option(plain.config)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options) if options else plain
    finally:
        logging.set_verbosity(verbosity)
    prepare_routers(model)
    model.to(device).eval()
    if not getattr(model.config, "num_nextn_predict_layers", 0):
        return model, None
    mtp = MTPLayer(model.config)
    stored = load_file(directory / "model.safetensors")
    state = {name: _find(stored, _mtp_prefix(model) + _published(name)) for name in mtp.state_dict()}
    mtp.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model, mtp.to(device).eval()


def num_parameters(modules: list[nn.Module]) -> int:
    """Parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in {p for module in modules for p in module.parameters()})


def _mtp_prefix(model: PreTrainedModel) -> str:
    return f"model.layers.{model.config.num_hidden_layers}."


def _published(name: str) -> str:
    """The name of an MTP layer's tensor behind its prefix; `block` is not part of it."""
    for ours, theirs in _MTP_NAMES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    stem, _, kind = name.rpartition(".experts.")
    if kind == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        parts = {"gate_proj": gate, "up_proj": up}
    elif kind == "down_proj":
        parts = {"down_proj": tensor}
    else:
        return {name: tensor}
    return {
        f"{stem}.experts.{index}.{part}.weight": weight
        for part, weights in parts.items()
        for index, weight in enumerate(weights)
    }


def _find(stored: dict[str, Tensor], name: str) -> Tensor:
    """The tensor, experts stacked again."""
    stem, _, kind = name.rpartition(".experts.")
    if kind not in ("gate_up_proj", "down_proj"):
        return stored[name]
    parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
    count = sum(key.startswith(f"{stem}.experts.") and key.endswith(f".{parts[0]}.weight") for key in stored)
    return torch.stack(
        [torch.cat([stored[f"{stem}.experts.{index}.{part}.weight"] for part in parts]) for index in range(count)]
    )


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
