"""Checks of what callers hand to the attention kernels: a wrong argument raises a ValueError that names it.

Only shapes, dtypes, devices and strides are looked at: no check reads device memory, so none makes the host
wait.
"""

from functools import lru_cache

import torch
from torch import Tensor, bfloat16, device, dtype, float8_e4m3fn, float16, float32, int32

FLOATS = (float32, float16, bfloat16)
CACHES = (*FLOATS, float8_e4m3fn)
MAX_HEAD_DIM = 256


def fail(name: str, wanted: str, got: object) -> None:
    raise ValueError(f"{name} should be {wanted}, got {got}")


def check_tensor(name: str, x: Tensor, ndim: int, dtypes: tuple[dtype, ...], where: device) -> None:
    """x has ndim dimensions, one of the dtypes, that device, and is contiguous in its last dimension."""
    if x.dim() == ndim and x.dtype in dtypes and x.device == where and x.stride(-1) == 1:
        return
    if x.dim() != ndim:
        fail(name, f"a tensor of {ndim} dimensions", f"shape {tuple(x.shape)}")
    if x.dtype not in dtypes:
        fail(name, "of dtype " + " or ".join(str(d) for d in dtypes), x.dtype)
    if x.device != where:
        fail(name, f"on {where}", x.device)
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        fail(name, "contiguous in its last dimension", f"strides {x.stride()}")


def check_index(name: str, x: Tensor, shape: tuple[int | None, ...], where: device) -> None:
    """x is an int32 tensor of that shape (None: any size) on that device."""
    check_tensor(name, x, len(shape), (int32,), where)
    if any(want is not None and have != want for have, want in zip(x.shape, shape, strict=True)):
        fail(name, f"of shape {tuple('any' if s is None else s for s in shape)}", tuple(x.shape))


def check_head_dim(name: str, head_dim: int, largest: int = MAX_HEAD_DIM) -> None:
    if head_dim % 16 or not 16 <= head_dim <= largest:
        fail(name, f"of a head dim that is a multiple of 16 up to {largest}", head_dim)


def check_group(name: str, num_kv_heads: int, num_heads: int) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        fail(name, f"of a number of heads that divides q's {num_heads}", num_kv_heads)


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The scale itself, or 1 / sqrt(head_dim) for None."""
    if softmax_scale is None:
        return head_dim**-0.5
    if not softmax_scale > 0:
        fail("softmax_scale", "positive", softmax_scale)
    return softmax_scale


def check_window(window_size: tuple[int, int], causal: bool, softcap: float) -> tuple[int, int]:
    """(left, right) with causal folded in: causal is a window that ends at the row's own position."""
    if len(window_size) != 2 or min(window_size) < -1:
        fail("window_size", "a pair (left, right) of numbers that are -1 (unlimited) or more", window_size)
    if softcap < 0:
        fail("softcap", "0 (none) or positive", softcap)
    return window_size[0], 0 if causal else window_size[1]


def check_block_size(name: str, block_size: int, smallest: int) -> None:
    if not smallest <= block_size <= 256 or block_size & (block_size - 1):
        fail(name, f"of a block_size that is a power of two from {smallest} to 256", block_size)


@lru_cache
def num_multiprocessors(device_index: int | None) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes microseconds a call, which decode would pay in every layer of every step."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; as above."""
    return 1 << (n - 1).bit_length()
