"""Small random checkpoints, and attention without a cache so that models run by themselves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from minivllm.checkpoints import fetch
from minivllm.models import llama


class PlainAttention(nn.Module):
    """Causal attention of one request over itself, with the signature of the engine's layer."""

    def __init__(self, layer_name: str, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        super().__init__()
        self.layer_name, self.groups, self.scale = layer_name, num_heads // num_kv_heads, scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(self.groups, dim=1).transpose(0, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True, scale=self.scale)
        return out.transpose(0, 1)


@pytest.fixture
def plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "Attention", PlainAttention)


SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def save_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, PreTrainedModel]]:
    """Saves a random model of a config class as transformers does; returns its directory and the model."""

    def save(
        config_class: type[PretrainedConfig] = LlamaConfig, max_shard_size: str = "1GB", **settings
    ) -> tuple[Path, PreTrainedModel]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_class(**(SMALL | settings))).eval()
        for name, parameter in model.named_parameters():
            # Large enough that a swapped or skipped tensor shows in the logits.
            nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
        model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        return tmp_path, model

    return save


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model, downloaded and converted on the first run, then taken from the user's cache."""
    return fetch("smollm2-135m")
