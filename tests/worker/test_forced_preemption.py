"""Requests are preempted at any moment, before a step or while it is in flight: the model's tokens stay the same."""

import itertools

import pytest
from helpers import make_request
from test_equivalence import MARGIN, poison
from tiny_llama import random_prompt

MAX_TOKENS, MAX_MODEL_LEN, LAST_PREEMPTION = 12, 56, 40
BEGINNING = random_prompt(16, seed=7)
PROMPTS = [
    random_prompt(1, seed=0),
    random_prompt(16, seed=1),
    [*BEGINNING, 5],
    [*BEGINNING, *random_prompt(9, seed=2)],
]


@pytest.fixture(scope="module")
def expected(tiny_llama):
    """transformers' greedy ids of each prompt, where no rounding can tip the choice."""
    answers = [tiny_llama.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert all(margin > MARGIN for _, margin in answers), "a close call: choose another prompt"
    return [ids for ids, _ in answers]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize(
    ("block_size", "chunk_size", "every"), [(1, 0, 2), (8, 5, 3), (8, 0, 2), (16, 7, 4), (64, 0, 3)]
)
def test_whoever_is_preempted_whenever_gets_the_same_tokens(
    tiny_llama, expected, block_size, chunk_size, every, in_flight, caching
):
    core = tiny_llama.engine(
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=len(PROMPTS) * -(-MAX_MODEL_LEN // block_size),
        long_prefill_token_threshold=chunk_size,
        enable_prefix_caching=caching,
    )
    requests = [make_request(str(index), prompt, max_tokens=MAX_TOKENS) for index, prompt in enumerate(PROMPTS)]
    for request in requests:
        core.add_request(request)
    scheduler, had_outputs = core.scheduler, 0
    poison(core)
    for step in itertools.count():
        if not core.has_unfinished_requests():
            break
        message = scheduler.schedule() if in_flight else None
        if scheduler.running and step % every == every - 1 and step < LAST_PREEMPTION:
            victim = scheduler.running[step // every % len(scheduler.running)]
            had_outputs += victim.num_output_tokens > 0
            scheduler.preempt(victim)
        message = message or scheduler.schedule()
        scheduler.update_from_output(message, core.worker.execute_model(message))
        scheduler.kv_cache_manager.check_invariants()
        poison(core)
    assert [request.output_token_ids for request in requests] == expected
    assert had_outputs >= 3 and scheduler.kv_cache_manager.usage == 0.0
