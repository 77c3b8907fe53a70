"""Rotary position embedding (RoFormer, Su et al. 2021) and the ways of stretching it to longer contexts.

    positions [T] int64       -> cos, sin [T, 1, head_dim], once a forward pass
    x [T, heads, head_dim]    -> rotated in place, once a layer

Dimension i is paired with i + head_dim / 2 (the layout of Llama checkpoints in Hugging Face form; the
original paper pairs neighbours). Pair i turns by position * inv_freq[i], so the dot product of a rotated
query and key depends on their distance alone.

The rope types differ only in inv_freq and in one factor on cos and sin:

    default  inv_freq[i] = theta^(-2i / head_dim)
    linear   all positions divided by `factor` (Chen et al. 2023, position interpolation)
    llama3   slow pairs divided by `factor`, fast ones kept, a ramp between (Llama 3.1)
    yarn     the same idea with a ramp over dimensions and an attention factor (Peng et al. 2023)
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def rope_parameters(config: Any) -> dict[str, Any]:
    """Reads the rope settings of a Hugging Face config in either layout, as one flat dict with its own copy.

    New layout: `rope_parameters` holds all. Old layout: `rope_theta` beside `rope_scaling`, whose type may be
    spelt "type" or "rope_type". The result always has rope_type, rope_theta and
    original_max_position_embeddings. Raises ValueError for an unknown type and for a rotation of part of the
    head.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    theta = getattr(config, "rope_theta", None)
    parameters.setdefault("rope_theta", 10000.0 if theta is None else theta)
    parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    if parameters["rope_type"] not in _INV_FREQ:
        known = ", ".join(sorted(_INV_FREQ))
        raise ValueError(f"unknown rope type {parameters['rope_type']!r}; known types: {known}")
    if (parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported: every dimension of a head is rotated")
    return parameters


def inverse_frequencies(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    """Returns (inv_freq [head_dim / 2] float32 in radians a token, the factor on cos and sin)."""
    parameters = rope_parameters(config)
    try:
        return _INV_FREQ[parameters["rope_type"]](parameters, head_dim, config.max_position_embeddings)
    except KeyError as error:
        raise ValueError(f"rope type {parameters['rope_type']!r} needs the setting {error}") from None


# At position p a rounding error in inv_freq counts p times. So the operations below are in transformers'
# order, and give the same bits.


def _periods(parameters: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Tokens a radian, [head_dim / 2]."""
    return parameters["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _default(parameters: dict[str, Any], head_dim: int, _: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _periods(parameters, head_dim), 1.0


def _linear(parameters: dict[str, Any], head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    inv_freq, _ = _default(parameters, head_dim, max_positions)
    return inv_freq / parameters["factor"], 1.0


def _llama3(parameters: dict[str, Any], head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    inv_freq, _ = _default(parameters, head_dim, max_positions)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    # How often a pair turns within the original context: often enough (high) it has seen every angle in
    # training.
    turns = parameters["original_max_position_embeddings"] / (2 * math.pi / inv_freq)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / parameters["factor"] + keep * inv_freq, 1.0


def _yarn(parameters: dict[str, Any], head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    periods = _periods(parameters, head_dim)
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / original

    def dimension_that_turns(times: float) -> float:
        wavelength = original / times
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    low = dimension_that_turns(parameters.get("beta_fast") or 32)
    high = dimension_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = torch.arange(head_dim // 2, dtype=torch.float32) - low
    keep = 1 - (ramp / max(high - low, 0.001)).clamp(0, 1)
    inv_freq = 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
        both = numerator and denominator
        attention_factor = mscale(numerator) / mscale(denominator) if both else mscale(1.0)
    return inv_freq, attention_factor


_INV_FREQ: dict[str, Callable[[dict[str, Any], int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


class RotaryEmbedding(nn.Module):
    """A table of cos and sin for every position below max_model_len, [max_model_len, head_dim] float32.

    Float32 whatever the model's dtype: in bfloat16, positions above 256 could not be told apart.
    """

    def __init__(self, config: Any, head_dim: int, max_model_len: int) -> None:
        super().__init__()
        inv_freq, attention_factor = inverse_frequencies(config, head_dim)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inv_freq
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and signed sin, both [T, 1, head_dim] in `dtype`, for `apply_rotary`."""
        cos, sin = self.table[positions].to(dtype)[:, None].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [T, heads, head_dim] in place and returns it.

    (a, b) -> (a cos - b sin, b cos + a sin) for the halves a, b of a head: with the halves swapped and the
    sign kept in `sin`, that is x * cos + swapped * sin.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return x.mul_(cos).addcmul_(swapped, sin)
