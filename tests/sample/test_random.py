"""Counter-based randomness: what a seed means, beside SplitMix64 in plain Python integers."""

import numpy as np
import pytest
import torch

from minivllm.sample.random import Purpose, uniform

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014) for one state."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform_in_python(seed: int, position: int, purpose: Purpose) -> float:
    counter = 4 * position + int(purpose)
    return (splitmix64(splitmix64(seed & MASK) + counter * 0x9E3779B97F4A7C15 & MASK) >> 11) / 2**53


def numbers(seeds, positions, purpose=Purpose.SAMPLE) -> list[float]:
    seeds, positions = np.broadcast_arrays(seeds, positions)
    return uniform(torch.tensor(seeds), torch.tensor(positions), purpose).tolist()


def test_the_plain_python_copy_is_splitmix64():
    state, outputs = 1234567, []
    for _ in range(3):  # the published test vector of this seed
        outputs.append(splitmix64(state))
        state += 0x9E3779B97F4A7C15
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("purpose", Purpose)
def test_uniform_equals_plain_python_integers(purpose):
    seeds = [0, 1, -1, 42, 2**63 - 1, -(2**63), 123456789012345678]
    for position in (0, 1, 7, 131071, 2**40):
        expected = [uniform_in_python(seed, position, purpose) for seed in seeds]
        assert numbers(seeds, position, purpose) == expected


def test_numbers_lie_in_the_half_open_unit_interval_and_are_float64():
    u = uniform(torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64), Purpose.SAMPLE)
    assert u.dtype == torch.float64
    assert u.min() >= 0.0 and u.max() < 1.0


@pytest.mark.parametrize("seeds_vary", [True, False])
def test_numbers_are_uniform_and_uncorrelated_over_seeds_and_over_positions(seeds_vary):
    count, counter, fixed = 200_000, torch.arange(200_000), torch.full((200_000,), 17)
    u = uniform(counter, fixed, Purpose.SAMPLE) if seeds_vary else uniform(fixed, counter, Purpose.SAMPLE)
    # Five standard errors each: the mean's is 1 / sqrt(12 n), that of a correlation 1 / sqrt(n).
    assert abs(u.mean() - 0.5) < 5 / (12 * count) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 5 / count**0.5
    bins = torch.histc(u.float(), bins=100, min=0, max=1)
    chi_square = ((bins - count / 100) ** 2 / (count / 100)).sum()
    assert chi_square < 99 + 5 * (2 * 99) ** 0.5


def test_seeds_positions_and_purposes_never_share_a_number():
    seeds = torch.arange(50).repeat_interleave(50)
    positions = torch.arange(50).repeat(50)
    drawn = torch.cat([uniform(seeds, positions, purpose) for purpose in Purpose])
    assert len(drawn.unique()) == len(drawn) == 4 * 50 * 50


def test_purposes_are_uncorrelated():
    positions = torch.arange(100_000)
    seeds = torch.zeros_like(positions)
    correlations = torch.corrcoef(torch.stack([uniform(seeds, positions, purpose) for purpose in Purpose]))
    assert (correlations - torch.eye(4)).abs().max() < 5 / 100_000**0.5


def test_a_rows_number_does_not_depend_on_the_other_rows():
    assert numbers([3, 5, 9], [2, 4, 6])[1] == numbers(5, [4])[0] == numbers([5, 5], [4, 9])[0]
