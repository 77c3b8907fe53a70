"""What set 2 takes for right is what the engine does: on every input of its checks, and on random ones."""

import random
import subprocess
import sys
from collections import OrderedDict

import pytest
from classroom import read_notebook

from minivllm.engine.block_pool import BlockPool
from minivllm.engine.kv_cache import BlockTable, KVCacheManager
from minivllm.engine.request import Request
from minivllm.exercises import check, find
from minivllm.sampling_params import SamplingParams

LONGEST = 10**4


def make_request(token_ids: list[int], salt: str | None = None) -> Request:
    return Request("a", token_ids, SamplingParams(max_tokens=1, seed=0), cache_salt=salt)


def inputs_of(name: str, make_random) -> list[tuple]:
    """The inputs of an exercise's cases, and 200 random ones."""
    rng = random.Random(name)
    return [case.args for case in find(name).cases] + [make_random(rng) for _ in range(200)]


def arrange(pool: BlockPool, free: list[int], ref_counts: list[int]) -> None:
    """Put the pool's queue and its counts as they are given."""
    pool.allocate(pool.num_free_blocks)
    for block, count in zip(pool.blocks, ref_counts, strict=True):
        block.ref_count = count
    for block_id in free:
        pool.free_queue.append(pool.blocks[block_id])


def arrangement(pool: BlockPool) -> tuple[list[int], list[int]]:
    """(ids in the free queue, ref counts)."""
    return [block.block_id for block in pool.free_queue], [block.ref_count for block in pool.blocks]


def random_take(rng: random.Random) -> tuple:
    block_size = rng.randint(1, 5)
    refs = [rng.randint(0, 2) for _ in range(rng.randint(0, 3))]
    owned = 0 if refs else rng.randint(0, 4)
    num_computed = len(refs) * block_size or rng.randint(0, owned * block_size)
    num_new = rng.randint(0, 9)
    limit = rng.randint(max(1, num_computed + num_new), num_computed + num_new + 9)
    return num_computed, num_new, rng.randint(0, 9), limit, owned, refs, block_size


def test_blocks_to_take_is_what_leaves_the_engines_free_queue():
    for inputs in inputs_of("ps02.blocks_to_take", random_take):
        num_computed, num_new, num_lookahead, max_model_len, num_owned, hit_ref_counts, block_size = inputs
        manager = KVCacheManager(64, block_size, max_model_len)
        pool, request = manager.block_pool, make_request(list(range(max(num_computed + num_new, 1))))
        request.num_computed_tokens = num_computed - len(hit_ref_counts) * block_size
        hits = pool.allocate(len(hit_ref_counts))
        for index, block in enumerate(hits):
            pool.name(block, request.block_hash(index, block_size))
        pool.free(hits)
        for block, count in zip(hits, hit_ref_counts, strict=True):
            for _ in range(count):
                pool.touch([block])
        if num_owned:
            manager._tables["a"] = BlockTable(pool.allocate(num_owned))
        before = pool.num_free_blocks
        assert manager.allocate(request, num_new, hits, num_lookahead) is not None
        assert find("ps02.blocks_to_take").oracle(*inputs) == before - pool.num_free_blocks


def random_names(rng: random.Random) -> tuple:
    token_ids = [rng.randint(0, 2**17) for _ in range(rng.randint(0, 20))]
    return token_ids, rng.randint(1, 5), rng.choice([None, "", "tenant"])


def test_block_names_are_the_engines_block_hashes():
    for inputs in inputs_of("ps02.block_names", random_names):
        token_ids, block_size, salt = inputs
        hashes = make_request(token_ids, salt).block_hashes(len(token_ids) // block_size, block_size)
        assert find("ps02.block_names").oracle(*inputs) == hashes


def test_the_sheet_shows_the_names_that_there_are():
    sheet = read_notebook("source", "ps02_paged_kv_cache")
    for token_ids in ([1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8]):
        for name in find("ps02.block_names").oracle(token_ids, 4, None):
            assert any(f"`{name.hex()[:8]}…`" in cell.source for cell in sheet.cells)


def random_prefix(rng: random.Random) -> tuple:
    block_size, num_tokens = rng.randint(1, 4), rng.randint(1, 12)
    names = [bytes([65 + i]) for i in range(num_tokens // block_size)]
    ids = iter(rng.sample(range(40), 40))
    cached = {name: [next(ids) for _ in range(rng.randint(1, 3))] for name in names if rng.random() < 0.8}
    return names, num_tokens, block_size, cached


def test_a_cached_prefix_is_what_the_engines_lookup_finds():
    for inputs in inputs_of("ps02.cached_prefix", random_prefix):
        names, num_tokens, block_size, cached = inputs
        manager = KVCacheManager(40, block_size, LONGEST)
        request = make_request(list(range(num_tokens)))
        request._block_hashes = list(names)
        for name, ids in cached.items():
            for block_id in ids:
                manager.block_pool.name(manager.block_pool.blocks[block_id], name)
        found = manager.find_computed_blocks(request)
        assert find("ps02.cached_prefix").oracle(*inputs) == [block.block_id for block in found]


def random_events(rng: random.Random) -> tuple:
    num_blocks = rng.randint(1, 12)
    pool, events, tables = BlockPool(num_blocks), [], []
    for _ in range(rng.randint(0, 20)):
        kind = rng.choice(["take", "hit", "free"])
        if kind == "take":
            blocks = pool.allocate(rng.randint(0, pool.num_free_blocks))
            events.append(("take", len(blocks)))
        elif kind == "hit" and pool.num_free_blocks:
            blocks = [rng.choice(list(pool.free_queue))]
            pool.touch(blocks)
            events.append(("hit", blocks[0].block_id))
        elif kind == "free" and tables:
            blocks = tables.pop(rng.randrange(len(tables)))
            num_named = rng.randint(0, len(blocks))
            replay_free(pool, blocks, num_named)
            events.append(("free", [block.block_id for block in blocks], num_named))
            continue
        else:
            continue
        tables.append(blocks)
    return num_blocks, events


def replay_free(pool: BlockPool, blocks: list, num_named: int) -> None:
    """As `KVCacheManager.free` does, for a table whose first `num_named` blocks carry names."""
    for index, block in enumerate(blocks):
        block.block_hash = None
        if index < num_named:
            pool.name(block, b"%d" % block.block_id)
    pool.free(reversed(blocks))


def test_free_order_is_that_of_the_engines_free_queue():
    for inputs in inputs_of("ps02.free_order", random_events):
        num_blocks, events = inputs
        pool = BlockPool(num_blocks)
        for kind, what, *rest in events:
            if kind == "take":
                pool.allocate(what)
            elif kind == "hit":
                pool.touch([pool.blocks[what]])
            else:
                replay_free(pool, [pool.blocks[block_id] for block_id in what], *rest)
        assert find("ps02.free_order").oracle(*inputs) == arrangement(pool)[0]


def test_an_ordered_dict_is_a_linked_list_as_well():
    def free_order(num_blocks, events):
        queue = OrderedDict.fromkeys(range(num_blocks))
        for kind, what, *rest in events:
            if kind == "take":
                for _ in range(what):
                    queue.popitem(last=False)
            elif kind == "hit":
                del queue[what]
            else:
                for i in reversed(range(len(what))):
                    queue[what[i]] = None
                    queue.move_to_end(what[i], last=i < rest[0])
        return list(queue)

    check("ps02.free_order", free_order, hidden=True)


def random_allocation(rng: random.Random) -> tuple:
    num_blocks = rng.randint(1, 8)
    free = rng.sample(range(num_blocks), rng.randint(0, num_blocks))
    ref_counts = [0 if block in free else rng.randint(1, 3) for block in range(num_blocks)]
    hits = rng.sample(range(num_blocks), rng.randint(0, num_blocks))
    return free, ref_counts, hits, rng.randint(0, 4)


def test_allocate_is_what_the_engine_does_with_hits_and_new_blocks():
    for inputs in inputs_of("ps02.allocate", random_allocation):
        free, ref_counts, hits, num_new = inputs
        manager, request = KVCacheManager(len(ref_counts), 1, LONGEST), make_request(list(range(len(hits) + num_new)))
        pool = manager.block_pool
        arrange(pool, free, ref_counts)
        for index, block_id in enumerate(hits):
            pool.name(pool.blocks[block_id], request.block_hash(index, 1))
        served = manager.allocate(request, num_new, [pool.blocks[block_id] for block_id in hits]) is not None
        assert find("ps02.allocate").oracle(*inputs) == (manager.block_ids(request), *arrangement(pool))
        assert served or not manager.holds(request)


def random_names_and_queue(rng: random.Random) -> tuple:
    num_blocks = rng.randint(1, 8)
    names = [rng.choice([None, b"A", b"B", b"C"]) for _ in range(num_blocks)]
    cached: dict[bytes, list[int]] = {}
    for block, name in enumerate(names):
        if name is not None:
            cached.setdefault(name, []).append(block)
    free = rng.sample(range(num_blocks), rng.randint(0, num_blocks))
    return free, names, cached, rng.randint(0, len(free))


def test_hand_out_forgets_what_the_engine_forgets():
    for inputs in inputs_of("ps02.hand_out", random_names_and_queue):
        free, names, cached, num_blocks = inputs
        pool = BlockPool(len(names))
        arrange(pool, free, [0] * len(names))
        for name, ids in cached.items():
            for block_id in ids:
                pool.name(pool.blocks[block_id], name)
        blocks = [block.block_id for block in pool.allocate(num_blocks)]
        found = {name: list(of_name) for name, of_name in pool.blocks_of_hash.items()}
        left = (blocks, arrangement(pool)[0], [block.block_hash for block in pool.blocks], found)
        assert find("ps02.hand_out").oracle(*inputs) == left


def test_the_engines_invariants_notice_the_second_exhibit():
    manager = KVCacheManager(2, 4, LONGEST)
    request = make_request([1, 2, 3, 4])
    manager.allocate(request, 4)
    manager.free(request)
    manager.check_invariants()
    for block in manager.block_pool.blocks:
        block.block_hash = None  # as if handed out: the blocks forget their names, the map doesn't
    with pytest.raises(AssertionError, match="block 0: stale hash"):
        manager.check_invariants()


def test_the_set_is_checked_without_torch():
    script = """
import sys
from minivllm.exercises import check, exercises_of
for exercise in exercises_of("ps02"):
    check(exercise.name, exercise.oracle, hidden=True)
print("torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"
