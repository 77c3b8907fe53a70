"""Writing a step's new tokens into the paged cache: one program a token, which copies its row to its slot.

    slot = block * block_size + offset in the block;  -1 = skip this token (padding)

Two cache layouts share the room: K and V a head [num_blocks, block_size, Hkv, D], and the latent of
multi-head latent attention, one row [d_c + d_r] a token for all heads [num_blocks, block_size, 1, d_c +
d_r]. Either may be FP8: K and V with one scale a tensor, the latent as FlashMLA lays it out in d_c + 4 d_c
/ 128 + 2 d_r bytes,

    | d_c x e4m3 | d_c / 128 x float32 scale | d_r x bfloat16, the rotary part |

whose scales are max |c| / 448 over each 128 numbers. Slots have to be distinct: two tokens for one slot
would race.
"""

import torch
from torch import Tensor

from minivllm.attention.checks import CACHES, FLOATS, check_index, check_tensor, fail, next_power_of_2
from minivllm.triton_env import INTERPRET, tl, triton
from minivllm.triton_launch import launch_kernel

E4M3_MAX = 448.0
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_TINY = tl.constexpr(1e-12)


def quantize_e4m3(x: Tensor, scale: float | Tensor) -> Tensor:
    """x / scale as float8_e4m3fn, saturated to ±448."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def latent_scales(c: Tensor) -> Tensor:
    """The float32 scale of each 128 numbers: c [..., d_c] -> [..., d_c / 128]."""
    return c.float().unflatten(-1, (-1, 128)).abs().amax(-1).clamp(min=1e-12) / E4M3_MAX


@triton.jit
def _copy_row(src, dst, heads_src, heads_dst, head, column, live, inv_scale, QUANTIZE: tl.constexpr):
    """Copy one token's [H, D] row; the slot's offset is int64 by then, a large cache passes 2^31 elements."""
    x = tl.load(src + head[:, None] * heads_src + column[None, :], mask=live, other=0.0)
    if QUANTIZE:
        x = tl.clamp(x.to(tl.float32) * inv_scale, -_E4M3_MAX, _E4M3_MAX).to(dst.dtype.element_ty)
    tl.store(dst + head[:, None] * heads_dst + column[None, :], x, mask=live)


@triton.jit
def _store_kv_kernel(
    k, v, k_cache, v_cache, slot_mapping, k_inv_scale, v_inv_scale,
    k_token, k_head, v_token, v_head, kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head,
    BLOCK_SIZE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        head = tl.arange(0, BLOCK_H)
        column = tl.arange(0, BLOCK_D)
        live = (head < H)[:, None] & (column < D)[None, :]
        k_slot = k_cache + block * kc_block + offset * kc_slot
        _copy_row(k + token * k_token, k_slot, k_head, kc_head, head, column, live, k_inv_scale, QUANTIZE)
        live = (head < H)[:, None] & (column < DV)[None, :]
        v_slot = v_cache + block * vc_block + offset * vc_slot
        _copy_row(v + token * v_token, v_slot, v_head, vc_head, head, column, live, v_inv_scale, QUANTIZE)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k [tokens, Hkv, D] and v [tokens, Hkv, Dv] into caches [num_blocks, block_size, Hkv, D] and Dv.

    slot_mapping [tokens] int32 or int64, -1 = skip. A float8_e4m3fn cache takes k / k_scale and v / v_scale,
    saturated; any other has the dtype of k and v. Raises ValueError for a wrong shape, dtype, device or
    stride.
    """
    check_kv(k, v, k_cache, v_cache, slot_mapping)
    launch_store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def check_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """The checks of `store_kv`: once a step, where all layers look alike."""
    check_tensor("k", k, 3, CACHES, k.device)
    check_tensor("v", v, 3, (k.dtype,), k.device)
    check_tensor("k_cache", k_cache, 4, (k.dtype, torch.float8_e4m3fn), k.device)
    check_tensor("v_cache", v_cache, 4, (k_cache.dtype,), k.device)
    if v.shape[:2] != k.shape[:2]:
        fail("v", f"of {k.shape[0]} tokens and {k.shape[1]} heads, like k", tuple(v.shape))
    if k_cache.shape[2:] != k.shape[1:]:
        fail("k_cache", f"of shape [num_blocks, block_size, {k.shape[1]}, {k.shape[2]}]", tuple(k_cache.shape))
    if v_cache.shape != (*k_cache.shape[:2], *v.shape[1:]):
        fail("v_cache", f"of shape {(*k_cache.shape[:2], *v.shape[1:])}", tuple(v_cache.shape))
    _check_slots(slot_mapping, k.shape[0], k.device)


def launch_store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: float, v_scale: float
) -> None:
    """`store_kv` for checked arguments."""
    tokens = k.shape[0]
    quantize = k_cache.dtype != k.dtype
    if quantize and INTERPRET.value:
        # The interpreter's conversion to e4m3 loses carries and does not saturate; PyTorch's is right.
        k, v, quantize = quantize_e4m3(k, k_scale), quantize_e4m3(v, v_scale), False
    if tokens == 0:
        return
    heads, d, dv = k.shape[1], k.shape[2], v.shape[2]
    launch_kernel(
        _store_kv_kernel, (tokens, 1, 1),
        (k, v, k_cache, v_cache, slot_mapping),
        (
            1.0 / k_scale, 1.0 / v_scale,
            *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        ),
        BLOCK_SIZE=k_cache.shape[1], H=heads, D=d, DV=dv, BLOCK_H=next_power_of_2(heads),
        BLOCK_D=next_power_of_2(max(d, dv)), QUANTIZE=quantize,
    )  # fmt: skip


@triton.jit
def _store_latent_kernel(
    c, k_rope, cache, scales, slot_mapping, c_token, rope_token, block_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        row = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
        r = tl.arange(0, BLOCK_R)
        rope = tl.load(k_rope + token * rope_token + r, mask=r < DR, other=0.0)
        if FP8:
            # One row of `tile` is one group of 128 numbers, which share a scale.
            group = tl.arange(0, BLOCK_C // 128)
            column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
            x = tl.load(c + token * c_token + column, mask=column < DC, other=0.0)
            scale_row = (row + DC).to(tl.pointer_type(tl.float32))
            rope_row = (row + DC + DC // 32).to(tl.pointer_type(tl.bfloat16))
            if scales is None:
                x = x.to(tl.float32)
                scale = tl.maximum(tl.max(tl.abs(x), 1), _TINY) / _E4M3_MAX
                x = tl.clamp(x / scale[:, None], -_E4M3_MAX, _E4M3_MAX).to(tl.float8e4nv)
            else:
                scale = tl.load(scales + token * (DC // 128) + group, mask=group < DC // 128)
            tl.store(row.to(tl.pointer_type(tl.float8e4nv)) + column, x, mask=column < DC)
            tl.store(scale_row + group, scale, mask=group < DC // 128)
            tl.store(rope_row + r, rope, mask=r < DR)
        else:
            column = tl.arange(0, BLOCK_C)
            x = tl.load(c + token * c_token + column, mask=column < DC, other=0.0)
            tl.store(row + column, x, mask=column < DC)
            tl.store(row + DC + r, rope, mask=r < DR)


def store_latent(c: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write latents c [tokens, d_c] and rotary keys k_rope [tokens, d_r] into a latent cache.

    cache is [num_blocks, block_size, 1, d_c + d_r] in c's dtype, or uint8 [num_blocks, block_size, 1,
    bytes] in the FP8 layout above, which wants bfloat16 input and d_c a multiple of 128. slot_mapping
    [tokens], -1 = skip. Raises ValueError for a wrong shape, dtype, device or stride.
    """
    check_tensor("c", c, 2, FLOATS, c.device)
    check_tensor("k_rope", k_rope, 2, (c.dtype,), c.device)
    check_tensor("cache", cache, 4, (c.dtype, torch.uint8), c.device)
    (tokens, d_c), d_r = c.shape, k_rope.shape[1]
    if k_rope.shape[0] != tokens:
        fail("k_rope", f"of {tokens} rows, like c", tuple(k_rope.shape))
    fp8 = cache.dtype == torch.uint8
    if fp8 and (c.dtype != torch.bfloat16 or d_c % 128):
        fail("c", "bfloat16 with d_c a multiple of 128 for an FP8 cache", f"{c.dtype}, d_c = {d_c}")
    row = latent_row_bytes(d_c, d_r) if fp8 else d_c + d_r
    if cache.shape[2:] != (1, row):
        fail("cache", f"of shape [num_blocks, block_size, 1, {row}]", tuple(cache.shape))
    _check_slots(slot_mapping, tokens, c.device)
    if tokens == 0:
        return
    scales = None
    if fp8 and INTERPRET.value:
        scales = latent_scales(c)
        c = quantize_e4m3(c.unflatten(-1, (-1, 128)), scales[..., None]).flatten(-2)
    launch_kernel(
        _store_latent_kernel, (tokens, 1, 1),
        (c, k_rope, cache, scales, slot_mapping),
        (c.stride(0), k_rope.stride(0), *cache.stride()[:2]),
        BLOCK_SIZE=cache.shape[1], DC=d_c, DR=d_r, BLOCK_C=next_power_of_2(d_c),
        BLOCK_R=next_power_of_2(d_r), FP8=fp8,
    )  # fmt: skip


def latent_row_bytes(d_c: int, d_r: int) -> int:
    """Bytes of one token in the FP8 latent cache: 656 for DeepSeek's 512 + 64."""
    return d_c + 4 * d_c // 128 + 2 * d_r


def _check_slots(slot_mapping: Tensor, tokens: int, where: torch.device) -> None:
    if slot_mapping.dtype == torch.int64:
        check_tensor("slot_mapping", slot_mapping, 1, (torch.int64,), where)
        if slot_mapping.shape[0] != tokens:
            fail("slot_mapping", f"of shape ({tokens},)", tuple(slot_mapping.shape))
    else:
        check_index("slot_mapping", slot_mapping, (tokens,), where)
