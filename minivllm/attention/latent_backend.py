"""Who serves multi-head latent attention: what an MLA layer asks of a backend, and how rows are divided.

    decode rows   absorbed: queries meet the latents as they lie in the cache     layer.absorb -> decode -> layer.expand
    varlen rows   decompressed: k and v are made from the latents in sight        varlen, with layer.decompress

A backend knows the cache, the layer (`layers/mla.py`) knows the weights. The cache of a layer is [num_blocks,
block_size, 1, d_c + d_r], or bytes in FP8 (`store.py`). Implementations: `latent_torch.py`, `latent_triton.py`.
"""

from typing import TYPE_CHECKING

import torch

from minivllm.attention.backend import _in_two_parts
from minivllm.attention.metadata import AttentionMetadata, PagedRows

if TYPE_CHECKING:
    from minivllm.layers.mla import MLAttention


class LatentBackend:
    """What an MLA layer asks for: `store` and `attend`. Subclasses say how each kind of row is served."""

    name: str

    def store(self, c: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write latents c [T, d_c] and rotary keys k_rope [T, d_r] to their slots."""
        raise NotImplementedError

    def attend(
        self,
        layer: "MLAttention",
        q: torch.Tensor,
        c: torch.Tensor,
        k_rope: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """q [T, H, d_nope + d_r] -> [T, H, d_v]; each row sees its request's cached tokens up to its own position.

        c and k_rope are the step's own rows, which the cache holds already.
        """
        return _in_two_parts(
            metadata,
            lambda part, rows: layer.expand(self.decode(layer, layer.absorb(q[part]), cache, rows)),
            lambda part, rows: self.varlen(layer, q[part], c[part], k_rope[part], cache, rows),
        )

    def decode(self, layer: "MLAttention", q: torch.Tensor, cache: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        """Absorbed queries [B * max_seqlen_q, H, d_c + d_r] -> what they read, [B * max_seqlen_q, H, d_c]."""
        raise NotImplementedError

    def varlen(
        self,
        layer: "MLAttention",
        q: torch.Tensor,
        c: torch.Tensor,
        k_rope: torch.Tensor,
        cache: torch.Tensor,
        rows: PagedRows,
    ) -> torch.Tensor:
        """Chunks of prompts: q [N, H, d_nope + d_r], and the chunks' own latents -> [N, H, d_v]."""
        raise NotImplementedError


class SkippedLatentAttention(LatentBackend):
    """Stands in for a backend while memory is measured and there is no cache yet: decompresses, and reads nothing."""

    name = "skipped"

    def store(self, *_: object) -> None:
        pass

    def attend(
        self, layer: "MLAttention", q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, *_: object
    ) -> torch.Tensor:
        _, v = layer.decompress(c, k_rope)
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
