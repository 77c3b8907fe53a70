"""The oracles themselves, against PyTorch's own attention, against hand-made cases and against each other."""

import math
from itertools import pairwise

import pytest
import torch
from attention_cases import DEVICE, assert_close, cumulative, int32, paged, randn

from minivllm.attention import reference


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (5, 1)])
def test_square_causal_attention_is_what_pytorch_computes(heads, kv_heads):
    q, k, v = randn(33, heads, 48), randn(33, kv_heads, 48), randn(33, kv_heads, 32)
    out, lse = reference.attend(q, k, v, 0.2, causal=True)
    group = heads // kv_heads
    wide = [x.double().repeat_interleave(n, 1).transpose(0, 1)[None] for x, n in ((q, 1), (k, group), (v, group))]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.2)[0].transpose(0, 1)
    assert torch.allclose(out, want, atol=1e-12)
    scores = (wide[0][0] @ wide[1][0].mT * 0.2)[:, -1]
    assert torch.allclose(lse[:, -1], scores.exp().sum(-1).log(), atol=1e-12)


def test_causal_is_aligned_bottom_right_and_early_rows_see_nothing():
    v = torch.eye(3, 16, device=DEVICE)[:, None]
    out, lse = reference.attend(randn(5, 1, 16) * 0, randn(3, 1, 16), v, 1.0, causal=True)
    assert (out[:2] == 0).all() and torch.isneginf(lse[:, :2]).all()
    for row, seen in ((2, 1), (3, 2), (4, 3)):
        assert torch.allclose(out[row, 0, :3], v.new_tensor([1 / seen] * seen + [0] * (3 - seen)).double())
        assert lse[0, row].item() == pytest.approx(math.log(seen))


@pytest.mark.parametrize(
    "window, seen", [((1, 0), [1, 2]), ((0, 1), [2, 3]), ((-1, 1), [0, 1, 2, 3]), ((2, -1), [0, 1, 2, 3, 4])]
)
def test_windows_are_inclusive(window, seen):
    v = torch.eye(5, 16, device=DEVICE)[:, None]
    out, _ = reference.attend(randn(5, 1, 16) * 0, randn(5, 1, 16), v, 1.0, window_size=window)
    assert out[2, 0].nonzero().flatten().tolist() == seen


def test_softcap_bounds_the_scores():
    q, k, v = randn(2, 1, 16) * 100, randn(7, 1, 16), randn(7, 1, 16)
    _, lse = reference.attend(q, k, v, 1.0, softcap=2.0)
    assert (lse <= 2.0 + math.log(7)).all() and (lse >= -2.0 + math.log(7)).all()
    small, _ = reference.attend(q * 1e-5, k, v, 1.0, softcap=2.0)
    plain, _ = reference.attend(q * 1e-5, k, v, 1.0)
    assert torch.allclose(small, plain, atol=1e-6)


def test_varlen_requests_do_not_see_each_other():
    lengths = [(3, 5), (0, 4), (4, 0), (1, 1)]
    cu_q, cu_k = (cumulative([pair[i] for pair in lengths]) for i in range(2))
    q, k, v = randn(8, 2, 16), randn(10, 2, 16), randn(10, 2, 16)
    out, lse = reference.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 5, causal=True, return_softmax_lse=True)
    first, _ = reference.attend(q[:3], k[:5], v[:5], 0.25, causal=True)
    assert torch.allclose(out[:3].double(), first, atol=1e-6)
    assert (out[3:7] == 0).all() and torch.isneginf(lse[:, 3:7]).all()
    assert torch.allclose(out[7], v[9])


def test_a_paged_cache_gives_what_packed_keys_give_and_unused_memory_is_never_read():
    lengths = [7, 0, 33, 16]
    ks, vs = ([randn(n, 2, 16) for n in lengths] for _ in range(2))
    cu_q, cu_k = cumulative([2, 1, 3, 1]), cumulative(lengths)
    q = randn(7, 4, 16)
    packed = reference.flash_attn_varlen_func(q, torch.cat(ks), torch.cat(vs), cu_q, cu_k, 3, 33, causal=True)
    k_cache, v_cache, table = paged(8, ks, vs)
    out = reference.paged_attention(q, k_cache, v_cache, cu_q, int32(lengths), table, 3)
    assert torch.equal(out, packed)


def test_absorbed_latent_attention_is_attention_over_decompressed_keys():
    """q^T (W c) = (W^T q)^T c: the identity that lets a cache hold latents only."""
    d_c, d_r, heads, s_k = 32, 16, 3, 21
    c, rope = randn(s_k, d_c).double(), randn(s_k, d_r).double()
    w_k, w_v = (randn(heads, 24, d_c).double() for _ in range(2))
    q_nope, q_rope = randn(2, heads, 24).double(), randn(2, heads, d_r).double()
    k = torch.cat([torch.einsum("hdc,kc->khd", w_k, c), rope[:, None].expand(-1, heads, -1)], -1)
    v = torch.einsum("hdc,kc->khd", w_v, c)
    want, want_lse = reference.attend(torch.cat([q_nope, q_rope], -1), k, v, 0.15, causal=True)

    absorbed = torch.cat([torch.einsum("qhd,hdc->qhc", q_nope, w_k), q_rope], -1)
    cache, table = paged(16, [torch.cat([c, rope], -1)[:, None]])
    latent, lse = reference.flash_mla_with_kvcache(
        absorbed[None], cache, table, int32([s_k]), d_c, softmax_scale=0.15, causal=True
    )
    assert torch.allclose(torch.einsum("bqhc,hdc->bqhd", latent, w_v)[0], want, atol=1e-10)
    assert torch.allclose(lse[0].double(), want_lse, atol=1e-5)


def test_sparse_latent_attention_sees_the_named_slots_only():
    rows = randn(40, 1, 48)
    cache = rows.view(5, 8, 1, 48)
    q = randn(1, 2, 3, 48)
    indices = int32([3, -1, 39, 12, -1, -1, -1, -1]).view(1, 2, 4)
    out, lse = reference.flash_mla_with_kvcache(q, cache, None, int32([40]), 32, softmax_scale=0.1, indices=indices)
    picked = rows[[3, 39, 12]]
    want, want_lse = reference.attend(q[0, :1], picked, picked[..., :32], 0.1)
    assert_close(out[0, :1], want, lse[0, :, :1], want_lse)
    assert (out[0, 1] == 0).all() and torch.isneginf(lse[0, :, 1]).all()


def test_merged_parts_are_the_whole_and_empty_parts_change_nothing():
    q, k, v = randn(6, 4, 16), randn(50, 2, 16), randn(50, 2, 16)
    whole, whole_lse = reference.attend(q, k, v, 0.25)
    cuts = [0, 13, 13, 50]
    parts = [reference.attend(q, k[a:b], v[a:b], 0.25) for a, b in pairwise(cuts)]
    out, lse = reference.merge_lse([o for o, _ in parts], [s for _, s in parts])
    assert torch.allclose(out, whole, atol=1e-12) and torch.allclose(lse, whole_lse.float())
    nothing, nothing_lse = reference.merge_lse([parts[1][0]] * 2, [parts[1][1]] * 2)
    assert (nothing == 0).all() and torch.isneginf(nothing_lse).all()
