"""Rules of the scheduler and the cache, each with numbers worked by hand: what the other files' tables leave out."""

from collections import deque
from dataclasses import dataclass

import pytest
from helpers import FakeWorker, make_request, make_scheduler, output_alone, run_step

from minivllm.config import ConfigError, EngineConfig
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.messages import ModelRunnerOutput


def started(scheduler, *requests):
    """Requests whose prompts are in the cache; each has one output token."""
    for request in requests:
        scheduler.add_request(request)
    run_step(scheduler, {request.request_id: [90] for request in requests})
    return requests


class TestHowManyTokens:
    @pytest.mark.parametrize(("threshold", "n"), [(0, 60), (1, 1), (59, 59), (60, 60), (61, 60), (100, 60)])
    def test_a_threshold_cuts_only_what_is_longer_and_zero_is_none(self, threshold, n):
        scheduler = make_scheduler(max_model_len=128, long_prefill_token_threshold=threshold)
        assert scheduler.num_new_tokens(make_request("a", 100), num_computed=40, budget=100) == n

    @pytest.mark.parametrize(
        ("threshold", "budget", "max_model_len", "n"),
        [(20, 30, 128, 20), (30, 20, 128, 20), (30, 40, 61, 20), (30, 40, 128, 30), (0, 0, 128, 0)],
    )
    def test_the_smallest_of_all_limits_counts(self, threshold, budget, max_model_len, n):
        scheduler = make_scheduler(max_model_len=max_model_len, long_prefill_token_threshold=threshold)
        assert scheduler.num_new_tokens(make_request("a", 100), num_computed=40, budget=budget) == n

    def test_drafts_kept_for_a_request_in_prefill_would_be_verified_with_the_rest_of_its_prompt(self):
        """80 tokens, 50 computed, three drafts: n = 33 and s = 3. That is why they are dropped on arrival."""
        scheduler = make_scheduler(max_model_len=128, max_num_batched_tokens=50)
        request = make_request("a", 80)
        scheduler.add_request(request)
        run_step(scheduler, {}, drafts={"a": [5, 6, 7]})
        assert (request.num_tokens, request.num_computed_tokens, request.spec_token_ids) == (80, 50, [])
        request.spec_token_ids = [5, 6, 7]
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 33}
        assert output.scheduled_spec_decode_tokens == {"a": [5, 6, 7]}

    @pytest.mark.parametrize(
        ("budget", "drafts"), [(2, None), (3, None), (4, [5]), (5, [5, 6]), (6, [5, 6, 7]), (9, [5, 6, 7])]
    )
    def test_the_last_chunk_reaches_as_many_drafts_as_it_goes_beyond_the_newest_token(self, budget, drafts):
        """100 tokens, 97 computed: s = -1, 0, 1, 2, 3, 3."""
        scheduler = make_scheduler(max_model_len=128, max_num_batched_tokens=97)
        request = make_request("a", 100)
        scheduler.add_request(request)
        run_step(scheduler, {})
        request.spec_token_ids, scheduler.max_num_batched_tokens = [5, 6, 7], budget
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": min(budget, 6)}
        assert output.scheduled_spec_decode_tokens.get("a") == drafts

    @pytest.mark.parametrize(("budget", "s"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
    def test_placeholders_stand_before_the_drafts(self, budget, s):
        """num_tokens 10, computed 10, ph 1, k 3: n = min(10 + 3 + 1 - 10, budget), s = n + 10 - 10 - 1."""
        scheduler = make_scheduler(async_scheduling=True, num_speculative_tokens=3)
        request = make_request("a", 10)
        scheduler.add_request(request)
        scheduler.schedule()
        scheduler.max_num_batched_tokens = budget
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": s + 1}
        assert output.scheduled_spec_decode_tokens.get("a", []) == [-1] * s
        assert (request.num_tokens, request.num_computed_tokens) == (10, 11 + s)
        assert request.num_output_placeholders == 1 + 1 + s and request.spec_token_ids == [-1, -1, -1]


class TestWhoseTurn:
    def test_a_request_without_anything_to_compute_is_passed_over_and_those_behind_it_are_not(self):
        scheduler = make_scheduler(pipeline_parallel_size=3)
        a, *_ = started(scheduler, *(make_request(name, 4) for name in "abc"))
        assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
        assert scheduler.num_new_tokens(a, a.num_computed_tokens, 64) == 0
        scheduler.pipeline_parallel_size = 1
        assert scheduler.schedule().num_scheduled_tokens == {"b": 1, "c": 1}

    def test_less_than_nothing_to_compute_is_passed_over_as_well(self):
        scheduler = make_scheduler()
        a, _ = started(scheduler, make_request("a", 4), make_request("b", 4))
        a.spec_token_ids, scheduler.max_num_batched_tokens = [5, 6, 7], 4
        assert scheduler.schedule().num_scheduled_tokens == {"a": 4}
        assert scheduler.num_new_tokens(a, a.num_computed_tokens, 64) == -3
        assert scheduler.schedule().num_scheduled_tokens == {"b": 1}

    def test_who_finds_the_budget_spent_keeps_its_place_and_its_blocks(self):
        scheduler = make_scheduler(max_num_batched_tokens=9, long_prefill_token_threshold=5)
        a, b = make_request("a", [1] * 20), make_request("b", [2] * 4)
        for request in (a, b):
            scheduler.add_request(request)
        assert run_step(scheduler, {"b": [7]}).num_scheduled_tokens == {"a": 5, "b": 4}
        scheduler.long_prefill_token_threshold = 0
        assert run_step(scheduler, {}).num_scheduled_tokens == {"a": 9}
        assert scheduler.running == [a, b] and len(scheduler.kv_cache_manager.block_ids(b)) == 1
        assert run_step(scheduler, {"a": [7], "b": [7]}).num_scheduled_tokens == {"a": 6, "b": 1}

    def test_who_does_not_fit_stays_at_the_head_until_it_does(self):
        scheduler = make_scheduler(num_blocks=8, max_model_len=32)
        started(scheduler, make_request("a", [1] * 20, max_tokens=4))
        scheduler.add_request(make_request("big", [9] * 20))
        scheduler.add_request(make_request("small", [8]))
        for _ in range(3):  # 2 or 3 blocks are free, big needs 5
            assert run_step(scheduler, {"a": [7]}).num_scheduled_tokens == {"a": 1}
            assert [request.request_id for request in scheduler.waiting] == ["big", "small"]
        assert list(scheduler.schedule().num_scheduled_tokens.items()) == [("big", 20), ("small", 1)]

    def test_chunks_on_their_way_bring_no_token_that_an_end_could_be_certain_of(self):
        """Two chunks of 4 and max_tokens 2: one token is certain after the second chunk, two after one more step."""
        scheduler = make_scheduler(async_scheduling=True, long_prefill_token_threshold=4)
        scheduler.add_request(make_request("a", 8, max_tokens=2))
        assert [scheduler.schedule().num_scheduled_tokens for _ in range(4)] == [{"a": 4}, {"a": 4}, {"a": 1}, {}]

    @pytest.mark.parametrize(("num_stages", "sizes"), [(1, [32, 0] * 4), (2, [16] * 8)])
    def test_all_decodes_at_once_leave_every_other_batch_of_two_empty(self, num_stages, sizes):
        """Two batches are in flight: a new one is made before the older one's results are booked."""
        scheduler = make_scheduler(
            max_num_seqs=32, num_blocks=256, max_num_batched_tokens=256, pipeline_parallel_size=num_stages
        )
        started(scheduler, *(make_request(str(index), [index] * 4, max_tokens=40) for index in range(32)))
        in_flight, seen = deque([scheduler.schedule()]), []
        while len(seen) < 8:
            in_flight.append(scheduler.schedule())
            message = in_flight.popleft()
            seen.append(len(message.num_scheduled_tokens))
            scheduler.update_from_output(
                message, ModelRunnerOutput({name: [7] for name in message.num_scheduled_tokens})
            )
        assert seen == sizes


@dataclass
class ConfigWithDrafts(EngineConfig):
    """The settings of an engine that speculates, which none does yet."""

    num_speculative_tokens: int = 0


class TestTheDoor:
    @pytest.mark.parametrize(("num_drafts", "needed"), [(0, 8), (1, 16), (4, 40)])
    def test_a_step_has_room_for_a_token_and_all_drafts_of_everybody(self, num_drafts, needed):
        settings = {"max_num_seqs": 8, "num_speculative_tokens": num_drafts}
        assert ConfigWithDrafts("m", max_num_batched_tokens=needed, **settings).max_num_seqs == 8
        with pytest.raises(
            ConfigError, match=rf"\({needed - 1}\) is smaller .* raise it to {needed}, or lower .* to 7$"
        ):
            ConfigWithDrafts("m", max_num_batched_tokens=needed - 1, **settings)

    @pytest.mark.parametrize("num_prompt_tokens", [1, 2, 8, 15])
    @pytest.mark.parametrize("num_lookahead", [0, 3])
    def test_a_lone_request_runs_to_its_end_in_the_smallest_pool(self, num_prompt_tokens, num_lookahead):
        scheduler = make_scheduler(num_blocks=4, max_model_len=16, num_lookahead_tokens=num_lookahead)
        request = make_request("a", num_prompt_tokens, max_tokens=16)
        scheduler.add_request(request)
        worker = FakeWorker(4, 4)
        while scheduler.num_unfinished_requests:
            output = scheduler.schedule()
            scheduler.update_from_output(output, worker.execute_model(output))
        assert request.num_tokens == 16 and request.num_preemptions == 0
        assert (request.output_token_ids, "length") == output_alone(request, 16)


class TestBlocks:
    @pytest.mark.parametrize(("num_lookahead", "num_blocks"), [(0, 1), (3, 2), (5, 3)])
    def test_a_proposer_with_a_cache_finds_its_slots_allocated_and_one_without_takes_none(
        self, num_lookahead, num_blocks
    ):
        """k slots for a draft model or an MTP layer, none for n-grams: a prompt of 4 in blocks of 4."""
        scheduler = make_scheduler(num_lookahead_tokens=num_lookahead)
        scheduler.add_request(make_request("a", 4))
        (new,) = scheduler.schedule().scheduled_new_reqs
        assert len(new.block_ids) == num_blocks

    def test_slots_ahead_can_cost_somebody_its_blocks(self):
        counts = {}
        for num_lookahead in (0, 3):
            scheduler = make_scheduler(num_blocks=4, max_model_len=16, num_lookahead_tokens=num_lookahead)
            started(scheduler, make_request("a", [1] * 4), make_request("b", [2] * 4))
            counts[num_lookahead] = [len(run_step(scheduler, {"a": [7], "b": [7]}).preempted_req_ids) for _ in range(2)]
        assert counts == {0: [0, 0], 3: [0, 1]}, "the sixth token of a with three slots ahead begins a third block"

    @pytest.mark.parametrize(
        ("num_hits", "n", "lookahead", "max_model_len", "num_new"),
        [
            (0, 9, 0, 32, 3),  # ceil(9 / 4)
            (2, 1, 0, 32, 1),  # ceil((8 + 1) / 4) - 2
            (2, 5, 0, 32, 2),  # ceil((8 + 5) / 4) - 2
            (2, 1, 3, 32, 1),  # ceil((8 + 1 + 3) / 4) - 2
            (2, 1, 4, 32, 2),  # ceil((8 + 1 + 4) / 4) - 2
            (2, 5, 9, 32, 4),  # ceil((8 + 5 + 9) / 4) - 2
            (2, 5, 9, 14, 2),  # ceil(min(8 + 5 + 9, 14) / 4) - 2
        ],
    )
    @pytest.mark.parametrize("is_held", [True, False])
    def test_as_many_blocks_are_needed_as_the_formula_says(
        self, num_hits, n, lookahead, max_model_len, num_new, is_held
    ):
        """Hits that nobody holds sit in the free queue: they need their places there, too."""
        num_free_needed = num_new + (0 if is_held else num_hits)
        for num_free in (num_free_needed - 1, num_free_needed):
            kv = KVCacheManager(16, 4, max_model_len)
            before = make_request("before", 9)
            kv.allocate(before, 9)
            if not is_held:
                kv.free(before)
            kv.block_pool.allocate(kv.block_pool.num_free_blocks - num_free)  # from the front: hits are at the end
            request = make_request("a", [*range(1, 9), *range(50, 70)])
            hits = kv.find_computed_blocks(request)[:num_hits]
            added = kv.allocate(request, n, hits, lookahead)
            if num_free < num_free_needed:
                assert added is None
            else:
                assert len(added) == num_hits + num_new and kv.block_pool.num_free_blocks == 0

    @pytest.mark.parametrize(
        ("num_tokens", "drop_last", "num_hit", "num_computed_now"),
        [(8, False, 4, 4), (8, True, 0, 8), (9, False, 8, 1), (9, True, 4, 5)],
    )
    def test_a_prompt_that_is_all_in_the_cache_computes_its_rest(
        self, num_tokens, drop_last, num_hit, num_computed_now
    ):
        """Blocks of 4: of 8 tokens 4 are taken over and of 9 tokens 8; with an MTP layer one block fewer."""
        scheduler = make_scheduler(drop_last_hit_block=drop_last)
        started(scheduler, make_request("before", num_tokens))
        request = make_request("a", num_tokens)
        scheduler.add_request(request)
        output = scheduler.schedule()
        (new,) = output.scheduled_new_reqs
        assert (new.num_computed_tokens, output.num_scheduled_tokens["a"]) == (num_hit, num_computed_now)
        assert request.num_cached_tokens == num_hit

    def test_who_wants_prompt_logprobs_computes_all_again_after_a_preemption(self):
        scheduler = make_scheduler()
        (request,) = started(scheduler, make_request("a", 9, prompt_logprobs=0))
        scheduler.preempt(request)
        output = scheduler.schedule()
        assert output.scheduled_cached_reqs.num_computed_tokens == [0]
        assert output.num_scheduled_tokens == {"a": 10}
