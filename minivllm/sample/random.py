"""Randomness without state: every random number is f(seed, position, purpose).

There is no generator to advance, so what a seed means does not depend on what else is in the batch, on chunks, on
preemption or on the number of GPUs. The mixing function is SplitMix64 (Steele, Lea, Flood 2014), whose outputs pass
the usual batteries of tests; PyTorch's int64 arithmetic wraps around as it needs.
"""

import enum

import torch


class Purpose(enum.IntEnum):
    """Two draws for the same position never share a number if their purposes differ."""

    SAMPLE = 0
    ACCEPT = 1
    RECOVER = 2
    DRAFT = 3


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """One number in [0, 1) for each row, 53 random bits.

    Args:
        seeds: [B] int64.
        positions: [B] int64, index in the sequence of the token that is being chosen.

    Returns:
        [B] float64.
    """
    counter = positions * len(Purpose) + int(purpose)
    bits = _mix(_mix(seeds) + counter * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: PyTorch's own shift of a signed integer would drag the sign bit along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
