"""DeepSeek models through the engine: blocks, chunks, company, preemption, prefix hits, backends change no token."""

from functools import cache

import pytest
import torch
from helpers import make_request, run_to_end
from tiny_deepseek import YARN, TinyDeepseek, random_prompt

from minivllm.attention import latent_triton
from minivllm.config import ConfigError
from minivllm.layers import norm
from minivllm.models import deepseek_attention, llama

# Kernels are interpreted on a CPU, and compiled where there is a GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZES = [16, 32, 64, 128, 256]
CHUNK_SIZES = [1, 7, 16, 0]  # tokens of one request in one step; 0 is the whole prompt
COMPANIES = ["alone", "batch", "crowded"]
MAX_TOKENS = 8
MARGIN = 1e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TinyDeepseek.save(tmp_path_factory.mktemp("tiny-deepseek"), rope_parameters=YARN, mtp_layers=1)


@pytest.fixture(scope="module")
def tiny_v2(tmp_path_factory):
    return TinyDeepseek.save(tmp_path_factory.mktemp("tiny-v2"), version=2, q_lora_rank=None)


def greedy_of(model):
    """transformers' greedy ids of a prompt, where no rounding can tip the choice."""

    @cache
    def greedy(*prompt):
        ids, margin = model.greedy(list(prompt), MAX_TOKENS)
        assert margin > MARGIN, f"the prompt {prompt} has a close call: choose another one"
        return ids

    return greedy


@pytest.fixture(scope="module")
def expected(tiny):
    return greedy_of(tiny)


@pytest.fixture(scope="module")
def expected_v2(tiny_v2):
    return greedy_of(tiny_v2)


def prompts_for(company: str, block_size: int) -> list[list[int]]:
    """Prompts around block borders; a crowd's prompts end just below one, so that all soon need another block."""
    if company == "alone":
        return [random_prompt(length, seed=0) for length in (1, 16, 33)]
    if company == "batch":
        beginning = random_prompt(17, seed=0)
        prompts = [random_prompt(length, seed=2) for length in (1, 7, 16, 17, 40)]
        return [*prompts, [*beginning, 5], [*beginning, 6, 7], beginning[:16]]
    return [
        random_prompt(block_size - short, seed=short) for short in ((1, 2, 3) if block_size == 256 else (1, 2, 3, 4))
    ]


def pool_for(prompts: list[list[int]], block_size: int, company: str) -> dict[str, int]:
    """The smallest pool that holds one request of max_model_len, or one with room for everybody."""
    max_model_len = max(map(len, prompts)) + MAX_TOKENS + 1
    num_blocks = -(-max_model_len // block_size)
    if company != "crowded":
        num_blocks *= len(prompts)
    return {"num_gpu_blocks_override": num_blocks, "max_model_len": max_model_len, "block_size": block_size}


def run(model, prompts, company="batch", after_step=lambda core: None, **settings):
    """Greedy ids of the prompts, and the engine that gave them."""
    core = model.engine(**settings)
    requests = [make_request(str(index), prompt, max_tokens=MAX_TOKENS) for index, prompt in enumerate(prompts)]
    for batch in [[request] for request in requests] if company == "alone" else [requests]:
        run_to_end(core, batch, after_step=lambda: after_step(core))
    return [request.output_token_ids for request in requests], core, requests


@pytest.mark.parametrize("version", ["tiny", "tiny_v2"])
def test_the_fused_steps_between_two_products_give_the_same_tokens(version, request, monkeypatch):
    """What a GPU takes, in the interpreter: CI has no GPU, and a wrong call should not wait for one."""
    model, prompts = request.getfixturevalue(version), [random_prompt(length, seed=1) for length in (1, 13)]
    settings = pool_for(prompts, 16, "batch")
    expected, _, _ = run(model, prompts, **settings)
    for room in (norm, llama, deepseek_attention):
        monkeypatch.setattr(room, "use_fused_kernels", lambda _: True)
    assert run(model, prompts, **settings)[0] == expected


@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_greedy_ids_equal_transformers(tiny, expected, block_size, chunk_size, company):
    prompts = prompts_for(company, block_size)
    pool = pool_for(prompts, block_size, company)
    ids, _, requests = run(tiny, prompts, company, long_prefill_token_threshold=chunk_size, **pool)
    assert ids == [expected(*prompt) for prompt in prompts]
    num_preemptions = sum(request.num_preemptions for request in requests)
    assert num_preemptions >= 2 if company == "crowded" else num_preemptions == 0


@pytest.mark.parametrize(
    ("block_size", "chunk_size", "company"), [(16, 7, "crowded"), (64, 0, "batch"), (16, 1, "batch"), (32, 16, "alone")]
)
def test_v2_without_q_lora_equals_transformers_too(tiny_v2, expected_v2, block_size, chunk_size, company):
    prompts = prompts_for(company, block_size)
    pool = pool_for(prompts, block_size, company)
    ids, _, _ = run(tiny_v2, prompts, company, long_prefill_token_threshold=chunk_size, **pool)
    assert ids == [expected_v2(*prompt) for prompt in prompts]


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_a_small_budget_shared_by_all_gives_the_same(tiny, expected, budget):
    prompts = prompts_for("batch", 16)
    pool = pool_for(prompts, 16, "batch")
    ids, _, _ = run(tiny, prompts, max_num_batched_tokens=budget, max_num_seqs=budget, **pool)
    assert ids == [expected(*prompt) for prompt in prompts]


@pytest.mark.parametrize("chunk_size", [0, 5])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_shared_beginning_gives_the_same_with_and_without_prefix_caching(tiny, expected, backend, chunk_size):
    beginning = random_prompt(48, seed=7)
    prompts = [[*beginning, *tail] for tail in ([], [5], [6, 7], random_prompt(9, seed=1))]
    hits = {}
    for caching in (True, False):
        core = tiny.engine(
            block_size=16, max_model_len=80, num_gpu_blocks_override=40, attention_backend=backend,
            enable_prefix_caching=caching, long_prefill_token_threshold=chunk_size,
        )  # fmt: skip
        for _ in range(2):
            requests = [make_request(str(i), prompt, max_tokens=MAX_TOKENS) for i, prompt in enumerate(prompts)]
            results = run_to_end(core, requests)
            assert [results[str(i)].token_ids for i in range(4)] == [expected(*prompt) for prompt in prompts]
        hits[caching] = core.scheduler.kv_cache_manager.prefix_cache_stats.hits
    assert hits[True] > 0 and hits[False] == 0


def poison(core) -> None:
    """NaN into every slot that holds nobody's latents."""
    kv = core.scheduler.kv_cache_manager
    valid = torch.zeros(kv.num_blocks, kv.block_size, dtype=torch.bool)
    for block in kv.block_pool.blocks:
        valid[block.block_id] = block.block_hash is not None
    for request in core.scheduler.running:
        table = torch.tensor(kv.block_ids(request))
        positions = torch.arange(request.num_computed_tokens)
        valid[table[positions // kv.block_size], positions % kv.block_size] = True
    for cache_of_layer in core.worker.kv_caches.values():
        cache_of_layer[~valid] = torch.nan


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    ("block_size", "chunk_size", "company"), [(16, 7, "crowded"), (16, 0, "batch"), (64, 7, "batch")]
)
def test_a_cache_full_of_nan_is_never_read_where_nobody_wrote(tiny, expected, backend, block_size, chunk_size, company):
    prompts = prompts_for(company, block_size)
    pool = pool_for(prompts, block_size, company)
    core = tiny.engine(attention_backend=backend, long_prefill_token_threshold=chunk_size, **pool)
    poison(core)
    assert all(cache_of_layer.isnan().all() for cache_of_layer in core.worker.kv_caches.values())
    requests = [make_request(str(index), prompt, max_tokens=MAX_TOKENS) for index, prompt in enumerate(prompts)]
    results = run_to_end(core, requests, after_step=lambda: poison(core))
    assert [results[str(i)].token_ids for i in range(len(prompts))] == [expected(*prompt) for prompt in prompts]


def test_the_kernels_give_the_same_tokens(tiny):
    """In the interpreter a few tokens: whole prompts, chunks with context in several pieces, decodes."""
    prompts = [random_prompt(length, seed=length) for length in (1, 13, 19)]
    for settings in ({}, {"long_prefill_token_threshold": 6}):
        outputs = []
        for backend in ("torch", "triton"):
            core = tiny.engine(
                block_size=16, num_gpu_blocks_override=12, max_model_len=32, device=DEVICE, attention_backend=backend,
                **settings,
            )  # fmt: skip
            requests = [make_request(str(i), prompt, max_tokens=3) for i, prompt in enumerate(prompts)]
            run_to_end(core, requests)
            outputs.append([request.output_token_ids for request in requests])
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("piece", [3, 8, 8192])
def test_context_decompressed_in_pieces_is_the_same_context(tiny, expected, monkeypatch, piece):
    monkeypatch.setattr(latent_triton, "CONTEXT_PIECE", piece)
    prompts = [random_prompt(length, seed=0) for length in (16, 33)]
    core = tiny.engine(
        block_size=16, num_gpu_blocks_override=12, max_model_len=48, device=DEVICE, attention_backend="triton",
        max_num_batched_tokens=22, max_num_seqs=2, long_prefill_token_threshold=11,
    )  # fmt: skip
    requests = [make_request(str(i), prompt, max_tokens=1) for i, prompt in enumerate(prompts)]
    run_to_end(core, requests)
    assert [request.output_token_ids for request in requests] == [expected(*prompt)[:1] for prompt in prompts]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A kv_lora_rank of 128: what an FP8 cache of latents wants."""
    return TinyDeepseek.save(tmp_path_factory.mktemp("wide"), kv_lora_rank=128, std=0.1)


class TestFp8:
    def settings(self, **changes):
        return {
            "block_size": 16, "num_gpu_blocks_override": 12, "max_model_len": 48, "device": DEVICE,
            "dtype": "bfloat16", "attention_backend": "triton", "kv_cache_dtype": "fp8", **changes,
        }  # fmt: skip

    def test_a_row_takes_d_c_bytes_and_scales_and_a_bfloat16_rope(self, wide):
        core = wide.engine(**self.settings())
        shapes = {tuple(cache.shape) for cache in core.worker.kv_caches.values()}
        assert shapes == {(12, 16, 1, 128 + 4 + 2 * 16)}
        assert {cache.dtype for cache in core.worker.kv_caches.values()} == {torch.uint8}
        assert core.worker.kv_cache_spec.bytes_per_token == 3 * (128 + 4 + 32)

    def test_chunks_and_decodes_give_close_logits(self, wide):
        prompt = random_prompt(20, seed=0)
        expected = wide.logits([*prompt])[-1].log_softmax(-1).topk(5)
        core = wide.engine(**self.settings(long_prefill_token_threshold=9))
        request = make_request("a", prompt, max_tokens=2, logprobs=5)
        result = run_to_end(core, [request])["a"]
        assert result.logprobs[0].logprobs[0] == pytest.approx(expected.values[0].item(), abs=0.3)
        assert all(value == value for entry in result.logprobs for value in entry.logprobs)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"attention_backend": "torch"}, "kv_cache_dtype='fp8' needs attention_backend='triton', not 'torch'"),
            ({"dtype": "float32"}, "kv_cache_dtype='fp8' of latents needs dtype='bfloat16', not torch.float32"),
        ],
    )
    def test_it_is_refused_where_nothing_can_read_it(self, wide, changes, said):
        with pytest.raises(ConfigError, match=said):
            wide.engine(**self.settings(**changes))

    def test_it_is_refused_for_a_latent_without_whole_groups_of_128(self, tiny):
        with pytest.raises(ConfigError, match="needs a kv_lora_rank that is a multiple of 128, not 32"):
            tiny.engine(**self.settings())


@pytest.mark.gpu
@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("chunk_size", [7, 0])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_greedy_ids_on_a_gpu_equal_transformers_on_a_cpu(tiny, expected, backend, block_size, chunk_size, company):
    prompts = prompts_for(company, block_size)
    pool = pool_for(prompts, block_size, company)
    settings = {"device": "cuda", "attention_backend": backend, "long_prefill_token_threshold": chunk_size}
    ids, core, _ = run(tiny, prompts, company, **settings, **pool)
    assert core.worker.attention_backend.name == backend
    assert ids == [expected(*prompt) for prompt in prompts]


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_the_device_only_to_learn_the_tokens(tiny):
    """Between schedule and sample nothing synchronises: a whole prompt, a chunk with context, decodes."""
    core = tiny.engine(
        device="cuda", block_size=64, num_gpu_blocks_override=16, max_model_len=128, dtype="bfloat16",
        attention_backend="triton", long_prefill_token_threshold=16,
    )  # fmt: skip
    prompts = [random_prompt(length, seed=length) for length in (5, 40)]

    def requests():
        return [make_request(str(i), prompt, max_tokens=4) for i, prompt in enumerate(prompts)]

    run_to_end(core, requests())  # compiles
    core.reset_prefix_cache()
    forward, seen = core.worker.forward, []

    def guarded(inputs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            seen.append((inputs.attention.decode is not None, inputs.attention.varlen is not None))
            return forward(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    core.worker.forward = guarded
    run_to_end(core, requests())
    assert {(True, False), (False, True), (True, True)} <= set(seen)
