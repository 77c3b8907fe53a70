"""FlashAttention against its oracle: in Triton's interpreter without a GPU, compiled with one."""

import pytest
import torch
from attention_cases import DEVICE, TOLERANCE, assert_close, cumulative, int32, randn, relative_error, strided

from minivllm.attention import flash, reference
from minivllm.attention.flash_backward import flash_attn_func

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (s_q, s_k): one token, tails of tiles, more queries than keys, and requests without queries or without keys.
EDGES = [(1, 1), (45, 33), (0, 7), (3, 70), (5, 0), (40, 9), (2, 1)]
LONG = [(239, 1), (799, 3), (113, 203), (1023, 1024), (1, 1), (2, 1), (0, 5), (64, 64), (3, 799)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def packed(lengths, heads, kv_heads, d, dv, dtype):
    """Random q, k, v for requests of these (s_q, s_k), with rows of NaN behind the last request."""
    total_q, total_k = (sum(pair[i] for pair in lengths) for i in range(2))
    q, k, v = (
        torch.cat([randn(total, h, n, dtype=dtype), torch.full((5, h, n), torch.nan, dtype=dtype, device=DEVICE)])
        for total, h, n in ((total_q, heads, d), (total_k, kv_heads, d), (total_k, kv_heads, dv))
    )
    cu_q, cu_k = (cumulative([pair[i] for pair in lengths]) for i in range(2))
    return (q, k, v, cu_q, cu_k, max(p[0] for p in lengths), max(p[1] for p in lengths)), total_q


def check(lengths, heads, kv_heads, d, dv, dtype, **options):
    arguments, total_q = packed(lengths, heads, kv_heads, d, dv, dtype)
    out, lse = flash.flash_attn_varlen_func(*arguments, return_softmax_lse=True, **options)
    again, again_lse = flash.flash_attn_varlen_func(*arguments, return_softmax_lse=True, **options)
    q, *rest = arguments
    ref, ref_lse = reference.flash_attn_varlen_func(q.double(), *rest, return_softmax_lse=True, **options)
    assert_close(out[:total_q], ref[:total_q], lse[:, :total_q], ref_lse[:, :total_q])
    assert torch.equal(out[:total_q], again[:total_q]) and torch.equal(lse[:, :total_q], again_lse[:, :total_q])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_requests_match_the_oracle_in_every_dtype(dtype, causal):
    check(EDGES, 2, 1, 64, 64, dtype, causal=causal)


def test_lengths_far_from_tiles_and_from_each_other_match_the_oracle():
    check([pair for pair in LONG if pair != (64, 64)], 1, 1, 16, 16, torch.float16, causal=True)


def test_rows_beyond_two_to_the_31_elements_are_found():
    """Rows that lie 2^30 elements apart in a virtual allocation of which a few pages are touched."""
    base = torch.empty(2 * 2**30 + 2**15, dtype=torch.float16, device=DEVICE)
    q, k, v = (base[i * 2**13 :].as_strided((3, 1, 16), (2**30, 16, 1)) for i in range(3))
    for x in (q, k, v):
        x.copy_(randn(3, 1, 16, dtype=torch.float16))
    cu = cumulative([3])
    out = flash.flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, causal=True)
    assert_close(out, reference.flash_attn_varlen_func(q.double(), k, v, cu, cu, 3, 3, causal=True))


@pytest.mark.parametrize(
    "heads, kv_heads, d, dv, dtype",
    [
        (3, 3, 80, 80, torch.bfloat16),
        (4, 2, 96, 96, torch.float16),
        (5, 1, 128, 128, torch.float32),
        (2, 2, 192, 128, torch.bfloat16),
        (1, 1, 256, 256, torch.float16),
        (32, 2, 16, 48, torch.float32),
    ],
)
def test_any_head_dim_that_is_a_multiple_of_16_and_any_group_size(heads, kv_heads, d, dv, dtype):
    check([(37, 45), (1, 3)], heads, kv_heads, d, dv, dtype, causal=True)


@pytest.mark.parametrize("window", [(0, 0), (7, -1), (-1, 5), (40, 3), (33, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_match_the_oracle(window, causal):
    check([(70, 100), (50, 20)], 1, 1, 32, 32, torch.float32, causal=causal, window_size=window)


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"softmax_scale": 0.7}, {"softcap": 1.0, "window_size": (9, 9)}])
def test_softcap_and_scale_match_the_oracle(options):
    check([(40, 70), (3, 3)], 2, 2, 32, 32, torch.float16, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inputs_may_be_views_that_are_contiguous_in_the_last_dimension_only(dtype):
    (q, k, v, *rest), total = packed([(9, 40), (33, 35)], 2, 2, 32, 32, dtype)
    plain = flash.flash_attn_varlen_func(q, k, v, *rest, causal=True)
    views = flash.flash_attn_varlen_func(strided(q), strided(k), strided(v), *rest, causal=True)
    odd = [torch.cat([x, x[..., :1]], -1)[..., : x.shape[-1]] for x in (q, k, v)]
    unaligned = flash.flash_attn_varlen_func(*odd, *rest, causal=True)
    assert torch.equal(views[:total], plain[:total]) and torch.equal(unaligned[:total], plain[:total])


def test_a_nan_in_one_request_stays_there():
    (q, k, v, *rest), _ = packed([(20, 20), (20, 20)], 1, 1, 32, 32, torch.float32)
    k[20:], v[20:], q[20:] = torch.nan, torch.nan, torch.nan
    out = flash.flash_attn_varlen_func(q, k, v, *rest, causal=True)
    assert torch.isfinite(out[:20]).all() and torch.isnan(out[20:40]).all()


def test_no_request_and_no_key_are_legal():
    q, k = randn(3, 2, 16), randn(0, 2, 16)
    out, lse = flash.flash_attn_varlen_func(q, k, k, cumulative([3]), cumulative([0]), 3, 0, return_softmax_lse=True)
    assert (out == 0).all() and torch.isneginf(lse).all()
    assert flash.flash_attn_varlen_func(q[:0], k, k, int32([0]), int32([0]), 0, 0).shape == (0, 2, 16)


def test_the_error_is_at_most_twice_pytorchs_own_in_the_same_dtype():
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (randn(96, 2, 64, dtype=dtype) for _ in range(3))
        ref, _ = reference.attend(q, k, v, 0.125, causal=True)
        torch_out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True
        )[0].transpose(0, 1)
        cu = cumulative([96])
        out = flash.flash_attn_varlen_func(q, k, v, cu, cu, 96, 96, causal=True)
        assert relative_error(out, ref) <= 2 * relative_error(torch_out, ref)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, d, dv, options",
    [
        (dtype, d, dv, [{"causal": True}, {"window_size": (100, 30)}, {"softcap": 5.0, "causal": True}][(i + j) % 3])
        for i, dtype in enumerate(DTYPES)
        for j, (d, dv) in enumerate([(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
    ],
)
def test_long_and_odd_requests_match_the_oracle_on_a_gpu(dtype, d, dv, options):
    check(LONG, 4, 2, d, dv, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d, tiles", [(d, t) for d, ts in flash.TILES.items() for t in ts])
def test_every_choice_of_tiles_is_right(dtype, d, tiles):
    (q, k, v, cu_q, cu_k, max_q, max_k), total = packed([(1023, 1024), (130, 700), (1, 1)], 4, 1, d, d, dtype)
    for left, right in ((-1, 0), (-1, -1), (90, 200)):
        out, lse = flash.launch(q, k, v, cu_q, cu_k, max_q, max_k, 0.1, left, right, 0.0, tiles)
        ref, ref_lse = reference.flash_attn_varlen_func(
            q.double(), k, v, cu_q, cu_k, max_q, max_k, 0.1, window_size=(left, right), return_softmax_lse=True
        )
        assert_close(out[:total], ref[:total], lse[:, :total], ref_lse[:, :total])


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_big_batches_match_the_oracle_on_a_gpu(d):
    lengths = [(4096, 4096), (1, 4096), (2048, 4000)]
    check(lengths, 8, 2, d, d, torch.bfloat16, causal=True)


@pytest.mark.gpu
def test_a_captured_graph_replays_with_new_inputs():
    (q, k, v, *rest), total = packed([(100, 100), (30, 60)], 4, 2, 128, 128, torch.bfloat16)
    flash.flash_attn_varlen_func(q, k, v, *rest, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash.flash_attn_varlen_func(q, k, v, *rest, causal=True)
    q.copy_(randn(*q.shape, dtype=q.dtype))
    graph.replay()
    ref = reference.flash_attn_varlen_func(q.double(), k, v, *rest, causal=True)
    assert relative_error(out[:total], ref[:total]) <= TOLERANCE[torch.bfloat16]


def _good():
    (q, k, v, cu_q, cu_k, max_q, max_k), _ = packed([(4, 6)], 4, 2, 32, 32, torch.float32)
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k,
        "max_seqlen_q": max_q, "max_seqlen_k": max_k,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, change",
    [
        ("q", lambda x: x[0]),
        ("q", lambda x: x.double()),
        ("q", lambda x: x[..., :24]),
        ("q", lambda x: x[..., ::2]),
        ("k", lambda x: x.half()),
        ("k", lambda x: x[..., :16]),
        ("k", lambda x: torch.cat([x, x[:, :1]], 1)),
        ("v", lambda x: x[:-1]),
        ("v", lambda x: x.to("meta")),
        ("cu_seqlens_q", lambda x: x.long()),
        ("cu_seqlens_k", lambda x: x[:1]),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(name, change):
    arguments = _good()
    arguments[name] = change(arguments[name])
    with pytest.raises(
        ValueError, match=rf"^{'v' if name == 'k' and arguments['k'].shape[1] == 3 else name} should be"
    ):
        flash.flash_attn_varlen_func(**arguments)


@pytest.mark.parametrize(
    "name, value", [("softmax_scale", 0.0), ("window_size", (-2, 0)), ("window_size", (1,)), ("softcap", -1.0)]
)
def test_a_wrong_option_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        flash.flash_attn_varlen_func(**_good(), **{name: value})


def check_gradients(batch, s_q, s_k, heads, kv_heads, d, dtype, causal):
    """dq, dk and dv against autograd through the oracle in float64."""
    tensors = [randn(batch, s, h, d, dtype=dtype) for s, h in ((s_q, heads), (s_k, kv_heads), (s_k, kv_heads))]
    do = randn(batch, s_q, heads, d, dtype=dtype)

    def gradients(attention, inputs, do):
        inputs = [x.detach().clone().requires_grad_() for x in inputs]
        attention(*inputs).backward(do)
        return [x.grad for x in inputs]

    def oracle(q, k, v):
        return torch.stack([reference.attend(q[b], k[b], v[b], d**-0.5, causal)[0] for b in range(batch)])

    found = gradients(lambda q, k, v: flash_attn_func(q, k, v, causal=causal), tensors, do)
    again = gradients(lambda q, k, v: flash_attn_func(q, k, v, causal=causal), tensors, do)
    wanted = gradients(oracle, [x.double() for x in tensors], do.double())
    for grad, repeated, want in zip(found, again, wanted, strict=True):
        assert grad.dtype == dtype and relative_error(grad, want) <= 2 * TOLERANCE[dtype]
        assert torch.equal(grad, repeated)


@pytest.mark.parametrize(
    "batch, s_q, s_k, heads, kv_heads, d, dtype, causal",
    [
        (2, 50, 50, 2, 1, 32, torch.float32, True),
        (1, 37, 70, 3, 3, 48, torch.float32, False),
        (1, 40, 90, 2, 2, 64, torch.bfloat16, True),
        (1, 33, 33, 4, 1, 80, torch.float16, False),
    ],
)
def test_gradients_match_autograd_through_the_oracle(batch, s_q, s_k, heads, kv_heads, d, dtype, causal):
    check_gradients(batch, s_q, s_k, heads, kv_heads, d, dtype, causal)


def test_rows_that_see_no_key_have_no_gradient():
    q, k, v = (randn(1, s, 1, 16).requires_grad_() for s in (9, 4, 4))
    flash_attn_func(q, k, v, causal=True).sum().backward()
    assert (q.grad[:, :5] == 0).all() and all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_long_sequences_match_on_a_gpu(dtype, d, causal):
    check_gradients(2, 777, 1024, 4, 2, d, dtype, causal)


@pytest.mark.parametrize(
    "name, shapes",
    [("q", [(2, 8), (1, 4, 1, 16), (1, 4, 1, 16)]), ("v", [(1, 4, 1, 16), (1, 4, 1, 16), (1, 5, 1, 16)])],
)
def test_a_wrong_tensor_for_training_is_refused_by_name(name, shapes):
    with pytest.raises(ValueError, match=rf"^{name} should be"):
        flash_attn_func(*(randn(*shape) for shape in shapes))
