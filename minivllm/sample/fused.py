"""Temperature, softmax, a random number and the draw in one kernel: for GPUs, where rows ask for nothing else.

`sampler.py` is the readable twin. In PyTorch it takes some fifty operations, each a launch, and reads and writes
[B, V] half a dozen times; here one program takes a row and reads it three times, the last two from the L2 cache:

    m, argmax        the largest logit x_i; a row of temperature 0 ends here
    Z                sum of e_i = exp((x_i - m) / temperature), block by block
    token            the first i at which the running sum of e passes u Z: whole blocks first, then within one

The sum over blocks is kept in float64. The random number is that of `random.py`, from seed and position.
"""

import torch

from minivllm.attention.checks import next_power_of_2
from minivllm.sample.random import Purpose
from minivllm.triton_env import tl, triton
from minivllm.triton_launch import launch_kernel

_BLOCK, _LEAST_BLOCK = 8192, 128
_LOG2E = tl.constexpr(1.4426950408889634)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """SplitMix64, as in random.py; x uint64."""
    x = x + tl.full([1], _GOLDEN, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full([1], _MULTIPLIER_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([1], _MULTIPLIER_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _weights(row, start, size, m, scale, BLOCK: tl.constexpr):
    """e = exp((x - m) / temperature) of one block of a row's logits, 0 past the end."""
    i = start + tl.arange(0, BLOCK)
    x = tl.load(row + i, mask=i < size, other=float("-inf")).to(tl.float32)
    return tl.exp2((x - m) * scale)


@triton.jit
def _sample_kernel(
    logits, temperature, seeds, positions, out, row_stride, size, lowest_temperature,
    PURPOSE: tl.constexpr, NUM_PURPOSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = logits + b.to(tl.int64) * row_stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < size, other=float("-inf")).to(tl.float32)
        best_at = tl.where(x > best, i, best_at)
        best = tl.maximum(best, x)
    m = tl.max(best, 0)
    token = tl.min(tl.where(best == m, best_at, size), 0)

    t = tl.load(temperature + b)
    if t > 0:
        scale = _LOG2E / tl.maximum(t, lowest_temperature)
        total = tl.zeros([1], tl.float64)
        for block in range(0, size, BLOCK):
            total += tl.sum(_weights(row, block, size, m, scale, BLOCK), 0).to(tl.float64)

        one = tl.arange(0, 1)
        seed = tl.load(seeds + b + one).to(tl.uint64)
        counter = (tl.load(positions + b + one) * NUM_PURPOSES + PURPOSE).to(tl.uint64)
        bits = _mix(_mix(seed) + counter * tl.full([1], _GOLDEN, tl.uint64))
        u = (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
        target = tl.sum(u * total, 0)

        offset = b * 0
        before = target * 0.0
        e = _weights(row, offset, size, m, scale, BLOCK)
        mass = tl.sum(e, 0).to(tl.float64)
        while (before + mass <= target) & (offset + BLOCK < size):
            before += mass
            offset += BLOCK
            e = _weights(row, offset, size, m, scale, BLOCK)
            mass = tl.sum(e, 0).to(tl.float64)
        column = tl.arange(0, BLOCK)
        passed = (tl.cumsum(e, 0) > (target - before).to(tl.float32)) & (e > 0)
        first = tl.min(tl.where(passed, column, BLOCK), 0)
        # Rounding may leave the target a hair above the very last sum: then it is the last token that can come.
        last = tl.max(tl.where(e > 0, column, -1), 0)
        inside = tl.where(first < BLOCK, first, last)
        token = tl.where(inside >= 0, offset + inside, token)
    tl.store(out + b, token.to(tl.int64))


def sample_rows(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, lowest: float
) -> torch.Tensor:
    """One token a row by temperature alone, the most likely one (the first of equals) where that is 0.

    Args:
        logits: [B, V], any floating dtype, contiguous in the last dimension; not changed.
        temperature: [B] float32.
        seeds, positions: [B] int64, as for `random.uniform`.
        lowest: temperatures above 0 count as at least this.

    Returns:
        [B] int64.
    """
    num_rows, vocab_size = logits.shape
    out = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows and vocab_size > 1:
        block = min(_BLOCK, max(_LEAST_BLOCK, next_power_of_2(vocab_size)))
        launch_kernel(
            _sample_kernel, (num_rows, 1, 1),
            (logits, temperature, seeds, positions, out), (logits.stride(0), vocab_size, lowest),
            num_warps=8,
            PURPOSE=int(Purpose.SAMPLE), NUM_PURPOSES=len(Purpose), BLOCK=block,
        )  # fmt: skip
    return out
