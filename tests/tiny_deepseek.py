"""Random DeepSeek models as transformers saves them, and what transformers itself does with them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.worker.model_runner import ModelRunner

VOCAB_SIZE = 160
MAX_POSITIONS = 512

V3: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "num_nextn_predict_layers": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
V2 = {
    **{name: value for name, value in V3.items() if name != "num_nextn_predict_layers"},
    "n_shared_experts": 2,
    "topk_method": "group_limited_greedy",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}


def save_deepseek(
    path: Path, version: int = 3, std: float = 0.2, seed: int = 0, mtp_layers: int = 0, **settings: Any
) -> Any:
    """Saves a random model, `settings` on top of V3 or V2, and returns transformers' model of it in float32.

    Weights are larger than usual, so that the best token stands out and a swapped or skipped tensor shows. The bias of
    the router is as large as the differences between scores, so that it changes who is chosen. With mtp_layers, that
    many multi-token prediction layers stand behind the last layer, under DeepSeek's names.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    if mtp_layers:
        settings["num_nextn_predict_layers"] = mtp_layers

    config_class, model_class, defaults = (
        (DeepseekV3Config, DeepseekV3ForCausalLM, V3) if version == 3 else (DeepseekV2Config, DeepseekV2ForCausalLM, V2)
    )
    config = config_class(**{**defaults, **settings})
    model = model_class(config).float().eval()
    randomize(model, std, seed)
    model.save_pretrained(path)
    if mtp_layers:
        add_mtp_layers(path, model, std, seed)
    return model


def add_mtp_layers(path: Path, model: Any, std: float, seed: int) -> Any:
    """Random MTP layers into the checkpoint of `model`, as DeepSeek stores them; returns transformers' own of them."""
    from safetensors.torch import load_file, save_file
    from transformers.modeling_layers import MtpModel

    mtp = MtpModel(model, model.config.num_nextn_predict_layers).float().eval()
    randomize(mtp.layers, std, seed + 1)
    tensors = load_file(path / "model.safetensors")
    for index, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{model.config.num_hidden_layers + index}."
        for name, tensor in layer.state_dict().items():
            tensors |= {prefix + stored: part.contiguous() for stored, part in _as_stored(name, tensor)}
        tensors[f"{prefix}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"{prefix}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return mtp


def _as_stored(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of transformers' MTP layer under its name (or names, for experts) in a checkpoint."""
    name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    if name == "mlp.experts.gate_up_proj":
        for expert, (gate, up) in enumerate(pair.chunk(2) for pair in tensor):
            yield f"mlp.experts.{expert}.gate_proj.weight", gate
            yield f"mlp.experts.{expert}.up_proj.weight", up
    elif name == "mlp.experts.down_proj":
        for expert, down in enumerate(tensor):
            yield f"mlp.experts.{expert}.down_proj.weight", down
    else:
        yield name, tensor


@torch.no_grad()
def randomize(model: torch.nn.Module, std: float, seed: int) -> None:
    """All parameters and router biases of a transformers model at random, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if "e_score_correction_bias" in name:
            tensor.normal_(0.0, 0.1, generator=generator)
        else:
            tensor.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)


@dataclass
class TinyDeepseek:
    """A checkpoint directory, and transformers' own answers in float32."""

    path: Path
    model: Any = field(repr=False)

    @classmethod
    def save(cls, path: Path, **settings: Any) -> "TinyDeepseek":
        return cls(path, save_deepseek(path, **settings))

    @cached_property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), V] float32."""
        return self.model(torch.tensor([token_ids])).logits[0]

    @torch.no_grad()
    def greedy(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        """transformers' greedy continuation and its smallest margin between the best two logits."""
        ids, margin = list(prompt), float("inf")
        for _ in range(max_tokens):
            best_two = self.logits(ids)[-1].topk(2)
            margin = min(margin, (best_two.values[0] - best_two.values[1]).item())
            ids.append(int(best_two.indices[0]))
        return ids[len(prompt) :], margin

    def engine(self, **settings: Any) -> EngineCore:
        config = EngineConfig(str(self.path), **{"dtype": "float32", "device": "cpu", "max_num_seqs": 16, **settings})
        runner = ModelRunner(config, str(self.path))
        return EngineCore(config, runner, runner.num_blocks, runner.max_model_len, runner.block_size)


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
