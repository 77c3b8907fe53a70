"""PagedAttention against its oracle: decode, chunks and drafts, over caches whose unused slots hold NaN."""

import pytest
import torch
from attention_cases import (
    DEVICE,
    TOLERANCE,
    assert_close,
    cumulative,
    int32,
    paged,
    randn,
    relative_error,
    strided,
)

from minivllm.attention import paged as kernel
from minivllm.attention import reference
from minivllm.attention.store import quantize_e4m3

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(lengths, heads, kv_heads, d, dv, block_size, dtype):
    """Arguments for requests of these (queries, context), in the order of the function."""
    contexts = [s_k for _, s_k in lengths]
    queries = [s_q for s_q, _ in lengths]
    ks, vs = ([randn(s_k, kv_heads, n, dtype=dtype) for s_k in contexts] for n in (d, dv))
    k_cache, v_cache, table = paged(block_size, ks, vs)
    q = randn(sum(queries), heads, d, dtype=dtype)
    return q, k_cache, v_cache, cumulative(queries), int32(contexts), table, max(queries)


def check(arguments, **options):
    out, lse = kernel.paged_attention(*arguments, return_softmax_lse=True, **options)
    again = kernel.paged_attention(*arguments, **options)
    q, *rest = arguments
    ref, ref_lse = reference.paged_attention(q.double(), *rest, return_softmax_lse=True, **options)
    assert_close(out, ref, lse, ref_lse)
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 3, None])
def test_decode_chunks_and_drafts_in_one_batch_match_the_oracle(dtype, num_splits):
    lengths = [(1, 70), (1, 1), (0, 5), (1, 0), (4, 33), (18, 45), (2, 1), (1, 64)]
    check(make(lengths, 2, 1, 64, 64, 16, dtype), num_splits=num_splits)


@pytest.mark.parametrize(
    "block_size, heads, kv_heads, d, dv, dtype",
    [
        (1, 2, 2, 32, 32, torch.float32),
        (2, 4, 1, 80, 80, torch.bfloat16),
        (4, 6, 2, 96, 96, torch.float16),
        (8, 5, 1, 16, 64, torch.float32),
        (32, 7, 1, 128, 128, torch.bfloat16),
        (64, 32, 1, 64, 64, torch.float16),
        (128, 2, 2, 192, 128, torch.float32),
        (256, 3, 1, 256, 256, torch.bfloat16),
    ],
)
def test_any_page_size_head_dim_and_group_size(block_size, heads, kv_heads, d, dv, dtype):
    check(make([(1, 67), (3, 40), (1, 0)], heads, kv_heads, d, dv, block_size, dtype), num_splits=2)


@pytest.mark.parametrize("window", [(0, 0), (10, -1), (33, 5), (-1, 2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_windows_match_the_oracle(window, causal, num_splits):
    arguments = make([(1, 100), (20, 90), (5, 3)], 2, 1, 32, 32, 16, torch.float32)
    check(arguments, causal=causal, window_size=window, num_splits=num_splits)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"softmax_scale": 0.5}, {"max_seqlen_k": 80}])
def test_softcap_scale_and_bounds_match_the_oracle(options):
    check(make([(1, 80), (9, 30)], 2, 1, 32, 32, 16, torch.float16), **options)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_fp8_cache_matches_the_oracle_on_the_same_bytes(dtype, num_splits):
    q, k, v, *rest = make([(1, 50), (3, 33)], 4, 2, 64, 64, 16, dtype)
    arguments = q, quantize_e4m3(k, 0.02), quantize_e4m3(v, 0.05), *rest
    check(arguments, k_scale=0.02, v_scale=0.05, num_splits=num_splits)


def test_inputs_may_be_views_that_are_contiguous_in_the_last_dimension_only():
    q, k, v, cu, lens, table, max_q = make([(1, 40), (3, 20)], 4, 2, 32, 32, 16, torch.float16)
    both = torch.stack([k, v], 1)
    wide_table = torch.stack([table, table + 1], 1)[:, 0]
    views = kernel.paged_attention(strided(q), both[:, 0], strided(v), cu, lens, wide_table, max_q)
    assert torch.equal(views, kernel.paged_attention(q, k, v, cu, lens, table, max_q))


@pytest.mark.parametrize("block_size", [4, 32])
def test_pages_beyond_two_to_the_31_elements_are_found(block_size):
    """Blocks that lie 2^30 elements apart in a virtual allocation of which a few pages are touched."""
    base = torch.empty(3 * 2**30 + 2**14, dtype=torch.float16, device=DEVICE)
    k_cache = base.as_strided((4, block_size, 1, 16), (2**30, 16, 16, 1))
    v_cache = base[2**13 :].as_strided((4, block_size, 1, 16), (2**30, 16, 16, 1))
    for cache in (k_cache, v_cache):
        cache[3] = randn(block_size, 1, 16, dtype=torch.float16)
    arguments = randn(1, 1, 16, dtype=torch.float16), k_cache, v_cache, int32([0, 1]), int32([3]), int32([[3]]), 1
    check(arguments)


def test_padding_rows_of_length_zero_give_zeros():
    q, *rest = make([(2, 30), (2, 0), (2, 0)], 4, 2, 32, 32, 16, torch.float32)
    for num_splits in (1, 3):
        out, lse = kernel.paged_attention(q, *rest, num_splits=num_splits, return_softmax_lse=True)
        assert (out[2:] == 0).all() and torch.isneginf(lse[:, 2:]).all()


def test_an_empty_batch_is_legal():
    cache = randn(2, 16, 2, 32)
    out = kernel.paged_attention(randn(0, 4, 32), cache, cache, int32([0]), int32([]), int32([]).view(0, 3), 0)
    assert out.shape == (0, 4, 32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, block_size, d, dv, num_splits",
    [
        (dtype, block_size, d, dv, [1, 3, None][(i + j + k) % 3])
        for i, dtype in enumerate(DTYPES)
        for j, block_size in enumerate([1, 16, 64, 256])
        for k, (d, dv) in enumerate([(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
        if (i + j + k) % 2 == 0
    ],
)
def test_long_and_odd_contexts_match_the_oracle_on_a_gpu(dtype, block_size, d, dv, num_splits):
    lengths = [(1, 1), (1, 4099), (2, 1), (4, 799), (113, 203), (239, 239), (1, 0), (0, 9), (1, 1024)]
    check(make(lengths, 8, 2, d, dv, block_size, dtype), num_splits=num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, head_dim, tiles",
    [
        *((rows, d, tiles) for rows, by_dim in kernel.TILES.items() for d, tiles in by_dim.items()),
        *((16, d, tiles) for d, tiles in kernel.SPLIT_TILES.items()),
    ],
)
@pytest.mark.parametrize("fp8", [False, True])
def test_every_choice_of_tiles_is_right(rows, head_dim, tiles, fp8):
    q, k, v, cu, lens, table, max_q = make(
        [(1, 777), (rows // 4, 1024), (rows, 300)], 4, 1, head_dim, head_dim, 16, torch.bfloat16
    )
    if fp8:
        k, v = quantize_e4m3(k, 1.0), quantize_e4m3(v, 1.0)
    for num_splits in (1, 5):
        for left, right in ((-1, 0), (100, 0)):
            out = torch.full_like(q, torch.nan)
            lse = torch.full((4, q.shape[0]), torch.nan, device=DEVICE)
            kernel.launch(q, k, v, out, lse, cu, lens, table, max_q, 0.1, 1.0, left, right, 0.0, tiles, num_splits)
            ref, ref_lse = reference.paged_attention(
                q.double(), k, v, cu, lens, table, max_q, 0.1, window_size=(left, right), return_softmax_lse=True
            )
            assert_close(out, ref, lse, ref_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[(1, 131072)], [(1, 4096)] * 64, [(5, 3000)] * 8 + [(2048, 4096)]])
def test_big_batches_match_the_oracle_on_a_gpu(lengths):
    check(make(lengths, 32, 8, 128, 128, 16, torch.bfloat16))


@pytest.mark.gpu
def test_a_captured_graph_replays_for_longer_contexts_and_padding_rows():
    q, k, v, cu, lens, table, max_q = make([(1, 900), (1, 1000), (1, 0), (1, 0)], 8, 2, 128, 128, 16, torch.bfloat16)
    full = lens.clone()
    lens.copy_(int32([3, 40, 0, 0]))
    kernel.paged_attention(q, k, v, cu, lens, table, max_q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.paged_attention(q, k, v, cu, lens, table, max_q)
    lens.copy_(full)
    graph.replay()
    ref = reference.paged_attention(q.double(), k, v, cu, lens, table, max_q)
    assert relative_error(out, ref) <= TOLERANCE[torch.bfloat16] and (out[2:] == 0).all()


def _good():
    names = ["q", "k_cache", "v_cache", "cu_seqlens_q", "seq_lens", "block_table", "max_seqlen_q"]
    return dict(zip(names, make([(1, 20), (2, 9)], 4, 2, 32, 32, 16, torch.float32), strict=True))


@pytest.mark.parametrize(
    "name, change",
    [
        ("q", lambda x: x[0]),
        ("q", lambda x: x.double()),
        ("q", lambda x: x[..., :24]),
        ("q", lambda x: x[..., ::2]),
        ("k_cache", lambda x: x.half()),
        ("k_cache", lambda x: x[..., :16]),
        ("k_cache", lambda x: x[:, :12]),
        ("k_cache", lambda x: torch.cat([x, x[:, :, :1]], 2)),
        ("v_cache", lambda x: x[:1]),
        ("v_cache", lambda x: x.to("meta")),
        ("cu_seqlens_q", lambda x: x[:2]),
        ("seq_lens", lambda x: x.long()),
        ("block_table", lambda x: x[:1]),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(name, change):
    arguments = _good()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"^{name} should be"):
        kernel.paged_attention(**arguments)


@pytest.mark.parametrize("name, value", [("softmax_scale", -1.0), ("num_splits", 0), ("window_size", (0, -2))])
def test_a_wrong_option_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        kernel.paged_attention(**_good(), **{name: value})
