"""The scheduler's one rule, worked example by worked example."""

import pytest
from helpers import make_request, make_scheduler, run_step

from minivllm.config import ConfigError
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.messages import ModelRunnerOutput
from minivllm.engine.request import RequestStatus
from minivllm.engine.scheduler import Scheduler


def started(scheduler, *requests):
    """Requests that the scheduler runs and whose prompts are in the cache; each has one output token."""
    for request in requests:
        scheduler.add_request(request)
    run_step(scheduler, {request.request_id: [90] for request in requests})
    assert all(request.num_computed_tokens == request.num_prompt_tokens for request in requests)
    return requests


class TestTheOneRule:
    def request_with(self, num_tokens, num_computed, drafts, **options):
        """A running request in a given state, as the rows of the table have it."""
        options = {"num_blocks": 64, "max_model_len": 128, "max_num_batched_tokens": 100, **options}
        budget = options.pop("max_num_batched_tokens")
        scheduler = make_scheduler(max_num_batched_tokens=128, **options)
        request = make_request("a", num_tokens, max_tokens=100)
        scheduler.add_request(request)
        scheduler.long_prefill_token_threshold = num_computed
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput())
        assert (request.num_tokens, request.num_computed_tokens) == (num_tokens, num_computed)
        scheduler.long_prefill_token_threshold = 0
        scheduler.max_num_batched_tokens = budget
        request.spec_token_ids = drafts
        return scheduler, request

    @pytest.mark.parametrize(
        ("options", "num_scheduled", "scheduled_drafts"),
        [
            ({"max_num_batched_tokens": 100}, 4, [5, 6, 7]),
            ({"max_num_batched_tokens": 2}, 2, [5]),
            ({"max_num_batched_tokens": 1}, 1, None),
            ({"max_model_len": 13}, 2, [5]),
            ({"max_model_len": 12}, 1, None),
        ],
    )
    def test_drafts_are_verified_as_far_as_budget_and_length_allow(self, options, num_scheduled, scheduled_drafts):
        scheduler, request = self.request_with(11, 10, [5, 6, 7], **options)
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": num_scheduled}
        assert output.scheduled_spec_decode_tokens.get("a") == scheduled_drafts
        assert request.spec_token_ids == []
        assert request.num_computed_tokens == 10 + num_scheduled

    def test_a_prefill_chunk_schedules_no_stale_drafts(self):
        scheduler, request = self.request_with(100, 40, [5, 6, 7], max_num_batched_tokens=30)
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 30}
        assert output.scheduled_spec_decode_tokens == {}
        assert request.spec_token_ids == []

    def test_drafts_for_a_request_in_prefill_are_dropped_on_arrival(self):
        scheduler, request = self.request_with(80, 20, [], max_num_batched_tokens=30)
        run_step(scheduler, {}, drafts={"a": [5, 6, 7]})
        assert request.num_computed_tokens == 50 and request.spec_token_ids == []
        scheduler.max_num_batched_tokens = 50
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 30}
        assert output.scheduled_spec_decode_tokens == {}

    def test_counters_move_before_the_step_has_run(self):
        scheduler, request = self.request_with(11, 10, [])
        scheduler.schedule()
        assert request.num_computed_tokens == 11
        assert scheduler.schedule().num_scheduled_tokens == {}  # nothing is left to compute until a token comes


class TestDraftsComeBack:
    @pytest.mark.parametrize(
        ("sampled", "computed"), [([5, 6, 7, 8], 14), ([5, 6, 9], 13), ([5, 9], 12), ([9], 11)]
    )  # fmt: skip
    def test_rejected_drafts_are_taken_back(self, sampled, computed):
        scheduler = make_scheduler()
        (request,) = started(scheduler, make_request("a", 10))
        request.spec_token_ids = [5, 6, 7]
        run_step(scheduler, {"a": sampled}, drafts={"a": [1, 2]})
        assert request.output_token_ids == [90, *sampled]
        assert request.num_computed_tokens == computed == request.num_tokens - 1
        assert request.spec_token_ids == [1, 2]

    def test_the_next_message_starts_at_the_corrected_count(self):
        scheduler = make_scheduler()
        (request,) = started(scheduler, make_request("a", 10))
        request.spec_token_ids = [5, 6, 7]
        run_step(scheduler, {"a": [5, 9]})
        assert scheduler.schedule().scheduled_cached_reqs.num_computed_tokens == [12]

    @pytest.mark.parametrize(
        ("params", "kept", "reason", "stop_reason"),
        [
            ({"eos": (7,)}, [5, 6, 7], "stop", None),
            ({"stop_token_ids": [6]}, [5, 6], "stop", 6),
            ({"max_tokens": 3}, [5, 6], "length", None),
            ({"eos": (5,), "stop_token_ids": [6], "ignore_eos": True}, [5, 6], "stop", 6),
            ({"eos": (5, 7), "min_tokens": 4}, [5, 6, 7], "stop", None),
        ],
    )
    def test_what_follows_a_stop_is_dropped(self, params, kept, reason, stop_reason):
        scheduler = make_scheduler()
        (request,) = started(scheduler, make_request("a", 10, **params))
        request.spec_token_ids = [5, 6, 7]
        model_output = ModelRunnerOutput({"a": [5, 6, 7, 8]}, logprobs={"a": ["l5", "l6", "l7", "l8"]})
        (output,) = scheduler.update_from_output(scheduler.schedule(), model_output)
        assert output.new_token_ids == kept and output.new_logprobs == [f"l{token}" for token in kept]
        assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
        assert request.output_token_ids == [90, *kept]
        assert scheduler.kv_cache_manager.usage == 0.0

    def test_max_model_len_ends_a_request_amid_accepted_drafts(self):
        scheduler = make_scheduler(max_model_len=13)
        (request,) = started(scheduler, make_request("a", 10))
        request.spec_token_ids = [5, 6, 7]
        output = run_step(scheduler, {"a": [5, 6]})
        assert output.scheduled_spec_decode_tokens == {"a": [5]}
        assert request.num_tokens == 13 and request.status is RequestStatus.FINISHED_LENGTH


class TestBatching:
    def test_requests_join_and_leave_a_running_batch(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 4, max_tokens=3))
        scheduler.add_request(make_request("b", [9] * 5))
        first = run_step(scheduler, {"a": [1], "b": [1]})
        assert first.num_scheduled_tokens == {"a": 1, "b": 5}
        second = run_step(scheduler, {"a": [1], "b": [1]})
        assert second.num_scheduled_tokens == {"a": 1, "b": 1}
        assert run_step(scheduler, {"b": [1]}).num_scheduled_tokens == {"b": 1}

    def test_running_requests_come_before_waiting_ones_and_share_one_budget(self):
        scheduler = make_scheduler(max_num_batched_tokens=10)
        started(scheduler, make_request("a", 4), make_request("b", 4))
        scheduler.add_request(make_request("c", 20))
        scheduler.add_request(make_request("d", 20))
        output = run_step(scheduler, {"a": [1], "b": [1]})
        assert output.num_scheduled_tokens == {"a": 1, "b": 1, "c": 8}
        assert list(output.num_scheduled_tokens) == ["a", "b", "c"]
        assert output.total_num_scheduled_tokens == 10

    def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(self):
        scheduler = make_scheduler(max_num_batched_tokens=8)
        request = make_request("a", 20)
        scheduler.add_request(request)
        counts = [run_step(scheduler, {}).num_scheduled_tokens["a"] for _ in range(2)]
        counts.append(run_step(scheduler, {"a": [1]}).num_scheduled_tokens["a"])
        assert counts == [8, 8, 4]
        assert run_step(scheduler, {"a": [1]}).num_scheduled_tokens == {"a": 1}

    def test_the_threshold_cuts_each_requests_chunk_and_leaves_budget_for_others(self):
        scheduler = make_scheduler(long_prefill_token_threshold=6)
        scheduler.add_request(make_request("a", 20))
        scheduler.add_request(make_request("b", [9] * 5))
        scheduler.add_request(make_request("c", [8] * 6))
        assert run_step(scheduler, {"b": [1], "c": [1]}).num_scheduled_tokens == {"a": 6, "b": 5, "c": 6}
        assert run_step(scheduler, {"b": [1], "c": [1]}).num_scheduled_tokens == {"a": 6, "b": 1, "c": 1}

    def test_without_chunked_prefill_a_prompt_runs_whole_or_waits(self):
        scheduler = make_scheduler(max_num_batched_tokens=64, enable_chunked_prefill=False)
        scheduler.add_request(make_request("a", 40))
        scheduler.add_request(make_request("b", [9] * 30))
        assert run_step(scheduler, {"a": [1]}).num_scheduled_tokens == {"a": 40}
        assert run_step(scheduler, {"a": [1], "b": [1]}).num_scheduled_tokens == {"a": 1, "b": 30}

    def test_max_num_seqs_holds_over_the_engines_life_and_not_for_one_step(self):
        scheduler = make_scheduler(max_num_seqs=2)
        requests = [make_request(name, [index, 7, 7], max_tokens=2) for index, name in enumerate("abc")]
        for request in requests:
            scheduler.add_request(request)
        assert set(run_step(scheduler, {"a": [1], "b": [1]}).num_scheduled_tokens) == {"a", "b"}
        assert set(run_step(scheduler, {"a": [1], "b": [1]}).num_scheduled_tokens) == {"a", "b"}
        assert set(run_step(scheduler, {"c": [1]}).num_scheduled_tokens) == {"c"}

    def test_requests_whose_step_is_on_its_way_count_as_running(self):
        scheduler = make_scheduler(max_num_seqs=2)
        started(scheduler, make_request("a", [1]), make_request("b", [2]))
        scheduler.add_request(make_request("c", [3]))
        assert set(scheduler.schedule().num_scheduled_tokens) == {"a", "b"}
        assert scheduler.schedule().num_scheduled_tokens == {}

    def test_a_failed_allocation_ends_admission_in_order_of_arrival(self):
        scheduler = make_scheduler(num_blocks=8, max_model_len=32)
        started(scheduler, make_request("a", 20))
        scheduler.add_request(make_request("big", [9] * 20))
        scheduler.add_request(make_request("small", [8]))
        assert run_step(scheduler, {"a": [1]}).num_scheduled_tokens == {"a": 1}

    def test_a_step_without_requests_schedules_nothing(self):
        output = make_scheduler().schedule()
        assert output.num_scheduled_tokens == {} and output.total_num_scheduled_tokens == 0


class TestMessages:
    def test_a_request_is_sent_whole_once_and_then_as_deltas(self):
        scheduler = make_scheduler()
        request = make_request("a", 7, eos=(3,), stop_token_ids=[5])
        scheduler.add_request(request)
        output = run_step(scheduler, {"a": [1]})
        (new,) = output.scheduled_new_reqs
        assert (new.req_id, new.prompt_token_ids, new.block_ids) == ("a", [1, 2, 3, 4, 5, 6, 7], [0, 1])
        assert (new.num_computed_tokens, new.stop_token_ids) == (0, {3, 5})
        assert new.sampling_params is request.sampling_params
        for new_blocks, computed in (([], 7), ([2], 8), ([], 9)):
            output = run_step(scheduler, {"a": [1]})
            cached = output.scheduled_cached_reqs
            assert output.scheduled_new_reqs == []
            assert (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens) == (
                ["a"],
                [new_blocks],
                [computed],
            )
            assert cached.resumed_req_ids == set()

    def test_ignored_eos_is_no_stop_token_for_the_worker(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 7, eos=(3,), stop_token_ids=[5], ignore_eos=True))
        assert scheduler.schedule().scheduled_new_reqs[0].stop_token_ids == {5}

    def test_a_prefix_hit_is_in_the_block_table_and_not_computed_again(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 9))
        request = make_request("b", 10)
        scheduler.add_request(request)
        output = run_step(scheduler, {"a": [1], "b": [1]})
        (new,) = output.scheduled_new_reqs
        assert (new.num_computed_tokens, new.block_ids) == (8, [0, 1, 3])
        assert output.num_scheduled_tokens["b"] == 2
        assert request.num_cached_tokens == 8

    def test_requests_admitted_in_one_step_share_their_prefix(self):
        scheduler = make_scheduler()
        for name in "ab":
            scheduler.add_request(make_request(name, 9))
        output = run_step(scheduler, {"a": [1], "b": [1]})
        assert [new.block_ids for new in output.scheduled_new_reqs] == [[0, 1, 2], [0, 1, 3]]
        assert output.num_scheduled_tokens == {"a": 9, "b": 1}

    def test_finished_ids_are_delivered_once(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 4, max_tokens=2), make_request("b", [9, 9]))
        assert run_step(scheduler, {"a": [1], "b": [1]}).finished_req_ids == set()
        assert run_step(scheduler, {"b": [1]}).finished_req_ids == {"a"}
        assert run_step(scheduler, {"b": [1]}).finished_req_ids == set()

    def test_the_last_finished_id_is_delivered_by_a_step_without_requests(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 4, max_tokens=1))
        assert scheduler.schedule().finished_req_ids == {"a"}

    def test_outputs_carry_what_the_front_door_needs(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 9, max_tokens=5))
        request = make_request("b", 9, max_tokens=1, arrival_time=0.0)
        scheduler.add_request(request)
        first, second = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({"a": [1], "b": [2]}))
        assert (first.req_id, first.new_token_ids, first.finish_reason, first.num_cached_tokens) == ("a", [1], None, 0)
        assert (second.req_id, second.new_token_ids, second.finish_reason) == ("b", [2], "length")
        assert second.num_cached_tokens == 8
        assert second.queue_time == request.first_scheduled_time - request.arrival_time

    def test_a_chunk_without_a_token_gives_no_output_but_its_prompt_logprobs(self):
        scheduler = make_scheduler(max_num_batched_tokens=8)
        scheduler.add_request(make_request("a", 20, prompt_logprobs=0))
        assert scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput()) == []
        model_output = ModelRunnerOutput(prompt_logprobs={"a": ["row"]})
        (output,) = scheduler.update_from_output(scheduler.schedule(), model_output)
        assert (output.new_token_ids, output.new_prompt_logprobs) == ([], ["row"])


class TestPreemption:
    def crowded(self, **options):
        """Three requests with prompts of 4 tokens in a pool of 6 blocks of 4: the ninth token of the first starves the
        last."""
        scheduler = make_scheduler(num_blocks=6, max_model_len=24, enable_prefix_caching=False, **options)
        return scheduler, started(scheduler, *(make_request(name, [i] * 4) for i, name in enumerate("abc")))

    def until_preemption(self, scheduler):
        while True:
            running = [request.request_id for request in scheduler.running]
            output = run_step(scheduler, {name: [7] for name in running})
            if output.preempted_req_ids:
                return output

    def test_the_victim_is_the_request_that_came_last(self):
        scheduler, (a, b, c) = self.crowded()
        output = self.until_preemption(scheduler)
        assert output.preempted_req_ids == {"c"}
        assert [request.request_id for request in scheduler.running] == ["a", "b"]
        assert list(scheduler.waiting) == [c]
        assert c.status is RequestStatus.PREEMPTED and c.num_computed_tokens == 0 and c.num_preemptions == 1
        assert scheduler.kv_cache_manager.block_ids(c) == []
        assert a.num_preemptions == b.num_preemptions == 0

    def test_a_victim_keeps_its_outputs_and_loses_its_drafts(self):
        scheduler, (_, _, c) = self.crowded()
        while not c.num_preemptions:
            c.spec_token_ids = [1] if len(c.output_token_ids) >= 4 else []
            outputs_before = c.output_token_ids
            run_step(scheduler, {request.request_id: [7] for request in scheduler.running})
        assert c.output_token_ids == outputs_before and len(outputs_before) >= 4
        assert c.spec_token_ids == []

    def test_a_victim_goes_to_the_front_of_the_queue(self):
        scheduler, (_, _, c) = self.crowded()
        late = make_request("late", [9] * 20)
        scheduler.add_request(late)
        self.until_preemption(scheduler)
        assert list(scheduler.waiting) == [c, late]

    def test_nothing_is_admitted_in_a_step_that_preempts(self):
        scheduler = make_scheduler(num_blocks=9, max_model_len=24, enable_prefix_caching=False)
        started(scheduler, *(make_request(name, [i] * 12) for i, name in enumerate("abc")))
        small = make_request("small", [9])
        scheduler.add_request(small)
        output = self.until_preemption(scheduler)
        assert output.preempted_req_ids == {"c"}
        assert output.scheduled_new_reqs == [] and output.scheduled_cached_reqs.resumed_req_ids == set()
        assert scheduler.kv_cache_manager.block_pool.num_free_blocks == 1, "the small request would have fitted"
        assert small.status is RequestStatus.WAITING

    def test_a_victim_comes_back_with_a_new_table_and_computes_prompt_and_outputs_again(self):
        scheduler, (_, _, c) = self.crowded()
        self.until_preemption(scheduler)
        num_tokens = c.num_tokens
        scheduler.abort(["a"])
        output = run_step(scheduler, {"b": [7], "c": [7]})
        cached = output.scheduled_cached_reqs
        assert cached.resumed_req_ids == {"c"} and output.scheduled_new_reqs == []
        index = cached.req_ids.index("c")
        assert cached.new_block_ids[index] == scheduler.kv_cache_manager.block_ids(c)
        assert cached.num_computed_tokens[index] == 0
        assert output.num_scheduled_tokens["c"] == num_tokens
        assert c.status is RequestStatus.RUNNING and c.num_tokens == num_tokens + 1

    def test_a_victim_that_finds_its_blocks_in_the_prefix_cache_computes_only_the_rest(self):
        scheduler = make_scheduler(num_blocks=6, max_model_len=24)
        _, b = started(scheduler, make_request("a", [1] * 11), make_request("b", [2] * 11))
        while not b.num_preemptions:
            run_step(scheduler, {request.request_id: [7] for request in scheduler.running})
        scheduler.abort(["a"])
        output = run_step(scheduler, {"b": [7]})
        assert output.scheduled_cached_reqs.num_computed_tokens == [8], "all but the tail, which made room for a"
        assert b.num_cached_tokens == 0, "only what the first admission found counts"

    def test_a_request_can_be_its_own_victim_while_the_first_gets_on(self):
        scheduler = make_scheduler(num_blocks=4, max_model_len=16, enable_prefix_caching=False)
        _, b = started(scheduler, make_request("a", [1] * 8), make_request("b", [2] * 3))
        run_step(scheduler, {"a": [7], "b": [7]})
        output = run_step(scheduler, {"a": [7]})
        assert output.preempted_req_ids == {"b"} and output.num_scheduled_tokens == {"a": 1}
        assert list(scheduler.waiting) == [b]

    def test_one_step_may_take_several_victims(self):
        scheduler = make_scheduler(num_blocks=4, max_model_len=16, enable_prefix_caching=False)
        a, b, c = started(scheduler, *(make_request(name, [i]) for i, name in enumerate("abc")))
        a.spec_token_ids = [5] * 11
        output = run_step(scheduler, {"a": [5] * 12})
        assert output.preempted_req_ids == {"b", "c"} and output.num_scheduled_tokens == {"a": 12}
        assert list(scheduler.waiting) == [b, c]

    def test_preempted_ids_are_delivered_once(self):
        scheduler, _ = self.crowded()
        self.until_preemption(scheduler)
        assert run_step(scheduler, {"a": [7], "b": [7]}).preempted_req_ids == set()


class TestAbort:
    def test_a_waiting_request_is_gone_at_once_and_its_id_is_delivered(self):
        scheduler = make_scheduler()
        request = make_request("a", 4)
        scheduler.add_request(request)
        scheduler.abort(["a"])
        assert request.status is RequestStatus.FINISHED_ABORTED and request.status.value == "abort"
        assert scheduler.num_unfinished_requests == 0
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {} and output.finished_req_ids == {"a"}

    def test_a_running_request_gives_its_blocks_back(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 4), make_request("b", [9]))
        scheduler.abort(["a"])
        output = run_step(scheduler, {"b": [1]})
        assert output.num_scheduled_tokens == {"b": 1} and output.finished_req_ids == {"a"}
        scheduler.abort(["b"])
        assert scheduler.kv_cache_manager.usage == 0.0

    def test_a_preempted_request_leaves_the_queue(self):
        scheduler, (_, _, c) = TestPreemption().crowded()
        TestPreemption().until_preemption(scheduler)
        scheduler.abort(["c"])
        assert list(scheduler.waiting) == [] and c.status is RequestStatus.FINISHED_ABORTED
        assert scheduler.schedule().finished_req_ids == {"c"}

    def test_unknown_and_finished_ids_are_ignored(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 4, max_tokens=1))
        scheduler.schedule()
        scheduler.abort(["a", "nobody"])
        assert scheduler.schedule().finished_req_ids == set()

    def test_tokens_on_their_way_are_dropped(self):
        scheduler = make_scheduler()
        (request,) = started(scheduler, make_request("a", 4))
        message = scheduler.schedule()
        scheduler.abort(["a"])
        assert scheduler.update_from_output(message, ModelRunnerOutput({"a": [7]})) == []
        assert request.output_token_ids == [90]

    def test_an_id_can_be_used_again_after_an_abort(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 4))
        scheduler.abort(["a"])
        again = make_request("a", [9, 9])
        scheduler.add_request(again)
        output = run_step(scheduler, {"a": [3]})
        assert output.finished_req_ids == {"a"} and output.scheduled_new_reqs[0].prompt_token_ids == [9, 9]
        assert again.output_token_ids == [3]

    def test_tokens_on_their_way_do_not_reach_a_new_request_of_the_same_id(self):
        scheduler = make_scheduler()
        started(scheduler, make_request("a", 4))
        message = scheduler.schedule()
        scheduler.abort(["a"])
        again = make_request("a", [9, 9])
        scheduler.add_request(again)
        assert scheduler.update_from_output(message, ModelRunnerOutput({"a": [7]})) == []
        assert again.output_token_ids == []


class TestTheDoor:
    def test_an_empty_prompt_is_refused(self):
        with pytest.raises(ValueError, match="the prompt is empty: it needs at least one token"):
            make_scheduler().add_request(make_request("a", []))

    @pytest.mark.parametrize("num_tokens", [16, 17])
    def test_a_prompt_that_leaves_no_room_for_an_output_is_refused(self, num_tokens):
        message = rf"prompt has {num_tokens} tokens .* max_model_len \(16\): shorten it to at most 15 tokens"
        with pytest.raises(ValueError, match=message):
            make_scheduler(max_model_len=16).add_request(make_request("a", num_tokens))

    def test_the_longest_legal_prompt_gets_one_token(self):
        scheduler = make_scheduler(max_model_len=16)
        request = make_request("a", 15)
        scheduler.add_request(request)
        run_step(scheduler, {"a": [1]})
        assert request.output_token_ids == [1] and request.status is RequestStatus.FINISHED_LENGTH

    def test_an_id_in_use_is_refused(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 3))
        with pytest.raises(ValueError, match="request id 'a' is in use by an unfinished request"):
            scheduler.add_request(make_request("a", 3))

    def test_a_refused_request_leaves_the_others_alone(self):
        scheduler = make_scheduler(max_model_len=16)
        scheduler.add_request(make_request("a", 3))
        with pytest.raises(ValueError):
            scheduler.add_request(make_request("b", 16))
        assert run_step(scheduler, {"a": [1]}).num_scheduled_tokens == {"a": 3}

    def test_a_pool_too_small_for_one_request_is_refused_with_what_fits(self):
        with pytest.raises(ConfigError, match=r"holds 12 tokens .* max_model_len \(13\): lower .* to at most 12"):
            Scheduler(KVCacheManager(3, 4, 13), max_model_len=13, max_num_seqs=1, max_num_batched_tokens=16)
        Scheduler(KVCacheManager(3, 4, 12), max_model_len=12, max_num_seqs=1, max_num_batched_tokens=16)

    def test_whole_prompts_need_a_budget_of_the_longest(self):
        with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(63\) must be at least max_model_len \(64\)"):
            make_scheduler(max_num_batched_tokens=63, enable_chunked_prefill=False)
