"""Block by block: who holds what, who is evicted first, and what a prefix lookup finds."""

import pytest
from helpers import make_request, make_scheduler, run_step

from minivllm.engine.block_pool import BlockPool, FreeBlockQueue, KVCacheBlock
from minivllm.engine.kv_cache import BlockTable, KVCacheManager


def manager(num_blocks=8, block_size=4, max_model_len=32, enable_prefix_caching=True) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, max_model_len, enable_prefix_caching)


def free_order(kv: KVCacheManager) -> list[int]:
    return [block.block_id for block in kv.block_pool.free_queue]


def snapshot(kv: KVCacheManager):
    """Everything that an operation could change."""
    pool = kv.block_pool
    return (
        free_order(kv),
        [(block.ref_count, block.block_hash) for block in pool.blocks],
        {block_hash: list(blocks) for block_hash, blocks in pool.blocks_of_hash.items()},
        {req_id: ([b.block_id for b in table.blocks], table.num_named) for req_id, table in kv._tables.items()},
    )


def hold(kv: KVCacheManager, name: str, prompt):
    """A request whose whole prompt is in the cache; returns it with its hits."""
    request = make_request(name, prompt)
    hits = kv.find_computed_blocks(request)
    assert kv.allocate(request, request.num_tokens - len(hits) * kv.block_size, hits) is not None
    request.num_computed_tokens = request.num_tokens
    kv.check_invariants()
    return request


class TestFreeBlockQueue:
    def test_blocks_leave_in_the_order_in_which_they_came(self):
        blocks = [KVCacheBlock(i) for i in range(4)]
        queue = FreeBlockQueue(blocks)
        assert [queue.popleft() for _ in range(4)] == blocks
        with pytest.raises(IndexError, match="the free queue is empty"):
            queue.popleft()

    def test_a_block_can_be_taken_out_of_the_middle_and_come_back_at_either_end(self):
        blocks = [KVCacheBlock(i) for i in range(4)]
        queue = FreeBlockQueue(blocks)
        queue.remove(blocks[2])
        assert [block.block_id for block in queue] == [0, 1, 3] and queue.num_free == 3
        queue.appendleft(blocks[2])
        assert [block.block_id for block in queue] == [2, 0, 1, 3]
        queue.remove(blocks[3])
        queue.append(blocks[3])
        assert [block.block_id for block in queue] == [2, 0, 1, 3] and queue.num_free == 4

    def test_the_first_the_last_and_the_only_block_can_be_taken_out(self):
        blocks = [KVCacheBlock(i) for i in range(3)]
        queue = FreeBlockQueue(blocks)
        for block in (blocks[0], blocks[2], blocks[1]):
            queue.remove(block)
        assert list(queue) == [] and queue.num_free == 0
        queue.append(blocks[1])
        assert queue.popleft() is blocks[1]


class TestAllocate:
    @pytest.mark.parametrize(
        ("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (31, 8), (32, 8)]
    )
    def test_a_request_gets_as_many_blocks_as_its_tokens_need(self, num_tokens, num_blocks):
        kv = manager()
        request = make_request("a", num_tokens)
        assert kv.allocate(request, num_tokens) == list(range(num_blocks))
        assert kv.block_ids(request) == list(range(num_blocks))
        assert kv.usage == num_blocks / 8
        kv.check_invariants()
        kv.free(request)
        assert kv.usage == 0.0 and kv.block_ids(request) == []
        kv.check_invariants()

    def test_no_new_tokens_need_no_block(self):
        kv = manager()
        assert kv.allocate(make_request("a", 4), 0) == []
        assert kv.usage == 0.0
        kv.check_invariants()

    def test_a_decode_needs_a_block_only_at_a_block_border(self):
        kv = manager()
        request = make_request("a", 3)
        added = [kv.allocate(request, 3)]
        request.num_computed_tokens = 3
        for token in range(6):
            request.append_output_token(token, 32)
            added.append(kv.allocate(request, 1))
            request.num_computed_tokens += 1
            kv.check_invariants()
        assert added == [[0], [], [1], [], [], [], [2]]

    def test_slots_of_rejected_drafts_are_used_again_before_new_ones(self):
        kv = manager()
        request = make_request("a", 4)
        kv.allocate(request, 4)
        request.num_computed_tokens = 4
        request.append_output_token(9, 32)
        assert kv.allocate(request, 6) == [1, 2]  # one token and five drafts, all of them rejected
        request.num_computed_tokens = 5
        request.append_output_token(9, 32)
        assert kv.allocate(request, 1) == []
        kv.check_invariants()

    def test_lookahead_slots_are_allocated_but_never_beyond_max_model_len(self):
        kv = manager(max_model_len=10)
        request = make_request("a", 4)
        assert kv.allocate(request, 4, num_lookahead_tokens=3) == [0, 1]
        request.num_computed_tokens = 4
        assert kv.allocate(request, 5, num_lookahead_tokens=30) == [2]

    def test_the_full_pool_can_be_handed_out_and_not_one_block_more(self):
        kv = manager()
        request, other = make_request("a", 32), make_request("b", 1)
        assert len(kv.allocate(request, 32)) == 8
        assert kv.usage == 1.0
        assert kv.allocate(other, 1) is None
        kv.check_invariants()

    def test_a_refused_allocation_changes_nothing(self):
        kv = manager(num_blocks=4)
        hold(kv, "a", 9)
        shared = make_request("b", [*range(1, 9), *range(100, 110)])
        hits = kv.find_computed_blocks(shared)
        assert len(hits) == 2
        before = snapshot(kv)
        assert kv.allocate(shared, 10, hits) is None
        assert snapshot(kv) == before
        assert kv.block_ids(shared) == []

    def test_a_refused_extension_keeps_what_the_request_holds(self):
        kv = manager(num_blocks=2, max_model_len=8)
        request, _ = hold(kv, "a", 4), hold(kv, "b", [7, 7, 7])
        request.append_output_token(9, 8)
        before = snapshot(kv)
        assert kv.allocate(request, 1) is None
        assert snapshot(kv) == before
        assert kv.block_ids(request) == [0]

    def test_idle_hits_are_not_free_space_at_the_same_time(self):
        kv = manager(num_blocks=4, max_model_len=16)
        kv.free(hold(kv, "a", 9))
        hold(kv, "b", [7, 7, 7])
        request = make_request("c", [*range(1, 9), *range(50, 58)])
        hits = kv.find_computed_blocks(request)
        assert len(hits) == 2 and kv.block_pool.num_free_blocks == 3
        # Two more blocks are needed. Three are free, but two of those are the hits themselves.
        before = snapshot(kv)
        assert kv.allocate(request, 8, hits) is None
        assert snapshot(kv) == before
        assert kv.allocate(request, 4, hits) is not None
        kv.check_invariants()

    def test_hits_that_others_hold_cost_no_free_block(self):
        kv = manager(num_blocks=4, max_model_len=16)
        hold(kv, "a", 9)
        request = make_request("b", 9)
        hits = kv.find_computed_blocks(request)
        assert kv.block_pool.num_free_blocks == 1
        assert kv.allocate(request, 1, hits) is not None
        assert kv.block_ids(request)[:2] == [0, 1] and kv.usage == 1.0
        kv.check_invariants()

    def test_a_hit_is_never_evicted_to_make_room_for_the_rest_of_its_own_request(self):
        kv = manager(num_blocks=3, max_model_len=12)
        kv.free(hold(kv, "a", 8))
        request = make_request("b", [1, 2, 3, 4, 7, 7, 7, 7, 7])
        hits = kv.find_computed_blocks(request)
        block_ids = kv.allocate(request, 5, hits)
        assert block_ids[0] == hits[0].block_id and len(set(block_ids)) == 3
        kv.check_invariants()


class TestFree:
    def test_the_tail_of_a_prefix_is_evicted_first(self):
        kv = manager()
        kv.free(hold(kv, "a", 12))
        assert free_order(kv) == [3, 4, 5, 6, 7, 2, 1, 0]

    def test_blocks_without_a_hash_go_to_the_front(self):
        kv = manager()
        kv.free(hold(kv, "a", 10))
        assert free_order(kv) == [2, 3, 4, 5, 6, 7, 1, 0]

    def test_without_prefix_caching_blocks_are_reused_at_once_and_have_no_names(self):
        kv = manager(enable_prefix_caching=False)
        kv.free(hold(kv, "a", 12))
        assert free_order(kv) == list(range(8))
        assert kv.block_pool.blocks_of_hash == {}
        assert kv.find_computed_blocks(make_request("b", 12)) == []

    def test_a_shared_block_stays_until_its_last_holder_leaves(self):
        kv = manager()
        first, second = hold(kv, "a", 9), hold(kv, "b", 9)
        assert kv.block_ids(first)[:2] == kv.block_ids(second)[:2] == [0, 1]
        assert kv.block_pool.blocks[0].ref_count == 2
        kv.free(first)
        kv.check_invariants()
        assert kv.block_pool.blocks[0].ref_count == 1 and 0 not in free_order(kv)
        kv.free(second)
        kv.check_invariants()
        assert kv.usage == 0.0

    def test_freeing_twice_or_a_stranger_is_harmless(self):
        kv = manager()
        request = hold(kv, "a", 9)
        kv.free(request)
        before = snapshot(kv)
        kv.free(request)
        kv.free(make_request("stranger", 3))
        assert snapshot(kv) == before


class TestPrefixLookup:
    @pytest.mark.parametrize(
        ("num_tokens", "num_hits"), [(1, 0), (3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (13, 3), (16, 3)]
    )
    def test_a_hit_is_whole_blocks_and_leaves_at_least_one_token_to_compute(self, num_tokens, num_hits):
        kv = manager()
        hold(kv, "a", 20)
        assert [b.block_id for b in kv.find_computed_blocks(make_request("b", num_tokens))] == list(range(num_hits))

    def test_lookup_takes_nothing(self):
        kv = manager()
        kv.free(hold(kv, "a", 9))
        before = snapshot(kv)
        assert len(kv.find_computed_blocks(make_request("b", 9))) == 2
        assert snapshot(kv) == before

    def test_the_walk_stops_at_the_first_miss(self):
        kv = manager()
        hold(kv, "a", 13)
        kv.block_pool.forget_name(kv.block_pool.blocks[1])
        assert [b.block_id for b in kv.find_computed_blocks(make_request("b", 13))] == [0]

    def test_the_same_block_after_another_beginning_is_a_miss(self):
        kv = manager()
        hold(kv, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
        assert kv.find_computed_blocks(make_request("b", [5, 6, 7, 8, 9])) == []
        assert kv.find_computed_blocks(make_request("b", [0, 2, 3, 4, 5, 6, 7, 8, 9])) == []

    def test_requests_with_different_salts_share_nothing(self):
        kv = manager()
        hold(kv, "a", 9)
        assert kv.find_computed_blocks(make_request("b", 9, salt="tenant")) == []

    def test_a_request_that_wants_prompt_logprobs_takes_no_hit_but_gives_them(self):
        kv = manager()
        curious = make_request("a", 9, prompt_logprobs=0)
        assert kv.allocate(curious, 9) is not None
        assert len(kv.find_computed_blocks(make_request("b", 9))) == 2
        assert kv.find_computed_blocks(make_request("c", 9, prompt_logprobs=0)) == []

    def test_outputs_are_found_like_prompts(self):
        kv = manager()
        request = hold(kv, "a", 3)
        for token in (4, 5):
            request.append_output_token(token, 32)
            kv.allocate(request, 1)
            request.num_computed_tokens += 1
        assert len(kv.find_computed_blocks(make_request("b", [1, 2, 3, 4, 9]))) == 1

    def test_drafts_never_enter_a_name(self):
        kv = manager()
        request = hold(kv, "a", 3)
        request.append_output_token(4, 32)
        request.spec_token_ids = [5, 6, 7, 8]
        kv.allocate(request, 5)
        request.num_computed_tokens = 4
        assert [block.block_hash is not None for block in kv.block_pool.blocks[:2]] == [True, False]
        for token in (5, 6, 9, 9):
            request.append_output_token(token, 32)
        kv.allocate(request, 4)
        assert len(kv.find_computed_blocks(make_request("b", [1, 2, 3, 4, 5, 6, 7, 8, 0]))) == 1
        assert len(kv.find_computed_blocks(make_request("c", [1, 2, 3, 4, 5, 6, 9, 9, 0]))) == 2
        kv.check_invariants()

    def test_only_blocks_that_the_step_fills_are_named(self):
        kv = manager()
        request = make_request("a", 12)
        kv.allocate(request, 7)
        assert len(kv.find_computed_blocks(make_request("b", 12))) == 1

    def test_a_block_that_is_handed_out_again_loses_its_name(self):
        kv = manager(num_blocks=3, max_model_len=12)
        kv.free(hold(kv, "a", 9))
        hold(kv, "b", [7, 7, 7, 7, 7])  # takes the unnamed block and the tail of a's prefix
        assert [b.block_id for b in kv.find_computed_blocks(make_request("c", 9))] == [0]
        hold(kv, "d", [8])
        assert kv.find_computed_blocks(make_request("e", 9)) == []

    def test_one_name_may_belong_to_several_blocks_and_loses_only_the_one_that_goes(self):
        kv = manager(num_blocks=4, max_model_len=16)
        first, second = make_request("a", 4), make_request("b", 4)
        kv.allocate(first, 4)
        kv.allocate(second, 4)  # a prompt of one block: nothing to take over, the same name
        block_hash = first.block_hashes(1, 4)[0]
        assert list(kv.block_pool.blocks_of_hash[block_hash]) == [0, 1]
        kv.check_invariants()
        kv.free(first)
        hold(kv, "c", [7] * 9)  # the free blocks 2 and 3, then block 0
        assert list(kv.block_pool.blocks_of_hash[block_hash]) == [1]
        assert [b.block_id for b in kv.find_computed_blocks(make_request("d", 5))] == [1]
        kv.check_invariants()


class TestLookahead:
    @pytest.mark.parametrize(("num_lookahead", "num_blocks"), [(0, 1), (1, 2), (4, 2), (5, 3)])
    def test_slots_for_what_a_proposer_caches_are_there_before_it_runs(self, num_lookahead, num_blocks):
        kv = manager()
        request = make_request("a", 4)
        assert len(kv.allocate(request, 4, num_lookahead_tokens=num_lookahead)) == num_blocks
        kv.check_invariants()

    def test_slots_allocated_ahead_are_used_before_new_ones(self):
        kv = manager()
        request = make_request("a", 4)
        added = [kv.allocate(request, 4, num_lookahead_tokens=2)]
        for count in range(3):
            request.num_computed_tokens = 4 + count
            request.append_output_token(9, 32)
            added.append(kv.allocate(request, 1, num_lookahead_tokens=2))
        assert added == [[0, 1], [], [], [2]]

    def test_blocks_ahead_have_no_names(self):
        kv = manager()
        kv.allocate(make_request("a", 8), 8, num_lookahead_tokens=8)
        assert [block.block_hash is not None for block in kv.block_pool.blocks[:4]] == [True, True, False, False]

    def test_slots_ahead_may_be_what_does_not_fit(self):
        kv = manager(num_blocks=2, max_model_len=16)
        assert kv.allocate(make_request("a", 8), 8, num_lookahead_tokens=1) is None
        assert kv.allocate(make_request("a", 8), 8) == [0, 1]


class TestDropLastHitBlock:
    """An MTP layer's last slot of a block depends on a token that is not in the block's name."""

    @pytest.mark.parametrize(
        ("num_tokens", "plain", "with_mtp"), [(4, 0, 0), (5, 4, 0), (8, 4, 0), (9, 8, 4), (13, 12, 8)]
    )
    def test_one_more_block_is_computed_anew(self, num_tokens, plain, with_mtp):
        for drop, num_hit_tokens in ((False, plain), (True, with_mtp)):
            kv = KVCacheManager(8, 4, 32, drop_last_hit_block=drop)
            kv.free(hold(kv, "a", num_tokens))
            assert len(kv.find_computed_blocks(make_request("b", num_tokens))) * 4 == num_hit_tokens


class TestForgetLastNames:
    def test_names_of_the_last_allocation_go_and_older_ones_stay(self):
        kv = manager()
        request = make_request("a", 13)
        kv.allocate(request, 5)
        request.num_computed_tokens = 5
        before = snapshot(kv)[2:]
        kv.allocate(request, 8)
        assert len(kv.find_computed_blocks(make_request("b", 13))) == 3
        kv.forget_last_names(request)
        assert len(kv.find_computed_blocks(make_request("b", 13))) == 1
        assert snapshot(kv)[2] == before[0]
        kv.check_invariants()
        kv.free(request)
        kv.check_invariants()

    def test_an_allocation_that_named_nothing_takes_no_name_back(self):
        kv = manager()
        request = make_request("a", 9)
        for count in (8, 1):
            kv.allocate(request, count)
            request.num_computed_tokens += count
        kv.forget_last_names(request)
        assert len(kv.find_computed_blocks(make_request("b", 9))) == 2

    def test_another_block_of_the_same_name_keeps_it(self):
        kv = manager()
        first, second = make_request("a", 4), make_request("b", 4)
        kv.allocate(first, 4)
        kv.allocate(second, 4)
        kv.forget_last_names(second)
        assert [block.block_id for block in kv.find_computed_blocks(make_request("c", 5))] == [0]
        kv.check_invariants()


class TestHitsThatWereEvicted:
    def test_a_hit_that_was_evicted_since_the_lookup_is_refused_and_nothing_changes(self):
        kv = manager(num_blocks=3, max_model_len=12)
        kv.free(hold(kv, "a", 9))
        request = make_request("b", 9)
        hits = kv.find_computed_blocks(request)
        kv.free(hold(kv, "c", [7] * 5))  # takes the unnamed block and the second hit
        before = snapshot(kv)
        with pytest.raises(
            ValueError, match=f"block {hits[1].block_id} was evicted since it was looked up: look again"
        ):
            kv.allocate(request, 1, hits)
        assert snapshot(kv) == before
        assert kv.find_computed_blocks(request) == hits[:1]
        assert kv.allocate(request, 5, hits[:1]) is not None
        kv.check_invariants()


class TestResetPrefixCache:
    def test_all_names_are_forgotten_and_no_block_is_lost(self):
        kv = manager()
        kv.free(hold(kv, "a", 20))
        assert kv.reset_prefix_cache() is True
        assert kv.block_pool.blocks_of_hash == {} and kv.find_computed_blocks(make_request("b", 20)) == []
        kv.check_invariants()
        assert len(kv.allocate(make_request("c", 32), 32)) == 8

    def test_it_is_refused_while_a_request_holds_blocks(self):
        kv = manager()
        request = hold(kv, "a", 9)
        before = snapshot(kv)
        assert kv.reset_prefix_cache() is False and snapshot(kv) == before
        kv.free(request)
        assert kv.reset_prefix_cache() is True


class TestStatistics:
    def lookups(self, *requests, **options):
        """Statistics after each request has been admitted and has ended."""
        scheduler = make_scheduler(**options)
        for request in requests:
            scheduler.add_request(request)
            run_step(scheduler, {request.request_id: [1]})
            scheduler.abort([request.request_id])
        return scheduler.kv_cache_manager.prefix_cache_stats

    def test_tokens_looked_up_and_found_are_counted(self):
        stats = self.lookups(make_request("a", 9), make_request("b", 9), make_request("c", 11))
        assert (stats.requests, stats.queries, stats.hits) == (3, 29, 16)
        assert stats.hit_rate == 16 / 29
        stats.reset()
        assert (stats.requests, stats.queries, stats.hits, stats.hit_rate) == (0, 0, 0, 0.0)

    def test_who_does_not_look_up_does_not_count(self):
        assert self.lookups(make_request("a", 9, prompt_logprobs=0)).requests == 0
        assert self.lookups(make_request("a", 9), enable_prefix_caching=False).requests == 0

    def test_a_request_counts_once_however_often_it_tries_and_comes_back(self):
        scheduler = make_scheduler(num_blocks=4, max_model_len=16)
        first, second = make_request("a", 8), make_request("b", [9] * 12)
        for request in (first, second):
            scheduler.add_request(request)
        for _ in range(3):  # b does not fit beside a
            run_step(scheduler, {"a": [1]})
        scheduler.preempt(first)
        run_step(scheduler, {"a": [1]})
        stats = scheduler.kv_cache_manager.prefix_cache_stats
        assert first.num_preemptions == 1 and first.status.value == "running"
        assert (stats.requests, stats.queries, stats.hits) == (1, 8, 0)


def broken_ref_count(kv):
    kv.block_pool.blocks[0].ref_count += 1


def block_in_queue_while_held(kv):
    kv.block_pool.free_queue.append(kv.block_pool.blocks[0])


def block_lost(kv):
    kv.block_pool.free_queue.popleft()


def wrong_count_of_free_blocks(kv):
    kv.block_pool.free_queue.num_free -= 1


def name_forgotten_by_the_map(kv):
    kv.block_pool.blocks_of_hash.clear()


def name_forgotten_by_the_block(kv):
    kv.block_pool.blocks[0].block_hash = None


def name_of_another_block(kv):
    first, second = kv.block_pool.blocks[:2]
    first.block_hash, second.block_hash = second.block_hash, first.block_hash


def two_tables_with_an_unnamed_block(kv):
    block = kv._tables["a"].blocks[2]
    block.ref_count = 2
    kv._tables["thief"] = BlockTable([block])


def one_table_with_a_block_twice(kv):
    block = kv._tables["a"].blocks[0]
    block.ref_count = 2
    kv._tables["a"].blocks.append(block)
    kv._tables["a"].num_named = len(kv._tables["a"].blocks)


@pytest.mark.parametrize(
    "corrupt",
    [
        broken_ref_count,
        block_in_queue_while_held,
        block_lost,
        wrong_count_of_free_blocks,
        name_forgotten_by_the_map,
        name_forgotten_by_the_block,
        name_of_another_block,
        two_tables_with_an_unnamed_block,
        one_table_with_a_block_twice,
    ],
)
def test_check_invariants_sees_corruption(corrupt):
    kv = manager()
    hold(kv, "a", 9)
    kv.check_invariants()
    corrupt(kv)
    with pytest.raises(AssertionError):
        kv.check_invariants()


def test_a_pool_starts_with_all_blocks_free_and_unnamed():
    pool = BlockPool(3)
    assert pool.num_free_blocks == 3
    assert all(block.ref_count == 0 and block.block_hash is None for block in pool.blocks)
