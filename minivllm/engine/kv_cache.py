"""Who owns which block of the paged KV cache.

The cache is cut into `num_blocks` blocks of `block_size` tokens. A request owns a *block table*: entry i is the
block that holds the K and V of its tokens i * block_size .. (i + 1) * block_size - 1. Blocks are handed out one by
one, so a request wastes less than one block, and any free block will do (PagedAttention, Kwon et al. 2023).

A full block is named by the hash of its tokens and of everything before them. While it keeps its name, another
request with the same beginning takes it over instead of computing it: the *prefix cache*. A block that nobody holds
keeps its name and waits in the free queue, oldest first, until it is needed for something else.

Invariants (`check_invariants` recomputes them from the block tables):
  * free + used = total, and a block is in the free queue exactly if its reference count is 0;
  * a block's reference count is the number of tables that hold it;
  * a block in two tables is full and hashed;
  * the prefix map points only at blocks that carry that hash.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from minivllm.engine.request import Request


@dataclass(eq=False, slots=True)
class KVCacheBlock:
    """One block; `prev` and `next` link it into the free queue while nobody holds it."""

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    prev: "KVCacheBlock | None" = None
    next: "KVCacheBlock | None" = None


class FreeBlockQueue:
    """Free blocks, oldest first. Doubly linked, so that a prefix hit takes a block out of the middle in O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self.num_free = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        self._link(self._tail.prev, block)

    def appendleft(self, block: KVCacheBlock) -> None:
        self._link(self._head, block)

    def popleft(self) -> KVCacheBlock:
        block = self._head.next
        if block is self._tail:
            raise IndexError("the free queue is empty")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_free -= 1

    def __iter__(self):
        block = self._head.next
        while block is not self._tail:
            yield block
            block = block.next

    def _link(self, before: KVCacheBlock, block: KVCacheBlock) -> None:
        block.prev, block.next = before, before.next
        before.next.prev = block
        before.next = block
        self.num_free += 1


class BlockPool:
    """All blocks, the free queue, and the map from block hash to the blocks that carry it."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks)
        self.blocks_of_hash: dict[bytes, dict[int, KVCacheBlock]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out the oldest free blocks; whatever name they carried is gone."""
        blocks = [self.free_queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._forget_hash(block)
            block.ref_count = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more table holds these cached blocks."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_queue.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One table fewer holds these blocks; give them tail first, so that the tail of a prefix is evicted first.

        A block without a hash is of no use to anybody: it goes to the front of the queue and is reused first.
        """
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self.free_queue.appendleft(block)
                else:
                    self.free_queue.append(block)

    def find_cached(self, block_hash: bytes) -> KVCacheBlock | None:
        blocks = self.blocks_of_hash.get(block_hash)
        return next(iter(blocks.values())) if blocks else None

    def name(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Give a full block its hash; two blocks may carry the same one."""
        block.block_hash = block_hash
        self.blocks_of_hash.setdefault(block_hash, {})[block.block_id] = block

    def _forget_hash(self, block: KVCacheBlock) -> None:
        if block.block_hash is None:
            return
        blocks = self.blocks_of_hash[block.block_hash]
        del blocks[block.block_id]
        if not blocks:
            del self.blocks_of_hash[block.block_hash]
        block.block_hash = None


class KVCacheManager:
    """Block tables of all requests: look up a prefix, allocate for a step, free.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
        max_model_len: longest request in tokens; no table grows beyond it.
        enable_prefix_caching: name full blocks and look prompts up.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_model_len: int, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.block_pool = BlockPool(num_blocks)
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_hashed: dict[str, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.block_pool.blocks)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some request holds."""
        return self.num_blocks - self.block_pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the pool that some request holds, 0 to 1."""
        return self.num_used_blocks / self.num_blocks

    def block_ids(self, request: Request) -> list[int]:
        return [block.block_id for block in self._tables.get(request.request_id, [])]

    def find_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest cached prefix of a request, in whole blocks; nothing is taken yet.

        At least one token is always left to compute, since the logits of the next token must come from somewhere;
        and a request that wants prompt_logprobs needs the logits of every prompt token.
        """
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        hits: list[KVCacheBlock] = []
        for block_hash in request.block_hashes((request.num_tokens - 1) // self.block_size, self.block_size):
            block = self.block_pool.find_cached(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        computed_blocks: list[KVCacheBlock] | None = None,
        num_lookahead_tokens: int = 0,
    ) -> list[int] | None:
        """Make room for `num_new_tokens` after the computed ones (and for drafts that a proposer will cache).

        Args:
            computed_blocks: prefix hits to take over first; only for a request that holds no blocks.

        Returns:
            The ids of the blocks added to the request's table (hits included), or None if the pool cannot serve;
            then nothing has changed.
        """
        computed_blocks = computed_blocks or []
        table = self._tables.get(request.request_id) or []
        num_computed = request.num_computed_tokens + len(computed_blocks) * self.block_size
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        num_needed = max(0, -(-num_slots // self.block_size) - len(table) - len(computed_blocks))
        # A hit that nobody holds sits in the free queue too: it cannot be counted as free space at the same time.
        num_idle_hits = sum(block.ref_count == 0 for block in computed_blocks)
        if num_needed + num_idle_hits > self.block_pool.num_free_blocks:
            return None

        self.block_pool.touch(computed_blocks)
        added = computed_blocks + self.block_pool.allocate(num_needed)
        table.extend(added)
        self._tables[request.request_id] = table
        self._num_hashed.setdefault(request.request_id, len(computed_blocks))
        if self.enable_prefix_caching:
            self._name_full_blocks(request, table, min(num_computed + num_new_tokens, request.num_tokens))
        return [block.block_id for block in added]

    def free(self, request: Request) -> None:
        """Give back all blocks of a request; a request without blocks is fine."""
        self.block_pool.free(reversed(self._tables.pop(request.request_id, [])))
        self._num_hashed.pop(request.request_id, None)

    def _name_full_blocks(self, request: Request, table: list[KVCacheBlock], num_tokens: int) -> None:
        """Name the blocks that the coming step fills, so that requests admitted in this very step can share them.

        This is safe because every layer stores K and V of all rows before any row attends. Drafts may be rejected,
        so tokens past `request.num_tokens` are never part of a name.
        """
        first, num_full = self._num_hashed[request.request_id], num_tokens // self.block_size
        if num_full <= first:
            return
        hashes = request.block_hashes(num_full, self.block_size)
        for index in range(first, num_full):
            self.block_pool.name(table[index], hashes[index])
        self._num_hashed[request.request_id] = num_full

    def check_invariants(self) -> None:
        """Recompute ownership from the block tables and compare; raises AssertionError with the culprit."""
        holders = Counter(block.block_id for table in self._tables.values() for block in table)
        in_queue = Counter(block.block_id for block in self.block_pool.free_queue)
        assert in_queue.total() == len(in_queue) == self.block_pool.num_free_blocks, "free queue is corrupt"
        for block in self.block_pool.blocks:
            held = holders[block.block_id]
            assert block.ref_count == held, f"block {block.block_id}: ref count {block.ref_count}, held {held}x"
            assert (block.block_id in in_queue) == (held == 0), f"block {block.block_id}: free and held, or lost"
            assert held <= 1 or block.block_hash is not None, f"block {block.block_id}: shared but not hashed"
        named = {b.block_id: h for h, blocks in self.block_pool.blocks_of_hash.items() for b in blocks.values()}
        for block in self.block_pool.blocks:
            assert named.get(block.block_id) == block.block_hash, f"block {block.block_id}: stale hash"
