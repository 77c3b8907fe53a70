"""DeepSeek-V2 and V3: latent attention and a mixture of experts; otherwise a Llama.

    input_ids [T] --embed--> hidden [T, hidden_size]
    each layer:   hidden, residual --norm--> latent attention --norm--> gated MLP or MoE --> hidden, residual
    last:         norm(hidden + residual) [T, hidden_size];  logits only for the rows that are asked for

The first first_k_dense_replace layers have a plain MLP. V3 differs from V2 in its router (`moe/routing.py`) and may
carry multi-token prediction layers behind the last one (`deepseek_mtp.py`), which this model leaves alone.

Held against transformers' DeepseekV2ForCausalLM and DeepseekV3ForCausalLM; where DeepSeek's own code differs from them,
transformers is followed: V2 never renormalises the weights of its experts, whatever norm_topk_prob says.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minivllm.engine.stages import Stage
from minivllm.layers.embedding import LMHead, VocabEmbedding
from minivllm.layers.linear import Linear
from minivllm.layers.mla import MLAttention
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.layers.sharding import Slot
from minivllm.models.deepseek_attention import DeepseekAttention
from minivllm.models.llama import GatedMLP, check_supported
from minivllm.moe.layer import MoE, RoutedExperts
from minivllm.moe.routing import METHODS, Routing

Slots = Iterator[tuple[str, Slot]]


class DeepseekDecoderLayer(nn.Module):
    """One block; `index` counts through the whole model and decides between MLP and MoE."""

    def __init__(self, config: Any, index: int, routing: Routing) -> None:
        super().__init__()
        self.name = f"model.layers.{index}"
        size = config.hidden_size
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.self_attn = DeepseekAttention(config, f"{self.name}.self_attn")
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        if index < (config.first_k_dense_replace or 0):
            self.mlp: nn.Module = GatedMLP(size, config.intermediate_size, bias=False)
            return
        width, num_shared = config.moe_intermediate_size, config.n_shared_experts
        shared = None
        if num_shared:
            name = "n_shared_experts * moe_intermediate_size"
            shared = GatedMLP(size, width * num_shared, bias=False, reduce=False, size_name=name)
        self.mlp = MoE(f"{self.name}.mlp", routing, config.n_routed_experts, size, width, shared)

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


class DeepseekForCausalLM(nn.Module):
    """A DeepSeek model for positions below max_model_len, from a Hugging Face config.

    Parameters are uninitialised until their slots are filled. `stage` is the part of the model to build (None: all of
    it). Raises ValueError for a config that asks for what is not built: another scoring function or way of choosing
    experts, biases, an activation other than SiLU.
    """

    def __init__(self, config: Any, max_model_len: int, stage: Stage | None = None) -> None:
        super().__init__()
        check_supported(config)
        self.stage = stage or Stage.whole(config.num_hidden_layers)
        for name in ("attention_bias", "mlp_bias"):
            if getattr(config, name, False):
                raise ValueError(f"{name} is not supported for DeepSeek models: set it to false")
        routing = self.routing_of(config)
        self.embed_tokens = self.norm = self.lm_head = None
        if self.stage.is_first or (self.stage.is_last and config.tie_word_embeddings):
            self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config, config.qk_rope_head_dim, max_model_len)
        self.layers = nn.ModuleList(DeepseekDecoderLayer(config, index, routing) for index in self.stage.layers)
        if self.stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = LMHead(config.vocab_size, config.hidden_size)
            if config.tie_word_embeddings:
                self.lm_head.tie(self.embed_tokens)

    def routing_of(self, config: Any) -> Routing:
        """The router's settings; raises ValueError for those that are not known."""
        raise NotImplementedError

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input_ids and positions [T] int64 -> hidden states after the final norm [T, hidden_size].

        A stage that is not the first takes `received` [2, T, hidden_size] from the one before it, and may change it;
        one that is not the last returns such a tensor (models/llama.py).
        """
        hidden, residual = (self.embed_tokens(input_ids), None) if received is None else received.unbind()
        cos, sin = self.rotary(positions, hidden.dtype)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, cos, sin)
        return self.norm(hidden, residual)[0] if self.norm is not None else torch.stack((hidden, residual))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size], rows of what `forward` returned -> logits [N, vocab_size]."""
        return self.lm_head(hidden)

    def attention_layers(self) -> list[MLAttention]:
        """The layers that need a cache, in order."""
        return [layer.self_attn.attn for layer in self.layers]

    @staticmethod
    def is_unused(config: Any, name: str) -> bool:
        """Whether a tensor of that name may be in the checkpoint without a slot here: one of the MTP layers'."""
        return name.startswith(mtp_prefixes(config))

    @staticmethod
    def describe_shapes(config: Any) -> str:
        """The settings that the shapes of a checkpoint's tensors follow from."""
        names = ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
                 "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "moe_intermediate_size", "intermediate_size",
                 "vocab_size")  # fmt: skip
        return ", ".join(f"{name}={getattr(config, name)}" for name in names)

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
        """Called once, after loading; no slots after it."""
        finalize(self)


class DeepseekV2ForCausalLM(DeepseekForCausalLM):
    """DeepSeek-V2, V2-Lite, Coder-V2: softmax scores."""

    def routing_of(self, config: Any) -> Routing:
        method = getattr(config, "topk_method", None) or "greedy"
        return make_routing(config, "softmax", ("greedy", "group_limited_greedy"), method, renormalize=False)


class DeepseekV3ForCausalLM(DeepseekForCausalLM):
    """DeepSeek-V3, R1: sigmoid scores with a bias that balances the load."""

    def routing_of(self, config: Any) -> Routing:
        method = getattr(config, "topk_method", None) or "noaux_tc"
        return make_routing(config, "sigmoid", ("noaux_tc",), method, renormalize=bool(config.norm_topk_prob))


def make_routing(config: Any, scoring: str, methods: tuple[str, ...], method: str, renormalize: bool) -> Routing:
    """The router of a config, in which `scoring` and one of `methods` are expected.

    Raises ValueError, by name, for settings under which running the model would give wrong text without a sign of it.
    """
    asked = getattr(config, "scoring_func", None) or scoring
    if asked != scoring:
        raise ValueError(f"scoring_func {asked!r} is not supported for {config.model_type}: it scores by {scoring!r}")
    if method not in methods:
        known = ", ".join(repr(name) for name in METHODS if name in methods)
        raise ValueError(f"topk_method {method!r} is not supported for {config.model_type}; known: {known}")
    if (getattr(config, "moe_layer_freq", None) or 1) != 1:
        raise ValueError(f"moe_layer_freq {config.moe_layer_freq} is not supported: every layer has experts, or none")
    num_experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    num_groups, topk_group = config.n_group or 1, config.topk_group or 1
    in_reach = num_experts
    if method != "greedy" and num_experts % num_groups == 0:
        in_reach = num_experts // num_groups * min(topk_group, num_groups)
    if not top_k or not 0 < top_k <= in_reach:
        raise ValueError(
            f"num_experts_per_tok must be between 1 and {in_reach}, the experts in reach of a token "
            f"(n_routed_experts {num_experts}, n_group {num_groups}, topk_group {topk_group}), not {top_k}"
        )
    return Routing(method, top_k, num_groups, topk_group, renormalize, config.routed_scaling_factor)


def mtp_prefixes(config: Any) -> tuple[str, ...]:
    """How the names of a config's MTP tensors begin in a checkpoint; empty if it has no such layers."""
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return tuple(f"model.layers.{first + index}." for index in range(count))


def finalize(model: nn.Module) -> None:
    """Attention layers derive their weights from the loaded ones, then linear layers may trade theirs for others."""
    for module in model.modules():
        if isinstance(module, DeepseekAttention):
            module.finalize()
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.finalize()
        if isinstance(module, Linear) and module.weight is not None:  # None: shared with a model that is done
            module.finalize()
