"""The scheduler's half of async scheduling: placeholders for tokens that only the worker knows yet."""

import pytest
from helpers import FakeWorker, make_request, make_scheduler, next_token, output_alone

from minivllm.engine.messages import ModelRunnerOutput


def counters(request) -> tuple[int, int, int]:
    return request.num_tokens, request.num_computed_tokens, request.num_output_placeholders


def returns(scheduler, message, **sampled):
    outputs = scheduler.update_from_output(message, ModelRunnerOutput(sampled))
    scheduler.kv_cache_manager.check_invariants()
    return outputs


class TestPlaceholders:
    def test_a_decode_is_scheduled_on_top_of_tokens_that_nobody_knows(self):
        scheduler = make_scheduler(async_scheduling=True)
        a = make_request("a", 10)
        scheduler.add_request(a)
        first = scheduler.schedule()
        assert counters(a) == (10, 10, 1) and first.num_scheduled_tokens == {"a": 10}
        second = scheduler.schedule()
        assert counters(a) == (10, 11, 2) and second.num_scheduled_tokens == {"a": 1}
        assert second.scheduled_spec_decode_tokens == {}
        returns(scheduler, first, a=[7])
        assert counters(a) == (11, 11, 1)
        returns(scheduler, second, a=[8])
        assert counters(a) == (12, 11, 0) and a.output_token_ids == [7, 8]

    def test_accepted_drafts_are_assumed_and_rejected_ones_taken_back(self):
        scheduler = make_scheduler(async_scheduling=True, num_speculative_tokens=3)
        a = make_request("a", 10)
        scheduler.add_request(a)
        first = scheduler.schedule()
        assert counters(a) == (10, 10, 1) and a.spec_token_ids == [-1, -1, -1]
        second = scheduler.schedule()
        assert second.num_scheduled_tokens == {"a": 4}
        assert second.scheduled_spec_decode_tokens == {"a": [-1, -1, -1]}
        assert counters(a) == (10, 14, 5)
        returns(scheduler, first, a=[7])
        assert counters(a) == (11, 14, 4)
        third = scheduler.schedule()
        assert third.scheduled_cached_reqs.num_computed_tokens == [14] and counters(a) == (11, 18, 8)
        returns(scheduler, second, a=[5, 9])  # one of three accepted: rejected = 2
        assert counters(a) == (13, 16, 4)
        returns(scheduler, third, a=[1, 2, 3, 4])
        assert counters(a) == (17, 16, 0)

    def test_a_prefill_chunk_brings_no_token_and_has_no_placeholder(self):
        scheduler = make_scheduler(async_scheduling=True, num_speculative_tokens=2, long_prefill_token_threshold=4)
        a = make_request("a", 10)
        scheduler.add_request(a)
        chunks = [scheduler.schedule() for _ in range(2)]
        assert counters(a) == (10, 8, 0) and a.spec_token_ids == []
        scheduler.schedule()
        assert counters(a) == (10, 10, 1) and a.spec_token_ids == [-1, -1]
        for chunk in chunks:
            assert returns(scheduler, chunk) == []
        assert counters(a) == (10, 10, 1)

    def test_drafts_that_the_host_is_told_of_stay_with_the_worker(self):
        scheduler = make_scheduler(async_scheduling=True, num_speculative_tokens=1)
        a = make_request("a", 4)
        scheduler.add_request(a)
        message = scheduler.schedule()
        scheduler.update_from_output(message, ModelRunnerOutput({"a": [7]}, draft_token_ids={"a": [8]}))
        assert a.spec_token_ids == [-1]

    @pytest.mark.parametrize("max_tokens", [1, 2, 3])
    def test_nothing_is_scheduled_once_max_tokens_is_certain(self, max_tokens):
        scheduler = make_scheduler(async_scheduling=True)
        a = make_request("a", 4, max_tokens=max_tokens)
        scheduler.add_request(a)
        messages = [scheduler.schedule() for _ in range(max_tokens)]
        assert all(message.num_scheduled_tokens for message in messages)
        assert scheduler.schedule().num_scheduled_tokens == {}
        for message in messages:
            (output,) = returns(scheduler, message, a=[7])
        assert output.finish_reason == "length" and scheduler.kv_cache_manager.usage == 0.0

    def test_a_step_with_drafts_is_certain_of_one_token_only(self):
        scheduler = make_scheduler(async_scheduling=True, num_speculative_tokens=3)
        scheduler.add_request(make_request("a", 4, max_tokens=3))
        scheduler.schedule(), scheduler.schedule()
        assert scheduler.schedule().num_scheduled_tokens == {"a": 4}, "all drafts may be rejected"
        assert scheduler.schedule().num_scheduled_tokens == {}

    def test_nothing_is_scheduled_beyond_max_model_len(self):
        scheduler = make_scheduler(async_scheduling=True, max_model_len=6)
        scheduler.add_request(make_request("a", 4))
        counts = [scheduler.schedule().num_scheduled_tokens for _ in range(3)]
        assert counts == [{"a": 4}, {"a": 1}, {}]

    def test_a_token_that_comes_after_the_end_is_dropped(self):
        scheduler = make_scheduler(async_scheduling=True)
        a = make_request("a", 4, eos=(7,))
        scheduler.add_request(a)
        first, second = scheduler.schedule(), scheduler.schedule()
        assert returns(scheduler, first, a=[7])[0].finish_reason == "stop"
        assert returns(scheduler, second, a=[8]) == [] and a.output_token_ids == [7]

    def test_only_tokens_that_the_host_knows_are_part_of_a_name(self):
        scheduler = make_scheduler(async_scheduling=True)
        a = make_request("a", 6)
        scheduler.add_request(a)
        messages = [scheduler.schedule() for _ in range(4)]
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        assert a.num_computed_tokens == 9 and [block.block_hash is not None for block in blocks[:3]] == [1, 0, 0]
        for message in messages[:2]:
            returns(scheduler, message, a=[7])
        scheduler.schedule()
        assert [block.block_hash is not None for block in blocks[:3]] == [1, 1, 0]

    def test_a_victim_loses_its_placeholders_and_keeps_what_comes(self):
        scheduler = make_scheduler(async_scheduling=True, num_speculative_tokens=2)
        a = make_request("a", 4)
        scheduler.add_request(a)
        first, second = scheduler.schedule(), scheduler.schedule()
        scheduler.preempt(a)
        assert counters(a) == (4, 0, 0) and a.spec_token_ids == []
        returns(scheduler, first, a=[7])
        assert counters(a) == (5, 0, 0) and scheduler.schedule().num_scheduled_tokens == {}
        returns(scheduler, second, a=[8, 9])
        assert counters(a) == (7, 0, 0)
        resumed = scheduler.schedule()
        assert resumed.scheduled_cached_reqs.resumed_req_ids == {"a"}
        assert resumed.scheduled_cached_reqs.num_computed_tokens[0] + resumed.num_scheduled_tokens["a"] == 7
        assert counters(a) == (7, 7, 1)


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("num_blocks", [6, 40])
def test_one_step_ahead_gives_the_same_tokens(num_drafts, num_blocks):
    """The worker corrects positions by what it accepted; the host learns of it one step later."""
    scheduler = make_scheduler(
        num_blocks=num_blocks, max_model_len=24, async_scheduling=True, num_speculative_tokens=num_drafts
    )

    def draft(tokens):
        return next_token(tokens) if sum(tokens) % 3 else 0

    worker = FakeWorker(num_blocks, 4, num_drafts, draft, runs_behind=True)
    requests = [make_request(str(index), [index] * 3, eos=(3,), max_tokens=20) for index in range(5)]
    for request in requests:
        scheduler.add_request(request)
    on_its_way = None
    while scheduler.num_unfinished_requests or on_its_way:
        message = scheduler.schedule()
        output = worker.execute_model(message)
        if on_its_way:
            scheduler.update_from_output(*on_its_way)
        on_its_way = (message, output) if message.num_scheduled_tokens else None
        scheduler.kv_cache_manager.check_invariants()
    for request in requests:
        assert (request.output_token_ids, request.status.value) == output_alone(request, 24)
    assert scheduler.kv_cache_manager.usage == 0.0
    assert (sum(request.num_preemptions for request in requests) > 0) == (num_blocks == 6)
