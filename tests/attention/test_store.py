"""Cache writes: every token in its slot, nothing else touched."""

import pytest
import torch
from attention_cases import DEVICE, int32, randn, strided

from minivllm.attention import reference
from minivllm.attention.store import (
    latent_row_bytes,
    latent_scales,
    quantize_e4m3,
    store_kv,
    store_latent,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "block_size, heads, d, dv", [(1, 1, 16, 16), (16, 3, 80, 80), (8, 2, 192, 128), (256, 5, 64, 96)]
)
def test_each_token_lands_in_its_slot_and_nothing_else_changes(dtype, block_size, heads, d, dv):
    k, v = randn(6, heads, d, dtype=dtype), randn(6, heads, dv, dtype=dtype)
    num_blocks = -(-20 // block_size)
    k_cache, v_cache = (randn(num_blocks, block_size, heads, n, dtype=dtype) for n in (d, dv))
    want_k, want_v = k_cache.clone(), v_cache.clone()
    slots = [7, -1, 0, 19, 3, -1]
    for token, slot in enumerate(slots):
        if slot >= 0:
            want_k[slot // block_size, slot % block_size] = k[token]
            want_v[slot // block_size, slot % block_size] = v[token]
    store_kv(k, v, k_cache, v_cache, int32(slots))
    assert torch.equal(k_cache, want_k) and torch.equal(v_cache, want_v)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_non_contiguous_rows_and_caches_are_followed_by_their_strides(index_dtype):
    k, v = strided(randn(4, 2, 32)), strided(randn(4, 2, 32))
    both = torch.zeros(2, 3, 4, 2, 32, device=DEVICE).transpose(0, 1)
    k_cache, v_cache = both[:, 0], both[:, 1]
    store_kv(k, v, k_cache, v_cache, int32([11, 2, 5, 0]).to(index_dtype))
    assert torch.equal(k_cache[2, 3], k[0]) and torch.equal(v_cache[1, 1], v[2])
    assert both.count_nonzero() == 2 * 4 * 2 * 32


def test_offsets_beyond_two_to_the_31_elements_reach_the_right_slot():
    """A cache whose blocks lie 2^29 elements apart, made of a few touched pages of a virtual allocation."""
    base = torch.empty(5 * 2**29 + 64, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    cache = base.as_strided((6, 1, 1, 32), (2**29, 32, 32, 1))
    k = quantize_e4m3(randn(1, 1, 32), 1.0)
    store_kv(k, k, cache, cache, int32([5]))
    assert torch.equal(base[5 * 2**29 : 5 * 2**29 + 32].view(torch.uint8), k.flatten().view(torch.uint8))


def test_an_fp8_cache_takes_scaled_saturated_values():
    k, v = randn(5, 2, 64, dtype=torch.bfloat16), randn(5, 2, 64, dtype=torch.bfloat16) * 1000
    caches = [torch.zeros(2, 4, 2, 64, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
    store_kv(k, v, *caches, int32([0, 1, 2, 3, 7]), k_scale=0.25, v_scale=0.5)
    k_rows, v_rows = (cache.flatten(0, 1)[[0, 1, 2, 3, 7]].float() for cache in caches)
    assert torch.equal(k_rows, quantize_e4m3(k, 0.25).float())
    assert torch.equal(v_rows, quantize_e4m3(v, 0.5).float())
    assert v_rows.abs().max() == 448


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_c, d_r, block_size", [(512, 64, 64), (128, 16, 16), (48, 32, 32)])
def test_latent_and_rope_lie_side_by_side_in_the_slot(dtype, d_c, d_r, block_size):
    c, rope = strided(randn(4, d_c, dtype=dtype)[:, None])[:, 0], randn(4, d_r, dtype=dtype)
    cache = randn(3, block_size, 1, d_c + d_r, dtype=dtype)
    want = cache.clone()
    want.view(-1, d_c + d_r)[[40, 5, 9]] = torch.cat([c, rope], -1)[[0, 1, 3]]
    store_latent(c, rope, cache, int32([40, 5, -1, 9]))
    assert torch.equal(cache, want)


@pytest.mark.parametrize("d_c, d_r", [(512, 64), (128, 32)])
def test_an_fp8_latent_row_holds_values_scales_and_rope(d_c, d_r):
    c, rope = randn(3, d_c, dtype=torch.bfloat16) * 5, randn(3, d_r, dtype=torch.bfloat16)
    c[0, :128] = 0
    size = latent_row_bytes(d_c, d_r)
    cache = torch.full((2, 16, 1, size), 7, dtype=torch.uint8, device=DEVICE)
    store_latent(c, rope, cache, int32([17, -1, 4]))
    rows = cache.view(32, size)
    assert (rows[[i for i in range(32) if i not in (17, 4)]] == 7).all()
    unpacked = reference.unpack_latent(rows[[17, 4]], d_c)
    scales = latent_scales(c[[0, 2]])
    want = quantize_e4m3(c[[0, 2]].unflatten(-1, (-1, 128)), scales[..., None]).float() * scales[..., None]
    # A GPU divides by a scale that may differ from PyTorch's in its last bit: one e4m3 step in few places.
    assert ((unpacked[:, :d_c] - want.flatten(-2)).abs() <= want.flatten(-2).abs() / 7 + 1e-9).all()
    assert (unpacked[:, :d_c] != want.flatten(-2)).float().mean() < 0.01
    assert torch.equal(unpacked[:, d_c:], rope[[0, 2]].float())
    assert (unpacked[:, :d_c] - c[[0, 2]].float()).norm() / c[[0, 2]].float().norm() < 0.04


def test_deepseek_rows_take_656_bytes():
    assert latent_row_bytes(512, 64) == 656


def test_no_tokens_is_legal():
    cache = randn(1, 4, 1, 16)
    before = cache.clone()
    store_kv(randn(0, 1, 16), randn(0, 1, 16), cache, cache, int32([]))
    assert torch.equal(cache, before)


def _good() -> dict[str, torch.Tensor]:
    return {
        "k": randn(3, 2, 32), "v": randn(3, 2, 32), "k_cache": randn(4, 8, 2, 32), "v_cache": randn(4, 8, 2, 32),
        "slot_mapping": int32([0, 1, 2]),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, change",
    [
        ("k", lambda x: x.transpose(1, 2)),
        ("k", lambda x: x.mT.contiguous().mT),
        ("v", lambda x: x.half()),
        ("v", lambda x: x[:2]),
        ("k_cache", lambda x: x[..., :16]),
        ("k_cache", lambda x: x.double()),
        ("v_cache", lambda x: x[:3]),
        ("slot_mapping", lambda x: x[:2]),
        ("slot_mapping", lambda x: x.float()),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name, change):
    arguments = _good()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=name):
        store_kv(**arguments)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("k_rope", (randn(3, 128), randn(2, 16), randn(2, 16, 1, 144), int32([0, 1, 2]))),
        ("cache", (randn(3, 128), randn(3, 16), randn(2, 16, 1, 128), int32([0, 1, 2]))),
        (
            "c should be bfloat16",
            (
                randn(3, 128),
                randn(3, 16),
                torch.zeros(2, 16, 1, 164, dtype=torch.uint8, device=DEVICE),
                int32([0, 1, 2]),
            ),
        ),
        ("slot_mapping", (randn(3, 128), randn(3, 16), randn(2, 16, 1, 144), int32([0, 1]))),
    ],
)
def test_a_wrong_latent_argument_is_refused_by_name(name, arguments):
    with pytest.raises(ValueError, match=name):
        store_latent(*arguments)
