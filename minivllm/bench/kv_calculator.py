"""What a model's attention costs, by arithmetic: bytes of cache, bytes and operations of a step, the roofline.

    config.json -> AttentionShape.from_config -> bytes_per_token, context_bytes, tokens_that_fit
                                              -> flash_prefill, paged_decode, mla_decode -> Work -> Device.attainable

Nothing here is measured. Work counts what has to be done at least: every operand crosses the memory bus once, a
multiplication and an addition are two operations, under a causal mask half of the square counts.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BFLOAT16 = "bfloat16"
FP8 = "fp8"
CACHE_DTYPES = (BFLOAT16, FP8)


@dataclass(frozen=True)
class AttentionShape:
    """What in a model's config decides the size of its cache and the work of its attention."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Heads of K and V that are stored; for a latent (MLA) those that it stands for."""
    key_dim: int
    value_dim: int
    latent_dim: int = 0
    """d_c; 0 where K and V themselves are stored."""
    rope_dim: int = 0
    """d_r, the rotary key beside the latent."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "AttentionShape":
        """From the entries of a config.json, in the names of Hugging Face.

        Raises:
            ValueError: an entry is missing; the message names it.
        """

        def entry(name: str) -> int:
            if config.get(name) is None:
                raise ValueError(f"the config has no {name}")
            return config[name]

        layers, heads = entry("num_hidden_layers"), entry("num_attention_heads")
        if config.get("kv_lora_rank"):
            rope = entry("qk_rope_head_dim")
            key, value = entry("qk_nope_head_dim") + rope, entry("v_head_dim")
            return cls(layers, heads, heads, key, value, entry("kv_lora_rank"), rope)
        head_dim = config.get("head_dim") or entry("hidden_size") // heads
        return cls(layers, heads, config.get("num_key_value_heads") or heads, head_dim, head_dim)

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.latent_dim:
            return "MLA"
        if self.num_kv_heads == 1:
            return "MQA"
        return "MHA" if self.num_kv_heads == self.num_heads else "GQA"

    def as_stored_heads(self, num_kv_heads: int) -> "AttentionShape":
        """The same model if it stored that many heads of K and V instead."""
        return dataclasses.replace(self, num_kv_heads=num_kv_heads, latent_dim=0, rope_dim=0)


def row_bytes(shape: AttentionShape, cache: str = BFLOAT16) -> int:
    """Cache of one token in one layer.

    In FP8, K and V take a byte a number (their scale is one for the whole tensor), a latent takes a byte a number with
    a float32 scale for each 128, and the rotary key stays bfloat16.
    """
    if cache not in CACHE_DTYPES:
        raise ValueError(f"cache must be one of {', '.join(CACHE_DTYPES)}, not {cache!r}")
    if shape.latent_dim == 0:
        return shape.num_kv_heads * (shape.key_dim + shape.value_dim) * (2 if cache == BFLOAT16 else 1)
    if cache == BFLOAT16:
        return 2 * (shape.latent_dim + shape.rope_dim)
    return shape.latent_dim + 4 * -(-shape.latent_dim // 128) + 2 * shape.rope_dim


def bytes_per_token(shape: AttentionShape, cache: str = BFLOAT16) -> int:
    """Cache of one token in all layers."""
    return shape.num_layers * row_bytes(shape, cache)


def context_bytes(shape: AttentionShape, tokens: int, cache: str = BFLOAT16, block_size: int = 16) -> int:
    """Cache of one request with so many tokens, in whole blocks."""
    return -(-tokens // block_size) * block_size * bytes_per_token(shape, cache)


def tokens_that_fit(shape: AttentionShape, memory: int, cache: str = BFLOAT16, block_size: int = 16) -> int:
    """The longest context that so many bytes can hold, in whole blocks."""
    return memory // (block_size * bytes_per_token(shape, cache)) * block_size


def storage_variants(shape: AttentionShape, num_groups: int = 8) -> dict[str, int]:
    """Bytes a token of an MLA model, and what they would be if it stored heads instead."""
    if shape.kind != "MLA":
        raise ValueError(f"the variants are those of a latent model, not of {shape.kind}")
    return {
        "MHA": bytes_per_token(shape.as_stored_heads(shape.num_heads)),
        f"GQA-{num_groups}": bytes_per_token(shape.as_stored_heads(num_groups)),
        "MQA": bytes_per_token(shape.as_stored_heads(1)),
        "MLA": bytes_per_token(shape),
        "MLA-FP8": bytes_per_token(shape, FP8),
    }


@dataclass(frozen=True)
class Work:
    """What one layer's attention has to do for one request in one step."""

    flops: int
    num_bytes: int

    @property
    def intensity(self) -> float:
        """FLOP for each byte."""
        return self.flops / self.num_bytes


def flash_prefill(shape: AttentionShape, tokens: int) -> Work:
    """A whole prompt, causal, in bfloat16: q, k, v are read and out is written, once each."""
    flops = shape.num_heads * tokens**2 * (shape.key_dim + shape.value_dim)
    widths = (shape.num_heads + shape.num_kv_heads) * (shape.key_dim + shape.value_dim)
    return Work(flops, 2 * tokens * widths)


def paged_decode(shape: AttentionShape, context: int, queries: int = 1, cache: str = BFLOAT16) -> Work:
    """Few queries over stored K and V: their bytes are all that counts."""
    flops = 2 * queries * shape.num_heads * context * (shape.key_dim + shape.value_dim)
    return Work(flops, context * row_bytes(shape.as_stored_heads(shape.num_kv_heads), cache))


def mla_decode(
    shape: AttentionShape, context: int, queries: int = 1, heads: int | None = None, cache: str = BFLOAT16
) -> Work:
    """Few queries, absorbed, over latents; `heads` of them on this GPU (None: all), which need every row whole."""
    width = 2 * shape.latent_dim + shape.rope_dim
    flops = 2 * queries * (shape.num_heads if heads is None else heads) * context * width
    return Work(flops, context * row_bytes(shape, cache))


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet: dense bfloat16 products, and memory."""

    name: str
    flops_per_second: float
    bytes_per_second: float

    @property
    def balance(self) -> float:
        """FLOP a byte from which on arithmetic is the limit."""
        return self.flops_per_second / self.bytes_per_second

    def attainable(self, intensity: float) -> float:
        """FLOP/s that a kernel of this intensity can reach at best: the roofline."""
        return min(self.flops_per_second, intensity * self.bytes_per_second)


H200 = Device("NVIDIA H200", 989e12, 4.8e12)
