"""Greedy tokens do not depend on who is scheduled when, nor on what the prefix cache happens to hold."""

from functools import cache

import pytest
from helpers import make_request, run_to_end
from test_equivalence import MARGIN, poison
from tiny_llama import random_prompt

MAX_TOKENS = 12
BLOCK_SIZE = 8
BEGINNING = random_prompt(3 * BLOCK_SIZE, seed=7)


@pytest.fixture(scope="module")
def expected(tiny_llama):
    """transformers' greedy ids of a prompt, where no rounding can tip the choice."""

    @cache
    def greedy(*prompt):
        ids, margin = tiny_llama.greedy(list(prompt), MAX_TOKENS)
        assert margin > MARGIN, f"the prompt {prompt} has a close call: choose another one"
        return ids

    return greedy


def engine(tiny_llama, num_blocks=64, **settings):
    """A pool that holds everybody; the smallest one that serves a request is seven blocks."""
    return tiny_llama.engine(block_size=BLOCK_SIZE, max_model_len=56, num_gpu_blocks_override=num_blocks, **settings)


def requests_for(prompts, priorities=None):
    priorities = priorities or [0] * len(prompts)
    return [
        make_request(f"{index}", prompt, max_tokens=MAX_TOKENS, priority=priority)
        for index, (prompt, priority) in enumerate(zip(prompts, priorities, strict=True))
    ]


def assert_expected(results, requests, expected):
    for request in requests:
        assert results[request.request_id].token_ids == expected(*request.prompt_token_ids)


TAILS = [[], [5], [6, 7], random_prompt(9, seed=1), random_prompt(17, seed=2)]
SHARED = [[*BEGINNING, *tail] for tail in TAILS]


@pytest.mark.parametrize("num_blocks", [7, 64])
@pytest.mark.parametrize("priorities", [[0, 0, 0, 0, 0], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4], [2, 0, 2, 0, 1]])
def test_the_order_of_priorities_changes_when_but_not_what(tiny_llama, expected, priorities, num_blocks):
    core = engine(tiny_llama, num_blocks, scheduling_policy="priority", enable_prefix_caching=False)
    requests = requests_for([prompt[-20:] for prompt in SHARED], priorities)
    for request in requests:
        core.add_request(request)
        core.step()  # one by one, so that urgent requests find others running
    run_to_end(core, [])
    for request in requests:
        assert request.output_token_ids == expected(*request.prompt_token_ids)
    assert (sum(request.num_preemptions for request in requests) > 0) == (num_blocks == 7)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("chunk_size", [0, 5])
@pytest.mark.parametrize("num_blocks", [7, 64])
def test_a_shared_beginning_with_different_tails_gives_the_same_with_and_without_the_cache(
    tiny_llama, expected, policy, chunk_size, num_blocks
):
    hits = {}
    for caching in (True, False):
        core = engine(
            tiny_llama,
            num_blocks,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            long_prefill_token_threshold=chunk_size,
        )
        for _ in range(2):  # prompts in chunks find nothing yet when all come at once
            requests = requests_for(SHARED, [3, 1, 0, 2, 0])
            assert_expected(run_to_end(core, requests), requests, expected)
        hits[caching] = core.scheduler.kv_cache_manager.prefix_cache_stats.hits
    assert hits[True] > 0 and hits[False] == 0


@pytest.mark.parametrize("num_blocks_of_prompt", [1, 2, 3])
def test_a_prompt_of_whole_blocks_asked_twice_gives_the_same(tiny_llama, expected, num_blocks_of_prompt):
    """All of it is in the cache; the last block is computed again, because its logits are needed."""
    prompt = BEGINNING[: num_blocks_of_prompt * BLOCK_SIZE]
    core = engine(tiny_llama)
    for num_cached_tokens in (0, len(prompt) - BLOCK_SIZE, len(prompt) - BLOCK_SIZE):
        (request,) = requests_for([prompt])
        results = run_to_end(core, [request])
        assert_expected(results, [request], expected)
        assert results["0"].num_cached_tokens == num_cached_tokens


def test_a_prefix_evicted_between_lookup_and_use_is_computed_again(tiny_llama, expected):
    """The first lookup finds three blocks, but the request does not fit; meanwhile the others take them."""
    core = engine(tiny_llama, num_blocks=8)
    manager = core.scheduler.kv_cache_manager
    late_prompt = [*BEGINNING, 3, 1, 4, 1, 5, 9, 2, 6, 5]
    run_to_end(core, [make_request("before", [*BEGINNING, 1], max_tokens=1)])
    (first,) = requests_for([random_prompt(31, seed=3)])
    core.add_request(first)
    core.step()
    (late,) = requests_for([late_prompt])
    late.request_id = "late"
    core.add_request(late)
    assert len(manager.find_computed_blocks(late)) == 3
    core.step()
    assert late.status.value == "waiting", "looked up, but there was no room"
    run_to_end(core, [])
    assert late.num_cached_tokens < len(BEGINNING), "something of its prefix was evicted"
    assert first.output_token_ids == expected(*first.prompt_token_ids)
    assert late.output_token_ids == expected(*late_prompt)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("num_blocks", "chunk_size"), [(7, 5), (9, 0), (64, 5)])
def test_poison_in_every_slot_that_nobody_owns_changes_nothing(tiny_llama, expected, policy, num_blocks, chunk_size):
    core = engine(tiny_llama, num_blocks, scheduling_policy=policy, long_prefill_token_threshold=chunk_size)
    poison(core)
    for round_number in range(2):  # the second time the cache is full of names
        requests = requests_for(SHARED, [3, 1, 0, 2, 0])
        results = run_to_end(core, requests, after_step=lambda: poison(core))
        assert_expected(results, requests, expected)
        assert round_number == 0 or any(result.num_cached_tokens for result in results.values())
