"""Steps planned while the results of others are on their way: several batches of a pipeline, and what can go wrong."""

import pytest
from helpers import make_request, make_scheduler, run_step

from minivllm.engine.messages import ModelRunnerOutput
from minivllm.engine.request import RequestStatus


def started(scheduler, *requests):
    """Requests whose prompts are in the cache; each has one output token."""
    for request in requests:
        scheduler.add_request(request)
    run_step(scheduler, {request.request_id: [90] for request in requests})
    return requests


def returns(scheduler, message, **model_output):
    outputs = scheduler.update_from_output(message, ModelRunnerOutput(**model_output))
    scheduler.kv_cache_manager.check_invariants()
    return outputs


class TestSeveralBatches:
    @pytest.mark.parametrize(
        ("num_stages", "sizes"), [(1, [32, 0, 0]), (2, [16, 16, 0]), (3, [11, 11, 10]), (4, [8] * 4)]
    )
    def test_decodes_are_shared_out_among_the_batches_in_flight(self, num_stages, sizes):
        scheduler = make_scheduler(max_num_seqs=32, num_blocks=99, pipeline_parallel_size=num_stages,
                                   max_num_batched_tokens=256)  # fmt: skip
        started(scheduler, *(make_request(str(index), [index] * 4) for index in range(32)))
        messages = [scheduler.schedule() for _ in sizes]
        assert [len(message.num_scheduled_tokens) for message in messages] == sizes
        names = [name for message in messages for name in message.num_scheduled_tokens]
        assert len(set(names)) == len(names) == 32
        first = messages[0]
        returns(scheduler, first, sampled_token_ids={name: [7] for name in first.num_scheduled_tokens})
        assert list(scheduler.schedule().num_scheduled_tokens) == list(first.num_scheduled_tokens)

    def test_a_decode_with_drafts_is_one_decode(self):
        scheduler = make_scheduler(pipeline_parallel_size=2)
        requests = started(scheduler, *(make_request(name, 4) for name in "abcd"))
        for request in requests:
            request.spec_token_ids = [1, 2]
        assert scheduler.schedule().num_scheduled_tokens == {"a": 3, "b": 3}
        assert scheduler.schedule().num_scheduled_tokens == {"c": 3, "d": 3}

    def test_a_prefill_takes_no_decodes_place_and_its_chunks_follow_each_other(self):
        scheduler = make_scheduler(pipeline_parallel_size=2, long_prefill_token_threshold=4)
        started(scheduler, make_request("a", [1] * 4), make_request("b", [2] * 4))
        scheduler.add_request(make_request("long", [9] * 11))
        counts = [scheduler.schedule().num_scheduled_tokens for _ in range(4)]
        assert counts == [{"a": 1, "long": 4}, {"b": 1, "long": 4}, {"long": 3}, {}]

    def test_more_tokens_than_there_are_may_be_computed_while_drafts_are_verified(self):
        scheduler = make_scheduler()
        (a,) = started(scheduler, make_request("a", 10))
        a.spec_token_ids = [5, 6, 7]
        message = scheduler.schedule()
        assert (a.num_tokens, a.num_computed_tokens) == (11, 14)
        assert scheduler.schedule().num_scheduled_tokens == {}, "n is -3"
        returns(scheduler, message, sampled_token_ids={"a": [5, 9]})
        assert (a.num_tokens, a.num_computed_tokens) == (13, 12)

    def test_drafts_that_come_with_a_chunk_are_dropped_though_the_rest_of_the_prompt_is_on_its_way(self):
        scheduler = make_scheduler(long_prefill_token_threshold=4)
        a = make_request("a", 8)
        scheduler.add_request(a)
        first, _ = scheduler.schedule(), scheduler.schedule()
        assert a.num_computed_tokens == a.num_tokens
        returns(scheduler, first, draft_token_ids={"a": [5, 6]})
        assert a.spec_token_ids == []

    def test_results_may_be_booked_once_only(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 4))
        message = scheduler.schedule()
        returns(scheduler, message, sampled_token_ids={"a": [7]})
        with pytest.raises(KeyError):
            returns(scheduler, message, sampled_token_ids={"a": [7]})


class TestPreemptedInFlight:
    def scene(self, drafts=(), **options):
        scheduler = make_scheduler(**options)
        (a,) = started(scheduler, make_request("a", 6, **({"max_tokens": 2} if not drafts else {})))
        a.spec_token_ids = list(drafts)
        message = scheduler.schedule()
        scheduler.preempt(a)
        return scheduler, a, message

    def test_its_tokens_are_appended_and_its_counters_stay(self):
        scheduler, a, message = self.scene(drafts=[5, 6])
        (output,) = returns(scheduler, message, sampled_token_ids={"a": [5, 8]}, draft_token_ids={"a": [1, 2]})
        assert output.new_token_ids == [5, 8] and a.output_token_ids == [90, 5, 8]
        assert a.status is RequestStatus.PREEMPTED
        assert (a.num_computed_tokens, a.num_output_placeholders, a.spec_token_ids) == (0, 0, [])

    def test_it_is_not_admitted_before_its_tokens_are_there_nor_is_anybody_behind_it(self):
        scheduler, a, message = self.scene(drafts=[5])
        scheduler.add_request(make_request("b", [9, 9]))
        assert scheduler.schedule().num_scheduled_tokens == {}
        returns(scheduler, message, sampled_token_ids={"a": [5, 8]})
        output = scheduler.schedule()
        assert list(output.num_scheduled_tokens) == ["a", "b"]
        cached = output.scheduled_cached_reqs
        assert cached.resumed_req_ids == {"a"}
        assert cached.num_computed_tokens[0] + output.num_scheduled_tokens["a"] == a.num_tokens == 9

    def test_it_can_end_while_it_waits(self):
        scheduler, a, message = self.scene()
        (output,) = returns(scheduler, message, sampled_token_ids={"a": [7]})
        assert output.finish_reason == "length" and a.output_token_ids == [90, 7]
        assert scheduler.num_unfinished_requests == 0 and list(scheduler.waiting) == []
        last = scheduler.schedule()
        assert (last.finished_req_ids, last.preempted_req_ids) == ({"a"}, set())
        assert last.num_scheduled_tokens == {} and scheduler.kv_cache_manager.usage == 0.0

    def test_what_an_older_step_brings_does_not_touch_it_when_it_runs_again(self):
        scheduler = make_scheduler(long_prefill_token_threshold=4)
        a = make_request("a", 8)
        scheduler.add_request(a)
        first, second = scheduler.schedule(), scheduler.schedule()
        scheduler.preempt(a)
        returns(scheduler, first)
        assert scheduler.schedule().num_scheduled_tokens == {}, "one step of it is still on its way"
        returns(scheduler, second, sampled_token_ids={"a": [7]}, draft_token_ids={"a": [1]})
        assert a.output_token_ids == [7] and a.spec_token_ids == []
        assert scheduler.schedule().scheduled_cached_reqs.resumed_req_ids == {"a"}

    def test_prompt_logprobs_on_their_way_are_delivered(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 6, prompt_logprobs=0))
        message = scheduler.schedule()
        scheduler.preempt(scheduler.running[0])
        (output,) = returns(scheduler, message, sampled_token_ids={"a": [7]}, prompt_logprobs={"a": ["row"]})
        assert output.new_prompt_logprobs == ["row"]

    def test_a_victim_in_flight_before_the_cursor_moves_it_back(self):
        scheduler = make_scheduler(num_blocks=5, max_model_len=16, scheduling_policy="priority")
        prompts = {"a": [1] * 6, "b": [2], "c": [3] * 4, "d": [4] * 2}
        a, *_ = started(scheduler, *(make_request(name, prompt) for name, prompt in prompts.items()))
        others, scheduler.running = scheduler.running[1:], scheduler.running[:1]
        in_flight = scheduler.schedule()
        scheduler.running += others
        a.priority = 9
        output = scheduler.schedule()
        assert output.preempted_req_ids == {"a"}
        assert list(output.num_scheduled_tokens.items()) == [("b", 1), ("c", 1), ("d", 1)]
        returns(scheduler, in_flight, sampled_token_ids={"a": [7]})
        assert a.output_token_ids == [90, 7]


class TestIdsUsedAgain:
    def test_late_results_reach_neither_the_aborted_request_nor_the_new_one_that_is_running(self):
        scheduler = make_scheduler()
        (old,) = started(scheduler, make_request("a", 4))
        late = scheduler.schedule()
        scheduler.abort(["a"])
        new = make_request("a", [9, 9])
        scheduler.add_request(new)
        current = scheduler.schedule()
        assert current.num_scheduled_tokens == {"a": 2}
        assert returns(scheduler, late, sampled_token_ids={"a": [7]}) == []
        assert old.output_token_ids == [90] and new.output_token_ids == []
        returns(scheduler, current, sampled_token_ids={"a": [8]})
        assert new.output_token_ids == [8] and new.num_computed_tokens == 2

    def test_steps_of_the_old_one_do_not_count_for_the_new_one(self):
        scheduler = make_scheduler(async_scheduling=True)
        scheduler.add_request(make_request("a", 4))
        scheduler.schedule()
        scheduler.abort(["a"])
        scheduler.add_request(make_request("a", [9, 9], max_tokens=2))
        assert scheduler.schedule().num_scheduled_tokens == {"a": 2}
        assert scheduler.schedule().num_scheduled_tokens == {"a": 1}, "its second token is not on the way yet"
        assert scheduler.schedule().num_scheduled_tokens == {}

    def test_a_request_preempted_and_then_aborted_is_reported_as_finished_only(self):
        scheduler = make_scheduler()
        (a,) = started(scheduler, make_request("a", 4))
        scheduler.preempt(a)
        scheduler.abort(["a"])
        output = scheduler.schedule()
        assert (output.finished_req_ids, output.preempted_req_ids) == ({"a"}, set())
