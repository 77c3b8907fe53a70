"""The blocks of the paged KV cache: which are free, in what order they are given out, and what each is named.

A full block is named by the hash of its tokens and of everything before them. While it keeps its name, another
request with the same beginning takes it over instead of computing it: the *prefix cache*. A block that nobody holds
keeps its name and waits in the free queue, oldest first, until it is needed for something else.

```
    free queue    [no name] ... [least recently freed] ... [most recently freed]
                      ^                                          ^
                  handed out next                    evicted last, found until then
```

Invariants:
  * a block is in the free queue exactly if its reference count is 0;
  * the map from names to blocks and the names that the blocks carry say the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


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

    def __iter__(self) -> Iterator[KVCacheBlock]:
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
            self.forget_name(block)
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

    def forget_name(self, block: KVCacheBlock) -> None:
        """Nobody finds this block any more; others of the same name stay. A block without a name is fine."""
        if block.block_hash is None:
            return
        blocks = self.blocks_of_hash[block.block_hash]
        del blocks[block.block_id]
        if not blocks:
            del self.blocks_of_hash[block.block_hash]
        block.block_hash = None
