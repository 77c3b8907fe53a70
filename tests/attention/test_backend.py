"""The torch and triton backends beside the oracle, on caches whose unowned memory is poison."""

import pytest
import torch

from minivllm.attention.backend import (
    ENVIRONMENT_VARIABLE,
    ReferenceBackend,
    TorchBackend,
    TritonBackend,
    choose_backend,
)
from minivllm.attention.metadata import AttentionMetadata, PagedRows
from minivllm.attention.torch_paged import _chunk_mask
from minivllm.config import ATTENTION_BACKENDS, ConfigError
from minivllm.forward_context import ForwardContext, get_forward_context, set_forward_context
from minivllm.layers.attention import Attention

CPU = torch.device("cpu")
# Triton's kernels are compiled where there is a GPU, and then need their tensors there.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = [2**31 - 1, -1, -(2**31), 7777777]
# Largest error against the float64 oracle, inputs of order 1: the output is an average of values, so its error is
# that of one rounding to the dtype (2^-24, 2^-11, 2^-8) times a few for scores and probabilities rounded on the way.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def paged_rows(query_lens: list[int], context_lens: list[int], tables: list[list[int]], block_size: int) -> PagedRows:
    width = max(map(len, tables)) + 2
    padded = [table + [GARBAGE[(i + j) % 4] for j in range(width - len(table))] for i, table in enumerate(tables)]
    return PagedRows(
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE),
        seq_lens=torch.tensor(context_lens, dtype=torch.int32, device=DEVICE),
        block_table=torch.tensor(padded, dtype=torch.int64).int().to(DEVICE),
        block_size=block_size,
        num_rows=sum(query_lens),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(context_lens),
        query_lens=query_lens,
        context_lens=context_lens,
    )


class Case:
    """A cache full of NaN in which each request's keys and values lie in shuffled blocks; the rest stays NaN."""

    def __init__(self, query_lens, context_lens, block_size, num_heads=4, num_kv_heads=2, head_dim=16, dtype=None):
        dtype = dtype or torch.float32
        generator = torch.Generator().manual_seed(len(query_lens) + block_size)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

        needed = [-(-length // block_size) for length in context_lens]
        shuffled = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        shape = (2, len(shuffled), block_size, num_kv_heads, head_dim)
        self.kv_cache = torch.full(shape, torch.nan, device=DEVICE).to(dtype)
        tables = [[shuffled.pop() for _ in range(count)] for count in needed]
        for table, length in zip(tables, context_lens, strict=True):
            for position in range(length):
                block_id, offset = table[position // block_size], position % block_size
                self.kv_cache[:, block_id, offset] = randn(2, num_kv_heads, head_dim)
        own = [
            self.kv_cache[:, tables[i][position // block_size], position % block_size]
            for i, (num_queries, length) in enumerate(zip(query_lens, context_lens, strict=True))
            for position in range(length - num_queries, length)
        ]
        self.k, self.v = torch.stack(own, dim=1)
        num_decodes = sum(length == 1 for length in query_lens)
        parts = [
            paged_rows(query_lens[part], context_lens[part], tables[part], block_size) if query_lens[part] else None
            for part in (slice(0, num_decodes), slice(num_decodes, None))
        ]
        self.metadata = AttentionMetadata(torch.empty(0), *parts)
        self.q = randn(sum(query_lens), num_heads, head_dim)

    def run(self, backend) -> torch.Tensor:
        return backend.attend(self.q, self.k, self.v, self.kv_cache, self.metadata, scale=0.3)


def check(case: Case, backend=TorchBackend) -> None:
    expected, got = case.run(ReferenceBackend()), case.run(backend())
    assert got.shape == case.q.shape and got.dtype == case.q.dtype
    assert expected.isfinite().all()
    error = (got.double() - expected.double()).abs().max()
    assert error < TOLERANCE[case.q.dtype], f"error {error}"


# decodes first, as in every step: (query lengths, context lengths)
STEPS = {
    "one request of one token": ([1], [1]),
    "one decode": ([1], [9]),
    "decodes of all lengths around block borders": ([1] * 9, [1, 2, 7, 8, 9, 15, 16, 17, 40]),
    "a whole prompt": ([8], [8]),
    "whole prompts around block borders": ([2, 7, 8, 9, 17], [2, 7, 8, 9, 17]),
    "chunks behind a context": ([2, 8, 5, 3], [9, 16, 40, 17]),
    "chunks of all but one token": ([8, 2], [9, 3]),
    "decodes, prompts and chunks in one step": ([1, 1, 1, 9, 3, 2], [1, 33, 8, 9, 20, 2]),
}


@pytest.mark.parametrize("block_size", [1, 8, 16, 256])
@pytest.mark.parametrize("step", STEPS)
def test_torch_equals_the_oracle_where_all_unowned_memory_is_poison(step, block_size):
    check(Case(*STEPS[step], block_size))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("step", STEPS)
def test_torch_equals_the_oracle_in_every_dtype(step, dtype):
    check(Case(*STEPS[step], block_size=8, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("step", STEPS)
def test_triton_equals_the_oracle_in_every_dtype(step, dtype):
    check(Case(*STEPS[step], block_size=8, dtype=dtype), TritonBackend)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_triton_equals_the_oracle_for_every_block_size(block_size):
    check(Case(*STEPS["decodes, prompts and chunks in one step"], block_size), TritonBackend)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (4, 1), (9, 3), (8, 2)])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_torch_equals_the_oracle_for_every_grouping_of_heads(num_heads, num_kv_heads, head_dim):
    check(Case(*STEPS["decodes, prompts and chunks in one step"], 8, num_heads, num_kv_heads, head_dim))


def test_the_workspace_serves_steps_of_all_sizes_one_after_the_other():
    backend = TorchBackend()
    for step in ("one decode", "decodes, prompts and chunks in one step", "one request of one token", "a whole prompt"):
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            case = Case(*STEPS[step], block_size=8, dtype=dtype)
            assert (case.run(backend).double() - case.run(ReferenceBackend()).double()).abs().max() < TOLERANCE[dtype]


def test_results_of_one_call_outlive_the_next():
    backend = TorchBackend()
    case = Case(*STEPS["decodes, prompts and chunks in one step"], block_size=8)
    first = case.run(backend)
    before = first.clone()
    Case(*STEPS["decodes of all lengths around block borders"], block_size=8).run(backend)
    assert torch.equal(first, before)


def test_the_order_of_blocks_in_the_cache_does_not_matter():
    case = Case(*STEPS["decodes, prompts and chunks in one step"], block_size=8)
    expected = case.run(TorchBackend())
    order = torch.randperm(case.kv_cache.shape[1], generator=torch.Generator().manual_seed(0))
    case.kv_cache = case.kv_cache[:, order.to(DEVICE)]
    new_place = order.argsort().to(DEVICE)
    for part in (case.metadata.decode, case.metadata.varlen):
        owned = (part.block_table >= 0) & (part.block_table < len(order))
        part.block_table[owned] = new_place[part.block_table[owned].long()].int()
        part._slots = None
    assert torch.equal(case.run(TorchBackend()), expected)


class TestPagedRows:
    def test_slots_follow_the_table_and_end_at_the_requests_last_token(self):
        rows = paged_rows([1, 1], [6, 2], [[5, 3], [1]], block_size=4)
        assert rows.slots().tolist() == [[20, 21, 22, 23, 12, 13], [4, 5, 5, 5, 5, 5]]

    def test_slots_never_read_the_tail_of_a_table(self):
        rows = paged_rows([1, 1, 1], [8, 4, 1], [[5, 3], [1], [0]], block_size=4)
        assert rows.block_table[1:, 1].tolist() != [0, 0]
        assert rows.slots().min() >= 0 and rows.slots().max() < 6 * 4

    def test_the_mask_says_which_positions_exist(self):
        rows = paged_rows([1, 1], [3, 1], [[5], [1]], block_size=4)
        assert rows.mask().shape == (2, 1, 1, 3)
        assert rows.mask()[:, 0, 0].tolist() == [[True, True, True], [True, False, False]]

    def test_slots_and_mask_are_made_once_a_step(self):
        rows = paged_rows([1], [3], [[5]], block_size=4)
        assert rows.slots() is rows.slots() and rows.mask() is rows.mask()


def test_a_chunks_mask_is_causal_from_the_bottom_right():
    assert _chunk_mask(2, 4, torch.device("cpu")).tolist() == [[True, True, True, False], [True] * 4]
    assert _chunk_mask(3, 3, torch.device("cpu")).tolist() == torch.ones(3, 3).tril().bool().tolist()


@pytest.mark.parametrize("backend", [TorchBackend, ReferenceBackend, TritonBackend], ids=lambda backend: backend.name)
def test_store_writes_the_named_slots_and_nothing_else(backend):
    kv_cache = torch.full((2, 3, 4, 2, 16), torch.nan, device=DEVICE)
    k, v = torch.randn(2, 3, 2, 16).to(DEVICE)
    wide = torch.cat([k, v], dim=1)  # as they come out of one projection: not contiguous
    backend().store(wide[:, :2], wide[:, 2:], kv_cache, torch.tensor([9, 0, 4], device=DEVICE))
    flat = kv_cache.view(2, 12, 2, 16)
    assert torch.equal(flat[0, [9, 0, 4]], k) and torch.equal(flat[1, [9, 0, 4]], v)
    others = [slot for slot in range(12) if slot not in (9, 0, 4)]
    assert flat[:, others].isnan().all()


def test_the_layer_stores_all_rows_before_any_row_attends():
    """Two requests of one step share a block: the second reads what the first brings along in this very step."""
    layer = Attention("layer", num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
    q, k, v = (torch.randn(6, heads, 16).to(DEVICE) for heads in (2, 1, 1))
    k[5:], v[5:] = k[4:5], v[4:5]
    q[5:] = q[4:5]
    # Row 0 is a decode at position 4 of a request that shares block 0 with the prompt in rows 1 to 5.
    q, k, v = q.roll(1, 0), k.roll(1, 0), v.roll(1, 0)
    metadata = AttentionMetadata(
        slot_mapping=torch.tensor([8, 0, 1, 2, 3, 4], device=DEVICE),
        decode=paged_rows([1], [5], [[0, 2]], block_size=4),
        varlen=paged_rows([5], [5], [[0, 1]], block_size=4),
    )
    kv_caches = {"layer": torch.full((2, 3, 4, 1, 16), torch.nan, device=DEVICE)}
    for backend in (TorchBackend(), ReferenceBackend(), TritonBackend()):
        with set_forward_context(ForwardContext(metadata, backend, kv_caches)):
            out = layer(q, k, v)
        assert out.isfinite().all()
        torch.testing.assert_close(out[0], out[5], rtol=1e-5, atol=1e-6)


class TestChoosing:
    def test_names_lead_to_their_backends(self):
        for name in ("torch", "reference", "triton"):
            assert choose_backend(name, CPU, 64, 16).name == name

    def test_auto_is_torch_unless_the_environment_says_otherwise(self, monkeypatch):
        monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
        assert choose_backend("auto", CPU, 64, 16).name == "torch"
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
        assert choose_backend("auto", CPU, 64, 16).name == "reference"
        assert choose_backend("torch", CPU, 64, 16).name == "torch", "what is asked for by name wins"

    def test_an_unknown_name_in_the_environment_is_refused_by_name(self, monkeypatch):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "magic")
        with pytest.raises(ConfigError, match=f"{ENVIRONMENT_VARIABLE} must be one of .*torch.*, not 'magic'"):
            choose_backend("auto", CPU, 64, 16)

    def test_every_backend_that_the_config_accepts_exists(self):
        for name in ATTENTION_BACKENDS:
            choose_backend(name, CPU, 64, 16)

    def test_a_gpu_gets_triton_where_triton_can_serve_the_model(self, monkeypatch):
        monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
        gpu = torch.device("cuda")
        assert choose_backend("auto", gpu, 64, 16).name == "triton"
        assert choose_backend("auto", gpu, 72, 16).name == "torch"
        assert choose_backend("auto", gpu, 64, 48).name == "torch"

    @pytest.mark.parametrize(
        ("head_dim", "block_size", "culprit"),
        [(72, 16, "head_dim"), (512, 16, "head_dim"), (64, 48, "block_size"), (64, 512, "block_size")],
    )
    def test_triton_says_what_it_cannot_serve(self, head_dim, block_size, culprit):
        with pytest.raises(ConfigError, match=f"attention_backend='triton' needs a {culprit}"):
            choose_backend("triton", CPU, head_dim, block_size)


class TestForwardContext:
    def test_there_is_none_outside_of_a_forward_pass(self):
        with pytest.raises(RuntimeError, match=r"no forward pass is running: wrap the call in set_forward_context"):
            get_forward_context()

    def test_it_ends_with_its_block_even_after_an_error_and_nests(self):
        outer, inner = (ForwardContext(AttentionMetadata(torch.empty(0), None, None), TorchBackend()) for _ in "ab")
        with set_forward_context(outer):
            with pytest.raises(KeyError), set_forward_context(inner):
                assert get_forward_context() is inner
                raise KeyError
            assert get_forward_context() is outer
        with pytest.raises(RuntimeError):
            get_forward_context()
