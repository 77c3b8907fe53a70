"""Multi-head latent attention (DeepSeek-V2, 2024): the cache holds one latent a token, from which all heads are made.

    c [T, d_c], rotary key [T, d_r]   what is cached: d_c + d_r numbers a token, for all heads together
    k_h = [W_UK_h c, rotary key]      head h's key, d_nope + d_r numbers
    v_h = W_UV_h c                    head h's value, d_v numbers

Two ways to the same attention, and each is right where it is used:

    decompressed  make k and v of all tokens in sight, then attend as usual        many queries share that work
    absorbed      q_h . W_UK_h c = (W_UK_h^T q_h) . c: move W_UK into q, attend    one query: the context is read as it
                  over the latents themselves, and apply W_UV to the result        lies in the cache, once for all heads

Both use the same weight, kv_b_proj [H (d_nope + d_v), d_c]. W_UK and W_UV are views of it.
"""

from collections.abc import Iterator

import torch
from torch import nn

from minivllm.forward_context import get_forward_context
from minivllm.layers.linear import Linear
from minivllm.layers.sharding import Share, Slot, whole
from minivllm.moe.ops import Registered, register


class MLAttention(Registered, nn.Module):
    """Causal attention of one layer over the paged cache of latents.

    Args:
        layer_name: key of this layer's cache in the forward context.
        num_heads: H, or the rank's share of them: its W_UK and W_UV. The cache of latents is the same on all ranks.
        d_nope, d_rope: parts of a query's and key's head dim without and with rotation.
        d_v: a value's head dim.
        d_c: size of the latent.
        scale: factor on q k^T before the softmax; 1 / sqrt(d_nope + d_rope) unless YaRN changes it.
    """

    def __init__(
        self, layer_name: str, num_heads: int | Share, d_nope: int, d_rope: int, d_v: int, d_c: int, scale: float
    ) -> None:
        super().__init__()
        heads = whole(num_heads)
        self.layer_name, self.num_heads, self.scale = layer_name, heads.size, scale
        self.d_nope, self.d_rope, self.d_v, self.d_c = d_nope, d_rope, d_v, d_c
        self.kv_b_proj = Linear(d_c, heads.times(d_nope + d_v))
        self.w_uk = self.w_uv = torch.empty(0)
        self.op_name = register(self, layer_name)

    def absorb_weights(self) -> None:
        """Takes W_UK [H, d_nope, d_c] and W_UV [H, d_v, d_c] from the loaded weight, before it may be packed away."""
        weight = self.kv_b_proj.weight.detach().view(self.num_heads, self.d_nope + self.d_v, self.d_c)
        self.w_uk, self.w_uv = weight.split([self.d_nope, self.d_v], dim=1)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.kv_b_proj.slots(f"{prefix}.kv_b_proj")

    def forward(self, q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
        """q [T, H, d_nope + d_rope], c [T, d_c] after its norm, k_rope [T, d_rope], both rotated -> [T, H, d_v]."""
        if torch.compiler.is_compiling():
            return torch.ops.minivllm.latent_attention(q, c, k_rope, self.d_v, self.op_name)
        return self.attend(q, c, k_rope)

    def attend(self, q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
        """`forward`, outside of any graph.

        Every row is stored before any row attends: rows of one step may share blocks.
        """
        context = get_forward_context()
        cache = context.kv_caches[self.layer_name]
        backend, metadata = context.attention_backend, context.attention_metadata
        backend.store(c, k_rope, cache, metadata.slot_mapping)
        return backend.attend(self, q, c, k_rope, cache, metadata)

    def decompress(self, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents c [N, d_c] and rotary keys [N, d_rope] -> k [N, H, d_nope + d_rope], v [N, H, d_v] (a view)."""
        heads = self.kv_b_proj(c).view(-1, self.num_heads, self.d_nope + self.d_v)
        k = heads.new_empty(len(c), self.num_heads, self.d_nope + self.d_rope)
        k[..., : self.d_nope] = heads[..., : self.d_nope]
        k[..., self.d_nope :] = k_rope[:, None]
        return k, heads[..., self.d_nope :]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """q [B, H, d_nope + d_rope] -> [B, H, d_c + d_rope], to be held against the rows of the cache."""
        absorbed = q.new_empty(len(q), self.num_heads, self.d_c + self.d_rope)
        absorbed[..., self.d_c :] = q[..., self.d_nope :]
        torch.bmm(q[..., : self.d_nope].transpose(0, 1), self.w_uk, out=absorbed[..., : self.d_c].transpose(0, 1))
        return absorbed

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """Latents [B, H, d_c] that the heads read -> their values [B, H, d_v]."""
        out = attended.new_empty(len(attended), self.num_heads, self.d_v)
        torch.bmm(attended.transpose(0, 1), self.w_uv.mT, out=out.transpose(0, 1))
        return out
