"""The engine through the Triton kernels: in the interpreter for a few tokens, on a GPU in full."""

import pytest
import torch
from helpers import make_request, run_to_end
from tiny_llama import random_prompt

from minivllm import LLM, SamplingParams
from minivllm.bench.equality import prompts, run_configuration, transformers_reference
from minivllm.checkpoints import fetch
from minivllm.config import ConfigError
from minivllm.layers import norm
from minivllm.models import llama

# Kernels are interpreted on a CPU, and compiled where there is a GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def greedy_outputs(tiny_llama, **settings):
    core = tiny_llama.engine(block_size=8, num_gpu_blocks_override=24, device=DEVICE, **settings)
    requests = [make_request(str(n), random_prompt(n, seed=n), max_tokens=3) for n in (1, 8, 13)]
    return {req_id: result.token_ids for req_id, result in run_to_end(core, requests).items()}


def test_the_random_model_gives_the_same_tokens_through_triton(tiny_llama):
    expected = greedy_outputs(tiny_llama, attention_backend="torch")
    assert greedy_outputs(tiny_llama, attention_backend="triton") == expected
    assert greedy_outputs(tiny_llama, attention_backend="triton", long_prefill_token_threshold=5) == expected


def test_the_fused_steps_between_two_products_give_the_same_tokens(tiny_llama, monkeypatch):
    """What a GPU takes, in the interpreter: CI has no GPU, and a wrong call should not wait for one."""
    expected = greedy_outputs(tiny_llama, attention_backend="torch")
    for room in (norm, llama):
        monkeypatch.setattr(room, "use_fused_kernels", lambda _: True)
    assert greedy_outputs(tiny_llama, attention_backend="torch") == expected


def test_an_fp8_cache_holds_one_byte_a_number_and_gives_close_logits(tiny_llama):
    settings = {"block_size": 8, "num_gpu_blocks_override": 24, "device": DEVICE}
    core = tiny_llama.engine(attention_backend="triton", kv_cache_dtype="fp8", **settings)
    assert {cache.dtype for cache in core.worker.kv_caches.values()} == {torch.float8_e4m3fn}
    request = make_request("a", random_prompt(13, seed=0), max_tokens=2, logprobs=0)
    result = run_to_end(core, [request])["a"]
    plain = tiny_llama.engine(attention_backend="torch", **settings)
    expected = run_to_end(plain, [make_request("a", random_prompt(13, seed=0), max_tokens=2, logprobs=0)])["a"]
    assert abs(result.logprobs[0].logprobs[0] - expected.logprobs[0].logprobs[0]) < 0.2


def test_an_fp8_cache_is_refused_where_nothing_can_read_it(tiny_llama):
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' needs attention_backend='triton', not 'torch'"):
        tiny_llama.engine(attention_backend="torch", kv_cache_dtype="fp8")


def test_smollm2_says_the_same_through_the_kernels():
    texts = {
        backend: LLM(
            "smollm2-135m", attention_backend=backend, device=DEVICE, num_gpu_blocks_override=8, max_model_len=64
        )
        .generate("The capital of France is", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)[0]
        .outputs[0]
        .token_ids
        for backend in ("torch", "triton")
    }
    assert texts["triton"] == texts["torch"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("block_size", "chunk_size", "company"),
    [(16, 0, "alone"), (16, 7, "batch"), (64, 16, "crowded"), (256, 0, "batch")],
)
def test_smollm2_on_a_gpu_gives_the_tokens_of_transformers(block_size, chunk_size, company):
    path = fetch("smollm2-135m")
    references = transformers_reference(path, prompts()[:4] + prompts()[-2:], 32, "float32", "cuda")
    kept = [reference for reference in references if min(reference.margins) > 1e-2]
    assert len(kept) >= 4
    outcome = run_configuration(
        path, kept, block_size, chunk_size, company, dtype="float32", device="cuda", attention_backend="triton"
    )
    assert outcome.num_equal == len(kept)
