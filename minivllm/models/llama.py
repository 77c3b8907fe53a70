"""Llama and its close kin: Llama 1-3, SmolLM2 (a Llama), Qwen2 (biases on q, k, v), Qwen3 (norms on q and k).

    input_ids [T] --embed--> hidden [T, hidden_size]
    each layer:   hidden, residual --norm--> attention --norm--> gated MLP --> hidden, residual
    last:         norm(hidden + residual) [T, hidden_size];  logits only for the rows that are asked for

T counts the tokens of all scheduled requests, end to end. Only attention knows where one request ends and the
next begins. A layer takes and returns (hidden, residual), so that a range of layers is a pipeline stage: the
embedding stands before the first, norm and head after the last. Layer names carry the index in the whole
model, and between stages travels what a layer returns: hidden and residual, [2, T, hidden_size].
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.engine.stages import Stage
from minivllm.layers import Layer, use_fused_kernels, use_plain_attributes
from minivllm.layers.attention import Attention
from minivllm.layers.embedding import LMHead, VocabEmbedding
from minivllm.layers.linear import Linear, MergedLinear, QKVLinear, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding, apply_rotary
from minivllm.layers.sharding import Slot, split, split_or_replicate

Slots = Iterator[tuple[str, Slot]]


class LlamaAttention(Layer):
    """Projections, rotary embedding and attention with grouped KV heads; [T, hidden_size] -> the same.

    Ranks divide the query heads, and the KV heads that go with them; where there are more ranks than KV heads, ranks
    that share one hold it each.
    """

    def __init__(self, config: Any, name: str, qkv_bias: bool, o_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        heads = split("num_attention_heads", config.num_attention_heads)
        kv_heads = split_or_replicate("num_key_value_heads", config.num_key_value_heads)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size
        head_dim = head_dim_of(config)
        self.qkv_proj = QKVLinear(config.hidden_size, heads, kv_heads, head_dim, qkv_bias)
        self.o_proj = RowParallelLinear(heads.times(head_dim), config.hidden_size, o_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.attn = Attention(name, self.num_heads, self.num_kv_heads, head_dim, scale=head_dim**-0.5)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = self._norm_and_rotate(self.qkv_proj(x), cos, sin)
        q, k, v = heads.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return self.o_proj(self.attn(q, k, v).flatten(1))

    def _norm_and_rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Changes the q and k heads of [T, num_heads + 2 num_kv_heads, head_dim] in place, and returns all of it."""
        num_q, num_k = self.num_heads, self.num_kv_heads
        if use_fused_kernels(heads):
            from minivllm.layers.fused import head_norm_and_rotary

            weights = None if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)
            eps = 0.0 if self.q_norm is None else self.q_norm.eps
            return head_norm_and_rotary(heads, num_q, num_k, weights, eps, cos, sin)
        if self.q_norm is not None:
            for part, norm in ((heads[:, :num_q], self.q_norm), (heads[:, num_q : num_q + num_k], self.k_norm)):
                part.copy_(norm.normalise(part))
        apply_rotary(heads[:, : num_q + num_k], cos, sin)
        return heads

    def slots(self, prefix: str) -> Slots:
        yield from self.qkv_proj.slots(prefix)
        yield from self.o_proj.slots(f"{prefix}.o_proj")
        if self.q_norm is not None:
            yield f"{prefix}.q_norm.weight", self.q_norm.weight
            yield f"{prefix}.k_norm.weight", self.k_norm.weight


class GatedMLP(Layer):
    """down(silu(gate(x)) * up(x)), SwiGLU (Shazeer, 2020); [T, hidden_size] -> the same.

    `reduce` false: this rank's part of the sum over its columns, for a caller who has more to add to it. `size_name`:
    what the config calls intermediate_size, for errors.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        reduce: bool = True,
        size_name: str = "intermediate_size",
    ) -> None:
        super().__init__()
        columns = split(size_name, intermediate_size)
        self.gate_up_proj = MergedLinear(hidden_size, {"gate_proj": columns, "up_proj": columns}, bias)
        self.down_proj = RowParallelLinear(columns, hidden_size, bias, reduce)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        if use_fused_kernels(x):
            from minivllm.layers.fused import silu_and_mul

            return self.down_proj(silu_and_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))

    def slots(self, prefix: str) -> Slots:
        yield from self.gate_up_proj.slots(prefix)
        yield from self.down_proj.slots(f"{prefix}.down_proj")


class LlamaDecoderLayer(Layer):
    """One block. The sum of hidden and residual is formed by the next norm, wherever that is."""

    def __init__(self, config: Any, index: int, qkv_bias: bool, o_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.name = f"model.layers.{index}"
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, f"{self.name}.self_attn", qkv_bias, o_bias, qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        mlp_bias = getattr(config, "mlp_bias", False)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, mlp_bias)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, cos, sin)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual

    def slots(self) -> Slots:
        yield f"{self.name}.input_layernorm.weight", self.input_layernorm.weight
        yield from self.self_attn.slots(f"{self.name}.self_attn")
        yield f"{self.name}.post_attention_layernorm.weight", self.post_attention_layernorm.weight
        yield from self.mlp.slots(f"{self.name}.mlp")


class LlamaForCausalLM(nn.Module):
    """A decoder-only language model for positions below max_model_len, from a Hugging Face config.

    Parameters are uninitialised until their slots are filled. `stage` is the part of the model to build (None: all of
    it). Raises ValueError for a config that asks for what is not built: sliding windows, an activation other than
    SiLU, an unknown rope type.
    """

    qkv_bias: bool | None = None  # None: as the config's attention_bias says
    o_bias: bool | None = None
    qk_norm: bool = False

    def __init__(self, config: Any, max_model_len: int, stage: Stage | None = None) -> None:
        super().__init__()
        check_supported(config)
        self.stage = stage or Stage.whole(config.num_hidden_layers)
        bias = getattr(config, "attention_bias", False)
        qkv_bias = bias if self.qkv_bias is None else self.qkv_bias
        o_bias = bias if self.o_bias is None else self.o_bias
        self.embed_tokens = self.norm = self.lm_head = None
        if self.stage.is_first or (self.stage.is_last and config.tie_word_embeddings):
            self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config, head_dim_of(config), max_model_len)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, index, qkv_bias, o_bias, self.qk_norm) for index in self.stage.layers
        )
        if self.stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = LMHead(config.vocab_size, config.hidden_size)
            if config.tie_word_embeddings:
                self.lm_head.tie(self.embed_tokens)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input_ids and positions [T] int64 -> hidden states after the final norm [T, hidden_size].

        A stage that is not the first takes `received` [2, T, hidden_size] from the one before it, and may change it;
        one that is not the last returns such a tensor.
        """
        hidden, residual = (self.embed_tokens(input_ids), None) if received is None else received.unbind()
        cos, sin = self.rotary(positions, hidden.dtype)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, cos, sin)
        return self.norm(hidden, residual)[0] if self.norm is not None else torch.stack((hidden, residual))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size], rows of what `forward` returned -> logits [N, vocab_size]."""
        return self.lm_head(hidden)

    def attention_layers(self) -> list[Attention]:
        """The layers that need a KV cache, in order."""
        return [layer.self_attn.attn for layer in self.layers]

    def slots(self) -> Slots:
        """Yields (name in the checkpoint, tensor to copy into) for all that a checkpoint must hold."""
        if self.embed_tokens is not None:
            yield from self.embed_tokens.slots("model.embed_tokens")
        for layer in self.layers:
            yield from layer.slots()
        if self.stage.is_last:
            yield "model.norm.weight", self.norm.weight
            yield from self.lm_head.slots("lm_head")

    def finalize(self) -> None:
        """Called once, after loading: layers may trade weights for a faster form; no slots after it."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finalize()
        use_plain_attributes(self)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and 2.5: biases on the q, k and v projections and nowhere else."""

    qkv_bias, o_bias = True, False


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3: an RMSNorm on every query and key head, and a head_dim of its own."""

    qk_norm = True


def head_dim_of(config: Any) -> int:
    """The size of a head; older configs leave it out where the heads share hidden_size evenly."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check_supported(config: Any) -> None:
    """Raises ValueError where running the model anyway would give wrong text without a sign of it."""
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; the known activation is 'silu'")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise ValueError("sliding-window attention is not supported: set use_sliding_window to false")
