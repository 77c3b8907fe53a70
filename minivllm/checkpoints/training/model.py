"""transformers' own DeepSeek-V3 or Qwen3, made ready for training at a small size.

Three things are added from outside, so that the weights stay those of transformers' classes:

    experts    all experts for all tokens, as two matrix products, weighted by a [N, E] matrix that is zero where a
               token did not choose: with 16 small experts faster than sorting, and no host ever waits
    dropout    after the embedding and after each attention and MLP block, before the residual sum
    router     in float32 also under autocast: a sigmoid in bfloat16 changes who is chosen
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from minivllm.checkpoints.training.recipes import Recipe
from minivllm.checkpoints.training.tokenizer import BOS_ID, EOS_ID, PAD_ID

EXPERTS = "minivllm_all_experts"
_CONFIGS = {"deepseek_v3": DeepseekV3Config, "qwen3": Qwen3Config}


def all_experts(experts: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """sum over chosen e of weight_e * down_e(silu(gate_e(x)) * up_e(x)).

    hidden [N, hidden_size], top_k_index int64 and top_k_weights [N, top_k]; returns [N, hidden_size]. experts holds
    gate_up_proj [E, 2 * intermediate, hidden_size] and down_proj [E, hidden_size, intermediate].
    """
    num_experts, _, intermediate = experts.down_proj.shape
    gate, up = F.linear(hidden, experts.gate_up_proj.flatten(0, 1)).view(-1, num_experts, 2, intermediate).unbind(2)
    weights = hidden.new_zeros(len(hidden), num_experts, dtype=top_k_weights.dtype)
    weights = weights.scatter(1, top_k_index, top_k_weights).to(gate.dtype)
    activated = experts.act_fn(gate) * up * weights.unsqueeze(-1)
    return F.linear(activated.flatten(1), experts.down_proj.transpose(0, 1).flatten(1)).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, all_experts)


def model_config(recipe: Recipe, vocab_size: int) -> PretrainedConfig:
    """The config.json of a recipe, as transformers holds it."""
    architecture = dict(recipe.architecture)
    kind = _CONFIGS[architecture.pop("model_type")]
    extra = {"num_nextn_predict_layers": 1 if recipe.mtp_passes else 0} if kind is DeepseekV3Config else {}
    rope = {"rope_type": "default", "rope_theta": architecture.pop("rope_theta", 10000.0)}
    return kind(
        **architecture,
        **extra,
        rope_parameters=rope,
        vocab_size=vocab_size,
        max_position_embeddings=recipe.sequence_length,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def build_model(config: PretrainedConfig) -> PreTrainedModel:
    """Freshly initialised float32 weights from torch's global generator."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa", **experts_option(config)
    )
    prepare_routers(model)
    return model


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """ids [B, T] -> [B, T, hidden_size], after the final norm.

    transformers' forward looks into the positions for packed sequences, and waits for the device to do so.
    """
    base = model.model
    hidden = base.embed_tokens(ids)
    rotary = base.rotary_emb(hidden, position_ids=torch.arange(ids.shape[1], device=ids.device)[None])
    for layer in base.layers:
        # No mask: attention is causal by itself.
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
    return base.norm(hidden)


def experts_option(config: PretrainedConfig) -> dict[str, str]:
    """What from_config and from_pretrained must be told so that a model's experts are computed by all_experts."""
    return {"experts_implementation": EXPERTS} if getattr(config, "n_routed_experts", None) else {}


def routers(model: nn.Module) -> dict[str, DeepseekV3TopkRouter]:
    """The routers in a model or an MTP layer, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DeepseekV3TopkRouter)}


def prepare_routers(model: nn.Module) -> None:
    """Keeps routers in float32 under autocast, as inference has them."""
    for router in routers(model).values():
        forward = router.forward
        for device in ("cpu", "cuda"):
            forward = torch.autocast(device, enabled=False)(forward)
        router.forward = forward


def add_dropout(model: nn.Module, layers: list[nn.Module], probability: float) -> None:
    """Dropout on the embedding of `model` and on what attention and MLP of each layer add to the residual."""

    def drop(module: nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, tuple):
            return F.dropout(output[0], probability, module.training), *output[1:]
        return F.dropout(output, probability, module.training)

    if probability > 0:
        model.get_input_embeddings().register_forward_hook(drop)
        for layer in layers:
            layer.self_attn.register_forward_hook(drop)
            layer.mlp.register_forward_hook(drop)


def parameter_groups(modules: list[nn.Module], weight_decay: float) -> list[dict]:
    """AdamW's groups: matrices decay, norms do not."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
