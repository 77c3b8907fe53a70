"""The projections around DeepSeek's latent attention: from hidden states to queries, latents and rotary keys.

    x [T, hidden_size] --one product--> q or its low-rank form | c [d_c] | rotary key [d_r]     (a row a token)
    q_a --norm--> q_b_proj --> q [T, H, d_nope + d_r]          (with q LoRA; else q is there already)
    c --norm--> what the cache holds, next to the rotated key

Rotation: checkpoints pair neighbours (0, 1), (2, 3), … of the rotary dims, the engine pairs halves. Scores are sums
over dims, so q and k may be reordered alike; `finalize` moves the rows of the weights once (even ones first, as
transformers orders its results), and no step pays for it.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minivllm.layers import use_fused_kernels
from minivllm.layers.linear import Linear, MergedLinear, RowParallelLinear
from minivllm.layers.mla import MLAttention
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import apply_rotary, rope_parameters
from minivllm.layers.sharding import Share, Slot, split

# Not rms_norm_eps: DeepSeek's own code and transformers leave these two norms at their default.
_LORA_NORM_EPS = 1e-6


class DeepseekAttention(nn.Module):
    """[T, hidden_size] -> the same, with or without q LoRA; `name` is the module's name in the checkpoint."""

    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        heads = split("num_attention_heads", config.num_attention_heads)
        self.num_heads, self.d_c = heads.size, config.kv_lora_rank
        self.d_nope, self.d_rope, d_v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.interleaved = bool(getattr(config, "rope_interleave", True))
        q_rows, kv_size = heads.times(self.d_nope + self.d_rope), self.d_c + self.d_rope
        lora = config.q_lora_rank
        self.first_size = lora or q_rows.size
        # What is made per head is divided between ranks; latents, of q and of k and v, are made on each of them.
        parts: dict[str, int | Share] = {"q_a_proj": lora} if lora else {"q_proj": q_rows}
        parts["kv_a_proj_with_mqa"] = kv_size
        self.qkv_a_proj = MergedLinear(config.hidden_size, parts)
        self.q_a_layernorm = RMSNorm(lora, _LORA_NORM_EPS) if lora else None
        self.q_b_proj = Linear(lora, q_rows) if lora else None
        self.kv_a_layernorm = RMSNorm(self.d_c, _LORA_NORM_EPS)
        scale = softmax_scale(config, self.d_nope + self.d_rope)
        self.attn = MLAttention(name, heads, self.d_nope, self.d_rope, d_v, self.d_c, scale)
        self.o_proj = RowParallelLinear(heads.times(d_v), config.hidden_size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, c, k_rope = self.qkv_a_proj(x).split([self.first_size, self.d_c, self.d_rope], dim=1)
        if self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q, None)[0])
        q = q.unflatten(1, (self.num_heads, -1))
        c = self.kv_a_layernorm(c, None)[0]
        _rotate(q[..., self.d_nope :], cos, sin)
        _rotate(k_rope[:, None], cos, sin)
        return self.o_proj(self.attn(q, c, k_rope).flatten(1))

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.qkv_a_proj.slots(prefix)
        if self.q_b_proj is not None:
            yield f"{prefix}.q_a_layernorm.weight", self.q_a_layernorm.weight
            yield from self.q_b_proj.slots(f"{prefix}.q_b_proj")
        yield f"{prefix}.kv_a_layernorm.weight", self.kv_a_layernorm.weight
        yield from self.attn.slots(prefix)
        yield from self.o_proj.slots(f"{prefix}.o_proj")

    def finalize(self) -> None:
        """Called once, after loading and before linear layers are packed."""
        if self.interleaved:
            first, kv = self.qkv_a_proj.weight.split([self.first_size, self.d_c + self.d_rope])
            q = first if self.q_b_proj is None else self.q_b_proj.weight
            _pairs_to_halves(q.view(self.num_heads, -1, q.shape[1])[:, self.d_nope :])
            _pairs_to_halves(kv[None, self.d_c :])
        self.attn.absorb_weights()


def softmax_scale(config: Any, head_dim: int) -> float:
    """1 / sqrt(head_dim), times the square of YaRN's mscale where the config has mscale_all_dim.

    YaRN (Peng et al. 2023) makes attention sharper over long contexts; DeepSeek does it here rather than on cos and
    sin, so that the unrotated dims get their share.
    """
    parameters = rope_parameters(config)
    weight, factor = parameters.get("mscale_all_dim"), parameters.get("factor") or 1.0
    scale = head_dim**-0.5
    if parameters["rope_type"] == "default" or not weight or factor <= 1:
        return scale
    return scale * (0.1 * weight * math.log(factor) + 1.0) ** 2


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates x [T, heads, d_r] in place."""
    if use_fused_kernels(x):
        from minivllm.layers.fused import head_norm_and_rotary

        head_norm_and_rotary(x, x.shape[1], 0, None, 0.0, cos, sin)
    else:
        apply_rotary(x, cos, sin)


def _pairs_to_halves(rows: torch.Tensor) -> None:
    """rows [heads, d_r, in_features], in place: 0 1 2 3 4 5 -> 0 2 4 1 3 5."""
    rows.copy_(torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1))
