"""A real model, under pressure: priorities, shared beginnings, a small pool and a poisoned cache change no token."""

import pytest
from helpers import make_request, run_to_end
from test_equivalence import poison

from minivllm import LLM
from minivllm.bench.equality import FLOAT32_MARGIN, transformers_reference
from minivllm.checkpoints import fetch

NUM_TOKENS, BLOCK_SIZE = 12, 8
BEGINNING = "You answer in one short sentence and you know a lot about animals, plants and the weather. "
TAILS = ["The cat", "The largest tree in the world is", "Rain falls when", "The sun rises"]


@pytest.fixture(scope="module")
def references():
    found = transformers_reference(fetch("smollm2-135m"), [BEGINNING + tail for tail in TAILS], NUM_TOKENS, "float32")
    assert all(min(reference.margins) > FLOAT32_MARGIN for reference in found), "a close call: choose another prompt"
    return found


def engine(**settings):
    settings = {"max_model_len": 64, "dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE, **settings}
    return LLM("smollm2-135m", **settings).engine


def assert_same(core, references, priorities=(0, 0, 0, 0)) -> int:
    """Run the prompts, with poison in every slot that nobody owns; returns how often somebody was preempted."""
    requests = [
        make_request(str(index), reference.prompt_token_ids, max_tokens=NUM_TOKENS, priority=priority)
        for index, (reference, priority) in enumerate(zip(references, priorities, strict=True))
    ]
    poison(core)
    results = run_to_end(core, requests, after_step=lambda: poison(core))
    for request, reference in zip(requests, references, strict=True):
        assert results[request.request_id].token_ids == reference.token_ids
    return sum(request.num_preemptions for request in requests)


def test_without_a_prefix_cache_and_with_room_for_all(references):
    core = engine(enable_prefix_caching=False, num_gpu_blocks_override=32)
    assert assert_same(core, references) == 0
    assert core.scheduler.kv_cache_manager.prefix_cache_stats.requests == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_with_a_prefix_cache_in_a_pool_too_small_for_two(references, policy):
    core = engine(num_gpu_blocks_override=8, scheduling_policy=policy, long_prefill_token_threshold=13)
    num_preemptions = assert_same(core, references, priorities=(3, 0, 2, 1))
    num_preemptions += assert_same(core, references, priorities=(0, 1, 2, 3))
    assert num_preemptions > 0
    assert core.scheduler.kv_cache_manager.prefix_cache_stats.hits > 0


def test_a_prompt_of_whole_blocks_asked_twice(references):
    prompt = references[0].prompt_token_ids[: 2 * BLOCK_SIZE]
    core = engine(num_gpu_blocks_override=8)
    once, again = (run_to_end(core, [make_request("a", prompt, max_tokens=NUM_TOKENS)])["a"] for _ in range(2))
    assert again.token_ids == once.token_ids and len(once.token_ids) == NUM_TOKENS
    assert (once.num_cached_tokens, again.num_cached_tokens) == (0, BLOCK_SIZE)
