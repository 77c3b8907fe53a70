"""Who owns which block of the paged KV cache.

The cache is cut into `num_blocks` blocks of `block_size` tokens. A request owns a *block table*: entry i is the
block that holds the K and V of its tokens i * block_size .. (i + 1) * block_size - 1. Blocks are handed out one by
one, so a request wastes less than one block, and any free block will do (PagedAttention, Kwon et al. 2023).

```
    0                      computed            + new tokens       + lookahead
    |--- prefix hits ---|--- own blocks ---|--- blocks added by allocate() ---|
    |------------- named: full, tokens known --------------|
```

Invariants (`check_invariants` recomputes them from the block tables):
  * free + used = total, and a block is in the free queue exactly if its reference count is 0;
  * a block's reference count is the number of tables that hold it;
  * a block in two tables is full and hashed;
  * the prefix map points only at blocks that carry that hash.
"""

from collections import Counter
from dataclasses import dataclass, field

from minivllm.engine.block_pool import BlockPool, KVCacheBlock
from minivllm.engine.request import Request


@dataclass
class PrefixCacheStats:
    """What the prefix cache was asked for and what it had, in tokens, since the last `reset`.

    Every request counts once, when it is first admitted. What it finds when it comes back after a preemption is
    mostly its own, and would make the cache look better than it is.
    """

    requests: int = 0
    queries: int = 0
    """Tokens of the requests that were looked up."""
    hits: int = 0
    """Tokens of them that were in the cache."""

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that were in the cache, 0 to 1."""
        return self.hits / self.queries if self.queries else 0.0

    def record(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        self.requests += 1
        self.queries += num_queried_tokens
        self.hits += num_hit_tokens

    def reset(self) -> None:
        self.requests = self.queries = self.hits = 0


@dataclass(eq=False, slots=True)
class BlockTable:
    """The blocks of one request; the first `num_named` of them carry their hashes."""

    blocks: list[KVCacheBlock] = field(default_factory=list)
    num_named: int = 0
    num_named_before: int = 0
    """How many were named before the last `allocate`: what `forget_last_names` goes back to."""


class KVCacheManager:
    """Block tables of all requests: look up a prefix, allocate for a step, free.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
        max_model_len: longest request in tokens; no table grows beyond it.
        enable_prefix_caching: name full blocks and look prompts up.
        drop_last_hit_block: compute the last block of every hit anew. The cache of an MTP layer needs it: its slot i
            holds (token i + 1, hidden state i), so that the last slot of a block depends on a token that is not part
            of the block's name.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        drop_last_hit_block: bool = False,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.drop_last_hit_block = drop_last_hit_block
        self.block_pool = BlockPool(num_blocks)
        self.prefix_cache_stats = PrefixCacheStats()
        self._tables: dict[str, BlockTable] = {}

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
        table = self._tables.get(request.request_id)
        return [block.block_id for block in table.blocks] if table else []

    def holds(self, request: Request) -> bool:
        """Whether the request has a block table: it is running."""
        return request.request_id in self._tables

    def looks_up(self, request: Request) -> bool:
        """Whether the prefix cache serves this request: one that wants prompt_logprobs needs all logits computed."""
        return self.enable_prefix_caching and not request.wants_prompt_logprobs

    def find_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest cached prefix of a request, in whole blocks; nothing is taken yet.

        At least one token is always left to compute, since the logits of the next token must come from somewhere.
        The hits may be evicted by the next `allocate`: hand them over before, or look again.
        """
        hits: list[KVCacheBlock] = []
        if not self.looks_up(request):
            return hits
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self.block_pool.find_cached(request.block_hash(index, self.block_size))
            if block is None:
                break
            hits.append(block)
        return hits[:-1] if self.drop_last_hit_block else hits

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

        Raises:
            ValueError: a hit was evicted since it was looked up, and holds other tokens now.
        """
        hits = computed_blocks or []
        table = self._tables.get(request.request_id) or BlockTable(num_named=len(hits))
        end = request.num_computed_tokens + len(hits) * self.block_size + num_new_tokens
        num_slots = min(end + num_lookahead_tokens, self.max_model_len)
        added: list[KVCacheBlock] | None = []
        # Most steps of most requests write into a block that is theirs already; rejected drafts leave some to spare.
        if hits or num_slots > len(table.blocks) * self.block_size:
            added = self._extend(request, table, hits, num_slots)
            if added is None:
                return None
        table.num_named_before = table.num_named
        if self.enable_prefix_caching:
            # Drafts may be rejected, and nobody knows yet what placeholders stand for: neither is part of a name.
            num_full = min(end, request.num_tokens) // self.block_size
            if num_full > table.num_named:
                self._name_blocks(request, table, num_full)
        return [block.block_id for block in added] if added else []

    def _extend(
        self, request: Request, table: BlockTable, hits: list[KVCacheBlock], num_slots: int
    ) -> list[KVCacheBlock] | None:
        """Take hits and new blocks until the table holds `num_slots` tokens; None if the pool cannot serve."""
        num_needed = max(0, -(-num_slots // self.block_size) - len(table.blocks) - len(hits))
        # A hit that nobody holds sits in the free queue too: it is not free space at the same time.
        num_idle_hits = sum(block.ref_count == 0 for block in hits)
        if num_needed + num_idle_hits > self.block_pool.num_free_blocks:
            return None
        for index, block in enumerate(hits):
            if block.block_hash != request.block_hash(index, self.block_size):
                raise ValueError(f"block {block.block_id} was evicted since it was looked up: look again")
        self.block_pool.touch(hits)
        added = hits + self.block_pool.allocate(num_needed)
        table.blocks += added
        self._tables[request.request_id] = table
        return added

    def _name_blocks(self, request: Request, table: BlockTable, num_full: int) -> None:
        """Name the blocks that the coming step fills, so that requests admitted in this very step can share them.

        This is safe because every layer stores K and V of all rows before any row attends.
        """
        for index in range(table.num_named, num_full):
            self.block_pool.name(table.blocks[index], request.block_hash(index, self.block_size))
        table.num_named = num_full

    def free(self, request: Request) -> None:
        """Give back all blocks of a request; a request without blocks is fine."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self.block_pool.free(reversed(table.blocks))

    def forget_last_names(self, request: Request) -> None:
        """Take back the names given by a request's last `allocate`: the step that was to fill the blocks won't."""
        table = self._tables[request.request_id]
        for block in table.blocks[table.num_named_before : table.num_named]:
            self.block_pool.forget_name(block)
        table.num_named = table.num_named_before

    def reset_prefix_cache(self) -> bool:
        """Forget all names, as after a change of the model's weights; True if that was done.

        While requests hold blocks it is refused and nothing changes: their own blocks would mix old and new.
        """
        if self.num_used_blocks:
            return False
        for block in self.block_pool.blocks:
            self.block_pool.forget_name(block)
        return True

    def check_invariants(self) -> None:
        """Recompute ownership from the block tables and compare; raises AssertionError with the culprit."""
        pool = self.block_pool
        holders = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        in_queue = Counter(block.block_id for block in pool.free_queue)
        assert in_queue.total() == len(in_queue) == pool.num_free_blocks, "free queue is corrupt"
        for block in pool.blocks:
            held = holders[block.block_id]
            assert block.ref_count == held, f"block {block.block_id}: ref count {block.ref_count}, held {held}x"
            assert (block.block_id in in_queue) == (held == 0), f"block {block.block_id}: free and held, or lost"
            assert held <= 1 or block.block_hash is not None, f"block {block.block_id}: shared but not hashed"
        named = {b.block_id: h for h, blocks in pool.blocks_of_hash.items() for b in blocks.values()}
        for block in pool.blocks:
            assert named.get(block.block_id) == block.block_hash, f"block {block.block_id}: stale hash"
        for request_id, table in self._tables.items():
            twice = [block_id for block_id, count in Counter(b.block_id for b in table.blocks).items() if count > 1]
            assert not twice, f"{request_id}: block {twice[0]} stands twice in its table"
            names = [block.block_hash is not None for block in table.blocks]
            assert names == [index < table.num_named for index in range(len(names))], f"{request_id}: names amiss"
