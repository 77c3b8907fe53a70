"""The MTP layer of DeepSeek-V3, trained over the passes in which it will be used.

    x = eh_proj(concat(enorm(embed(token)), hnorm(h)));  out = norm(block(x));  logits = head(out)

embed and head are the main model's. Position j reads token j + 1 and predicts token j + 2, at position j, in every
pass; what changes is h:

    pass 1   the target's hidden state of position j, after its final norm          drafts the first token
    pass 2   the layer's own output of pass 1 at position j - 1, after its norm     drafts the second, and so on

so pass p is defined from position p - 1 on. The embedding is zero at position 0. When the layer drafts for real, its
cache holds pass 1 for accepted tokens, and later passes only for the drafts after them. Training keeps to that: in
pass p, position j attends to

    positions <= j - p + 1 of pass 1,  then j - p + 2 of pass 2,  ...,  j - 1 of pass p - 1,  and itself

A draft is right if it is what the target says, not what the text says. So the loss is a mix of the two: the next
token of the text, as DeepSeek-V3 has it, and the target's distribution, which overfits less.

Methods: MTP, DeepSeek-V3 (2024), here with one layer for all depths; unrolling with this mask, EAGLE-3 (2025);
distilling a drafter from its target, DistillSpec (2023).
"""

import inspect
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from minivllm.checkpoints.training.model import prepare_routers


class MTPLayer(nn.Module):
    """Its parameters only: embedding, head and rotary tables are passed in, since they are the main model's."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.enorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, layer_idx=config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        prepare_routers(self)

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        passes: "PassCache",
    ) -> Tensor:
        """One pass. embeddings and hidden [B, T, hidden_size]; returns the normed output, the same shape."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        x = self.block(x, attention_mask=mask, position_embeddings=rotary, **{_CACHE_ARGUMENT: passes})
        return self.norm(x)


# transformers renamed the argument of its layers.
_CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(DeepseekV3Attention.forward).parameters else "past_key_values"


class PassCache:
    """Latents and rotary keys of the passes so far, one behind the other: what the block's attention reads."""

    def __init__(self) -> None:
        self.latents: list[Tensor] = []
        self.rotary_keys: list[Tensor] = []

    def update(self, latent: Tensor, rotary_key: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Adds a pass, [B, 1, T, dim] each; returns all of them, [B, 1, passes * T, dim]."""
        self.latents.append(latent)
        self.rotary_keys.append(rotary_key)
        return torch.cat(self.latents, dim=2), torch.cat(self.rotary_keys, dim=2)


@lru_cache(maxsize=8)
def pass_mask(length: int, index: int, device: torch.device) -> Tensor:
    """Who is attended to in pass number index (from 0): bool [1, 1, length, (index + 1) * length]."""
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    first = key <= query - index
    later = [key == query - (index - earlier) for earlier in range(1, index + 1)]
    return torch.cat([first, *later], dim=1)[None, None]


def initialise(mtp: MTPLayer, model: PreTrainedModel) -> None:
    """transformers' own initialisation, which a layer outside its model has not had yet."""
    mtp.apply(model._init_weights)


def unroll(model: PreTrainedModel, mtp: MTPLayer, rows: Tensor, hidden: Tensor, num_passes: int) -> list[Tensor]:
    """The layer's normed outputs of each pass, [B, T, hidden_size] each; logits are model.lm_head of them.

    rows [B, T + 2] token ids, hidden [B, T, hidden_size] the target's of positions 0 .. T - 1. In pass number p
    (from 0) positions before p are without meaning.
    """
    length = hidden.shape[1]
    positions = torch.arange(length, device=rows.device)
    embeddings = model.get_input_embeddings()(rows[:, 1 : length + 1]) * (positions > 0)[:, None]
    rotary = model.model.rotary_emb(embeddings, position_ids=positions[None])
    passes, outputs = PassCache(), []
    for index in range(num_passes):
        hidden = mtp(embeddings, hidden, rotary, pass_mask(length, index, rows.device), passes)
        outputs.append(hidden)
        hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
    return outputs


def pass_loss(logits: Tensor, rows: Tensor, index: int) -> Tensor:
    """Mean cross-entropy of pass number index (from 0): position j >= index predicts token j + 2.

    logits [B, T, vocab_size], rows [B, T + 2].
    """
    return F.cross_entropy(logits[:, index:].flatten(0, 1).float(), rows[:, index + 2 :].flatten())


def distillation_loss(logits: Tensor, target_logits: Tensor, index: int) -> Tensor:
    """Mean cross-entropy of pass number index (from 0) against the target's own distribution of the same token.

    Position j of the MTP layer and position j + 1 of the target both predict token j + 2. Both [B, T, vocab_size]; no
    gradient reaches the target through this.
    """
    wanted = target_logits[:, index + 1 :].detach().float().softmax(-1)
    return F.cross_entropy(logits[:, index:-1].flatten(0, 1).float(), wanted.flatten(0, 1))
