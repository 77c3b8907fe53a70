"""The priority policy: who is admitted first, who gives way, and what becomes of a victim that the step already had."""

import pytest
from helpers import make_request, make_scheduler, run_step

from minivllm.engine.request import RequestStatus


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


def running(*lengths_and_priorities, **options):
    """Requests a, b, c, .. that run in this order, whatever their priority: each has a prompt and one token more."""
    scheduler = make_scheduler(**{"max_model_len": 16, "scheduling_policy": "priority", **options})
    requests = []
    for index, (num_tokens, _) in enumerate(lengths_and_priorities):
        requests.append(make_request("abcdef"[index], [index + 1] * num_tokens))
        scheduler.add_request(requests[-1])
    run_step(scheduler, {request.request_id: [90] for request in requests})
    for request, (_, priority) in zip(requests, lengths_and_priorities, strict=True):
        request.priority = priority
    return scheduler, requests


class TestAdmission:
    def test_the_lowest_priority_value_is_admitted_first_and_arrival_breaks_the_tie(self):
        scheduler = make_scheduler(scheduling_policy="priority", max_num_seqs=2)
        for name, priority, arrival_time in (("a", 1, 0.0), ("b", 0, 5.0), ("c", 0, 4.0), ("d", 0, 4.0)):
            scheduler.add_request(make_request(name, 4, priority=priority, arrival_time=arrival_time))
        assert names(scheduler.waiting) == ["c", "d", "b", "a"]
        assert list(scheduler.schedule().num_scheduled_tokens) == ["c", "d"]

    def test_an_urgent_request_does_not_interrupt_those_that_run(self):
        scheduler, _ = running((4, 5), max_num_seqs=1)
        scheduler.add_request(make_request("b", 4, priority=-5))
        assert run_step(scheduler, {"a": [1]}).num_scheduled_tokens == {"a": 1}

    def test_a_victim_waits_behind_the_more_urgent_and_before_the_less_urgent(self):
        scheduler, (_, b) = running((3, 0), (3, 5))
        scheduler.add_request(make_request("urgent", 4, priority=1))
        scheduler.add_request(make_request("patient", 4, priority=9))
        scheduler.preempt(b)
        assert names(scheduler.waiting) == ["urgent", "b", "patient"]

    def test_under_fcfs_priorities_go_unheard(self):
        scheduler, (a, b, c) = running((4, 9), (3, 5), (3, 0), scheduling_policy="fcfs", num_blocks=4)
        scheduler.kv_cache_manager.allocate(make_request("hog", 4), 4)
        assert scheduler.schedule().preempted_req_ids == {"c"}
        assert names(scheduler.running) == ["a", "b"] and list(scheduler.waiting) == [c]
        assert a.num_preemptions == b.num_preemptions == 0


class TestTheVictim:
    def test_the_least_urgent_gives_way_wherever_it_stands(self):
        scheduler, (a, b, c) = running((4, 0), (3, 9), (7, 1), num_blocks=4)
        output = scheduler.schedule()  # a opens a second block, and the pool is full
        assert output.preempted_req_ids == {"b"} and output.num_scheduled_tokens == {"a": 1, "c": 1}
        assert names(scheduler.running) == ["a", "c"] and list(scheduler.waiting) == [b]
        assert b.num_preemptions == 1 and a.num_preemptions == c.num_preemptions == 0

    def test_among_the_least_urgent_the_last_to_arrive_gives_way(self):
        scheduler, _ = running((4, 0), (3, 7), (3, 7), (3, 1), num_blocks=4)
        assert scheduler.schedule().preempted_req_ids == {"c"}

    def test_the_least_urgent_of_all_gives_way_itself_and_those_behind_it_wait_a_step(self):
        scheduler, (_, b, _) = running((3, 0), (4, 9), (7, 1), num_blocks=4)
        output = run_step(scheduler, {"a": [1]})
        assert output.preempted_req_ids == {"b"} and output.num_scheduled_tokens == {"a": 1}
        assert names(scheduler.running) == ["a", "c"] and b.status is RequestStatus.PREEMPTED
        assert run_step(scheduler, {"a": [1], "c": [1]}).num_scheduled_tokens.keys() >= {"a", "c"}


class TestAVictimThatTheStepAlreadyHad:
    """a is the least urgent and the first in order. It is scheduled; then b opens a new block in a full pool."""

    def test_its_tokens_and_drafts_leave_the_message(self):
        scheduler, (a, _, _) = running((6, 9), (4, 0), (2, 1), num_blocks=4)
        a.spec_token_ids = [1]
        output = scheduler.schedule()
        assert output.preempted_req_ids == {"a"}
        assert output.num_scheduled_tokens == {"b": 1, "c": 1}
        assert output.scheduled_spec_decode_tokens == {}
        cached = output.scheduled_cached_reqs
        assert (cached.req_ids, cached.num_computed_tokens) == (["b", "c"], [4, 2])
        assert [len(block_ids) for block_ids in cached.new_block_ids] == [1, 0]

    def test_it_has_no_counters_drafts_or_blocks_left(self):
        scheduler, (a, b, _) = running((6, 9), (4, 0), (2, 1), num_blocks=4)
        a.spec_token_ids = [1]
        scheduler.schedule()
        scheduler.kv_cache_manager.check_invariants()
        assert (a.num_computed_tokens, a.spec_token_ids, a.num_tokens) == (0, [], 7)
        assert scheduler.kv_cache_manager.block_ids(a) == [] and len(scheduler.kv_cache_manager.block_ids(b)) == 2

    @pytest.mark.parametrize(("budget", "scheduled"), [(3, {"b": 1, "c": 1}), (2, {"a": 2})])
    def test_its_budget_comes_back(self, budget, scheduled):
        scheduler, (a, _, _) = running((6, 9), (4, 0), (2, 1), num_blocks=4)
        a.spec_token_ids = [1]
        scheduler.max_num_batched_tokens = budget
        # a takes 2 tokens. Of 3, the one that is left would serve b alone; of 2, nobody comes to need a block.
        assert scheduler.schedule().num_scheduled_tokens == scheduled

    def test_its_place_among_the_decodes_comes_back(self):
        scheduler, _ = running((6, 9), (4, 0), (2, 1), (1, 1), num_blocks=5, pipeline_parallel_size=2)
        output = scheduler.schedule()  # two of four decodes: a and b at first
        assert output.preempted_req_ids == {"a"} and output.num_scheduled_tokens == {"b": 1, "c": 1}

    def test_nobody_is_skipped_or_served_twice_when_the_cursor_moves_back(self):
        scheduler, _ = running((6, 9), (1, 0), (4, 0), (2, 0), num_blocks=5)
        output = scheduler.schedule()  # c opens a block; a and b stand before it
        assert output.preempted_req_ids == {"a"}
        assert list(output.num_scheduled_tokens.items()) == [("b", 1), ("c", 1), ("d", 1)]
        assert output.scheduled_cached_reqs.req_ids == ["b", "c", "d"]

    def test_the_cursor_stays_when_the_victim_stands_behind_it(self):
        scheduler, _ = running((1, 0), (4, 0), (2, 0), (6, 9), num_blocks=5)
        output = scheduler.schedule()
        assert output.preempted_req_ids == {"d"}
        assert list(output.num_scheduled_tokens) == ["a", "b", "c"]

    def test_blocks_that_it_was_to_fill_are_found_by_nobody(self):
        scheduler = make_scheduler(
            num_blocks=4, max_model_len=16, scheduling_policy="priority", long_prefill_token_threshold=4
        )
        manager = scheduler.kv_cache_manager
        a, b = make_request("a", [1] * 13), make_request("b", [2] * 4)
        for request in (a, b):
            scheduler.add_request(request)
        run_step(scheduler, {"b": [90]})
        (computed,) = manager.block_ids(a)
        a.priority, scheduler.long_prefill_token_threshold = 9, 8
        # a is given two blocks and they are named; b takes one of them, and the other one keeps what it held.
        assert scheduler.schedule().num_scheduled_tokens == {"b": 1} and a.num_preemptions == 1
        again = make_request("again", [1] * 13)
        assert [block.block_id for block in manager.find_computed_blocks(again)] == [computed]
        manager.check_invariants()

    def test_it_is_back_with_the_right_tokens_and_gets_what_it_would_have_got(self):
        scheduler, (a, _, _) = running((7, 9), (4, 0), (2, 1), num_blocks=4)
        run_step(scheduler, {"b": [1], "c": [1]})
        scheduler.abort(["b"])
        output = run_step(scheduler, {"a": [7], "c": [1]})
        assert output.scheduled_cached_reqs.resumed_req_ids == {"a"}
        cached = output.scheduled_cached_reqs
        num_hit = cached.num_computed_tokens[cached.req_ids.index("a")]
        assert num_hit + output.num_scheduled_tokens["a"] == a.num_computed_tokens == 8
        assert a.output_token_ids == [90, 7]

    def test_its_results_are_not_awaited(self):
        scheduler, (a, _, _) = running((6, 9), (4, 0), (2, 1), num_blocks=4)
        run_step(scheduler, {"b": [1], "c": [1], "a": [666]})
        assert a.output_token_ids == [90]
