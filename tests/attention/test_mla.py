"""FlashMLA against its oracle: plain, FP8 and sparse latents, split and whole requests, and the plan itself."""

import pytest
import torch
from attention_cases import (
    DEVICE,
    TOLERANCE,
    assert_close,
    int32,
    paged,
    randn,
    relative_error,
    strided,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.attention import flash, mla, mla_schedule, reference
from minivllm.attention.store import latent_row_bytes, store_latent

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Values times scales are rounded to bfloat16 before the dot products, which the oracle does not do.
FP8_SLACK = 4.0


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(contexts, s_q, heads, d_c, d_r, block_size, dtype):
    """q, cache, block table, lengths for requests of these contexts."""
    cache, table = paged(block_size, [randn(n, 1, d_c + d_r, dtype=dtype) for n in contexts])
    return randn(len(contexts), s_q, heads, d_c + d_r, dtype=dtype), cache, table, int32(contexts)


def fp8_cache(contexts, d_c, d_r, block_size):
    """An FP8 cache that holds random latents, its unused bytes all 0xFF (NaN in each of its formats), its table."""
    slots, table = paged(block_size, [torch.arange(n, device=DEVICE).float() + 1 for n in contexts], unused=0)
    size = latent_row_bytes(d_c, d_r)
    cache = torch.full((slots.shape[0], block_size, 1, size), 255, dtype=torch.uint8, device=DEVICE)
    used = slots.flatten().nonzero().flatten()
    c, rope = randn(len(used), d_c, dtype=torch.bfloat16), randn(len(used), d_r, dtype=torch.bfloat16)
    store_latent(c, rope, cache, used)
    return cache, table


def check(q, cache, table, lengths, d_c, parts=None, indices=None, **options):
    rows = q.shape[1] * q.shape[2]
    topk = None if indices is None else indices.shape[2]
    plan = mla.get_mla_metadata(lengths, rows, 1, num_heads_q=q.shape[2], topk=topk)
    if parts is not None:
        plan = mla_schedule.schedule(lengths, parts)
    options = {"softmax_scale": 0.1, "is_fp8_kvcache": cache.dtype == torch.uint8, "indices": indices, **options}
    out, lse = mla.flash_mla_with_kvcache(q, cache, table, lengths, d_c, *plan, **options)
    again, again_lse = mla.flash_mla_with_kvcache(q, cache, table, lengths, d_c, *plan, **options)
    ref, ref_lse = reference.flash_mla_with_kvcache(q.double(), cache, table, lengths, d_c, **options)
    assert_close(out, ref, lse, ref_lse, FP8_SLACK if cache.dtype == torch.uint8 else 1.0)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s_q, causal", [(1, False), (2, True), (4, True)])
@pytest.mark.parametrize("parts", [1, None, 7])
def test_whole_and_split_requests_match_the_oracle(dtype, s_q, causal, parts):
    q, cache, table, lengths = make([3, 200, 0, 64], s_q, 10, 128, 16, 64, dtype)
    check(q, cache, table, lengths, 128, parts, causal=causal)


@pytest.mark.parametrize(
    "block_size, heads, d_c, d_r, s_q, dtype",
    [
        (16, 1, 16, 16, 1, torch.float32),
        (32, 5, 48, 32, 2, torch.bfloat16),
        (64, 40, 512, 64, 1, torch.bfloat16),
        (128, 16, 384, 48, 1, torch.float16),
        (256, 33, 256, 64, 2, torch.float32),
        (16, 64, 128, 64, 1, torch.float16),
    ],
)
def test_any_page_latent_and_rope_size_and_number_of_heads(block_size, heads, d_c, d_r, s_q, dtype):
    q, cache, table, lengths = make([70, 1], s_q, heads, d_c, d_r, block_size, dtype)
    check(q, cache, table, lengths, d_c, causal=True)


@pytest.mark.parametrize("d_c, d_r, heads, s_q", [(512, 64, 16, 1), (128, 16, 20, 2)])
@pytest.mark.parametrize("parts", [1, 4])
def test_an_fp8_cache_matches_the_oracle_on_the_same_bytes(d_c, d_r, heads, s_q, parts):
    contexts = [90, 0, 33]
    cache, table = fp8_cache(contexts, d_c, d_r, 64)
    q = randn(3, s_q, heads, d_c + d_r, dtype=torch.bfloat16)
    check(q, cache, table, int32(contexts), d_c, parts, causal=True)


@pytest.mark.parametrize("fp8", [False, True])
def test_sparse_indices_name_the_slots_that_each_token_sees(fp8):
    contexts, dtype = [100, 60], torch.bfloat16
    if fp8:
        cache, table = fp8_cache(contexts, 128, 16, 16)
    else:
        _, cache, table, _ = make(contexts, 2, 4, 128, 16, 16, dtype)
    q = randn(2, 2, 4, 144, dtype=dtype)
    indices = torch.full((2, 2, 70), -1, dtype=torch.int32, device=DEVICE)
    for b, token, count in ((0, 0, 70), (0, 1, 31), (1, 0, 5)):
        keys = torch.randperm(contexts[b])[:count].to(DEVICE)
        where = torch.randperm(70)[:count].to(DEVICE)
        indices[b, token, where] = (table[b, keys // 16] * 16 + keys % 16).int()
    check(q, cache, None, int32(contexts), 128, indices=indices)


def test_inputs_may_be_views_that_are_contiguous_in_the_last_dimension_only():
    q, cache, table, lengths = make([80, 33], 2, 20, 128, 16, 64, torch.float16)
    plan = mla.get_mla_metadata(lengths, 40)
    plain = mla.flash_mla_with_kvcache(q, cache, table, lengths, 128, *plan)
    views = mla.flash_mla_with_kvcache(
        strided(q), strided(cache), table.repeat(1, 2)[:, : table.shape[1]], lengths, 128, *plan
    )
    for a, b in zip(plain, views, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-3)


@pytest.mark.parametrize("block_size", [16, 64])
def test_pages_beyond_two_to_the_31_elements_are_found(block_size):
    base = torch.empty(3 * 2**30 + 2**14, dtype=torch.float16, device=DEVICE)
    cache = base.as_strided((4, block_size, 1, 32), (2**30, 32, 32, 1))
    cache[3] = randn(block_size, 1, 32, dtype=torch.float16)
    check(randn(1, 1, 2, 32, dtype=torch.float16), cache, int32([[3]]), int32([9]), 16)


def test_padding_rows_of_length_zero_and_empty_batches_are_legal():
    q, cache, table, lengths = make([40, 0, 0], 1, 4, 32, 16, 16, torch.float32)
    out, lse = mla.flash_mla_with_kvcache(q, cache, table, lengths, 32, *mla.get_mla_metadata(lengths, 4))
    assert (out[1:] == 0).all() and torch.isneginf(lse[1:]).all()
    plan = mla.get_mla_metadata(lengths[:0], 4)
    out, lse = mla.flash_mla_with_kvcache(q[:0], cache, table[:0], lengths[:0], 32, *plan)
    assert out.shape == (0, 1, 4, 32) and lse.shape == (0, 4, 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=40), st.integers(1, 140))
def test_the_plan_covers_every_block_once_and_numbers_the_pieces(lengths, parts):
    metadata, num_splits = mla_schedule.schedule(int32(lengths), parts)
    pieces = {b: [] for b in range(len(lengths))}
    loads = []
    for first, first_block, last, end_block, first_split, *_ in metadata.tolist():
        load = 0
        for b in range(first, last + 1):
            blocks = max(-(-lengths[b] // mla_schedule.BLOCK), 1)
            lo, hi = first_block if b == first else 0, end_block if b == last else blocks
            assert 0 <= lo < hi <= blocks
            pieces[b].append((first_split if b == first else 0, lo, hi))
            load += hi - lo
        loads.append(load)
    for b, found in pieces.items():
        blocks = max(-(-lengths[b] // mla_schedule.BLOCK), 1)
        assert [split for split, _, _ in found] == list(range(len(found)))
        assert [lo for _, lo, _ in found] == [0, *(hi for _, _, hi in found[:-1])] and found[-1][2] == blocks
        assert (num_splits[b + 1] - num_splits[b]).item() == len(found)
    total = sum(max(-(-n // mla_schedule.BLOCK), 1) + 5 for n in lengths)
    assert max(loads) <= -(-total // parts)


def test_prefill_over_decompressed_heads_in_chunks_is_merged_into_the_whole():
    """DeepSeek's prefill: head dims 192 for keys, 128 for values; the context comes in chunks, joined by LSE."""
    q, k, v = (randn(n, 2, d, dtype=torch.bfloat16) for n, d in ((30, 192), (90, 192), (90, 128)))
    cu = int32([0, 30])
    ref, ref_lse = reference.attend(q, k, v, 0.07, causal=True)
    outs, lses = [], []
    for lo, hi, causal in ((0, 40, False), (40, 60, False), (60, 90, True)):
        out, lse = flash.flash_attn_varlen_func(
            q, k[lo:hi], v[lo:hi], cu, int32([0, hi - lo]), 30, hi - lo, 0.07, causal, return_softmax_lse=True
        )
        outs.append(out)
        lses.append(lse)
    out, lse = reference.merge_lse(outs, lses)
    assert relative_error(out, ref) <= 2 * TOLERANCE[torch.bfloat16]
    assert torch.allclose(lse, ref_lse.float(), atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, heads, s_q, block_size",
    [
        (dtype, heads, s_q, [16, 64, 256][(i + j + k) % 3])
        for i, dtype in enumerate(DTYPES)
        for j, heads in enumerate([1, 16, 24, 128])
        for k, s_q in enumerate([1, 2, 4])
    ],
)
def test_long_and_odd_contexts_match_the_oracle_on_a_gpu(dtype, heads, s_q, block_size):
    q, cache, table, lengths = make([1, 4099, 0, 799, 64, 1023], s_q, heads, 512, 64, block_size, dtype)
    check(q, cache, table, lengths, 512, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8, rows, tiles", [(f, r, t) for f, ts in mla_schedule.TILES.items() for r, t in ts.items()])
@pytest.mark.parametrize("s_q", [1, 2])
def test_every_choice_of_tiles_is_right(fp8, rows, tiles, s_q):
    contexts = [777, 2048, 5, 0]
    q, cache, table, lengths = make(contexts, s_q, max(rows // s_q, 1), 512, 64, 64, torch.bfloat16)
    if fp8:
        cache, table = fp8_cache(contexts, 512, 64, 64)
    for parts in (1, 20):
        plan = mla_schedule.schedule(lengths, parts)
        out, lse = mla.launch(q, cache, table, lengths, 512, *plan, 0.1, True, 0, tiles)
        ref, ref_lse = reference.flash_mla_with_kvcache(
            q.double(), cache, table, lengths, 512, None, None, 0.1, causal=True, is_fp8_kvcache=fp8
        )
        assert_close(out, ref, lse, ref_lse, FP8_SLACK if fp8 else 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("contexts, heads, s_q", [([4096] * 16, 128, 1), ([32768], 128, 1), ([16384] * 8, 16, 2)])
@pytest.mark.parametrize("fp8", [False, True])
def test_big_batches_match_the_oracle_on_a_gpu(contexts, heads, s_q, fp8):
    q, cache, table, lengths = make(contexts, s_q, heads, 512, 64, 64, torch.bfloat16)
    if fp8:
        cache, table = fp8_cache(contexts, 512, 64, 64)
    check(q, cache, table, lengths, 512, causal=True)


@pytest.mark.gpu
def test_a_captured_graph_replays_for_longer_contexts_and_padding_rows():
    q, cache, table, full = make([3000, 1000, 0, 0], 1, 16, 512, 64, 64, torch.bfloat16)
    lengths = int32([3, 70, 0, 0])

    def step():
        return mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *mla.get_mla_metadata(lengths, 16))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = step()
    lengths.copy_(full)
    graph.replay()
    ref, _ = reference.flash_mla_with_kvcache(q.double(), cache, table, lengths, 512)
    assert relative_error(out, ref) <= TOLERANCE[torch.bfloat16] and (out[2:] == 0).all()


def _good():
    q, cache, table, lengths = make([20, 9], 1, 4, 128, 16, 16, torch.bfloat16)
    metadata, num_splits = mla.get_mla_metadata(lengths, 4)
    return {
        "q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lengths, "head_dim_v": 128,
        "tile_scheduler_metadata": metadata, "num_splits": num_splits,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, change",
    [
        ("q", lambda x: x[0]),
        ("q", lambda x: x.double()),
        ("q", lambda x: x[..., :136]),
        ("q", lambda x: x.mT.contiguous().mT),
        ("k_cache", lambda x: x.half()),
        ("k_cache", lambda x: x[:, :12]),
        ("k_cache", lambda x: x[..., :128]),
        ("k_cache", lambda x: x.to("meta")),
        ("block_table", lambda x: None),
        ("block_table", lambda x: x[:1]),
        ("cache_seqlens", lambda x: x.long()),
        ("head_dim_v", lambda x: 100),
        ("tile_scheduler_metadata", lambda x: x[:, :5]),
        ("num_splits", lambda x: x[:1]),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name, change):
    arguments = _good()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"^{name} should be"):
        mla.flash_mla_with_kvcache(**arguments)


@pytest.mark.parametrize(
    "name, options",
    [
        ("softmax_scale", {"softmax_scale": -1.0}),
        ("k_cache", {"is_fp8_kvcache": True}),
        ("indices", {"indices": int32([0, 1])}),
        ("causal", {"causal": True, "indices": int32([0, 1]).view(2, 1, 1)}),
    ],
)
def test_a_wrong_option_is_refused_by_name(name, options):
    with pytest.raises(ValueError, match=name):
        mla.flash_mla_with_kvcache(**_good(), **options)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("cache_seqlens", (torch.zeros(2), 4)),
        ("num_q_tokens_per_head_k", (int32([1]), 0)),
        ("num_heads_k", (int32([1]), 4, 2)),
        ("num_heads_q", (int32([1]), 4, 1, 3, 64)),
    ],
)
def test_a_wrong_plan_is_refused_by_name(name, arguments):
    with pytest.raises(ValueError, match=name):
        mla.get_mla_metadata(*arguments)
