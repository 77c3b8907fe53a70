"""One system prompt for many: the real scheduler computes it once, also for requests that arrive in the same step."""

import random

import pytest
from helpers import fake_engine, make_request, run_to_end

BLOCK_SIZE, NUM_SHARED, NUM_REQUESTS = 16, 512, 32


def requests_with_one_system_prompt():
    """Tails of 1 to 16 tokens, no two alike, behind the same 512 tokens."""
    generator = random.Random(0)
    tails = [[1000 + number] * generator.randint(1, BLOCK_SIZE) for number in range(NUM_REQUESTS)]
    return [
        make_request(str(number), [*range(NUM_SHARED), *tail], max_tokens=4, ignore_eos=True)
        for number, tail in enumerate(tails)
    ]


def serve(enable_prefix_caching: bool, max_num_batched_tokens: int = 8192):
    """Run all requests, submitted at once; returns their results and the worker's messages.

    The fake worker checks that every slot of a request's context holds the K and V that belong there.
    """
    core = fake_engine(
        num_blocks=1200,
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    results = run_to_end(core, requests_with_one_system_prompt())
    return results, core.worker.messages


def computed_prompt_tokens(messages) -> int:
    """Tokens that were scheduled below the end of a prompt."""
    prompts, total = {}, 0
    for message in messages:
        starts = {new.req_id: new.num_computed_tokens for new in message.scheduled_new_reqs}
        prompts.update((new.req_id, len(new.prompt_token_ids)) for new in message.scheduled_new_reqs)
        cached = message.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id, count in message.num_scheduled_tokens.items():
            total += max(0, min(count, prompts[req_id] - starts[req_id]))
    return total


def test_a_shared_system_prompt_saves_more_than_nine_tenths_of_the_prompt_tokens():
    cached_results, cached_messages = serve(enable_prefix_caching=True)
    plain_results, plain_messages = serve(enable_prefix_caching=False)
    num_tails = sum(request.num_prompt_tokens - NUM_SHARED for request in requests_with_one_system_prompt())
    plain, cached = computed_prompt_tokens(plain_messages), computed_prompt_tokens(cached_messages)
    assert plain == NUM_REQUESTS * NUM_SHARED + num_tails
    assert cached == NUM_SHARED + num_tails
    assert 1 - cached / plain > 0.90
    assert {r: f.token_ids for r, f in cached_results.items()} == {r: f.token_ids for r, f in plain_results.items()}


def test_requests_of_the_very_same_step_share_it():
    results, messages = serve(enable_prefix_caching=True)
    first_step = messages[0]
    assert len(first_step.scheduled_new_reqs) == NUM_REQUESTS
    assert [new.num_computed_tokens for new in first_step.scheduled_new_reqs] == [0] + [NUM_SHARED] * 31
    shared = {tuple(new.block_ids[: NUM_SHARED // BLOCK_SIZE]) for new in first_step.scheduled_new_reqs}
    assert len(shared) == 1
    assert results["31"].num_cached_tokens == NUM_SHARED


@pytest.mark.parametrize("budget", [64, 200, 512])
def test_a_budget_smaller_than_the_prompt_saves_as_much_in_more_steps(budget):
    _, messages = serve(enable_prefix_caching=True, max_num_batched_tokens=budget)
    num_tails = sum(request.num_prompt_tokens - NUM_SHARED for request in requests_with_one_system_prompt())
    assert computed_prompt_tokens(messages) == NUM_SHARED + num_tails
