"""What students write for set 2 when it goes wrong, and what the checker must tell them."""

import math
from collections import deque

from minivllm.exercises.ps02_prefix import digest, root


def take_new_blocks_alone(num_computed, num_new, num_lookahead, max_model_len, num_owned, hit_ref_counts, block_size):
    """Forgets that idle hits leave the free queue."""
    num_slots = min(num_computed + num_new + num_lookahead, max_model_len)
    return max(0, -(-num_slots // block_size) - num_owned - len(hit_ref_counts))


def take_all_hits(num_computed, num_new, num_lookahead, max_model_len, num_owned, hit_ref_counts, block_size):
    """Counts hits that others hold."""
    num_slots = min(num_computed + num_new + num_lookahead, max_model_len)
    return max(len(hit_ref_counts), -(-num_slots // block_size) - num_owned)


def take_beyond_the_limit(num_computed, num_new, num_lookahead, max_model_len, num_owned, hit_ref_counts, block_size):
    """Right, until drafts reach past the longest request."""
    num_slots = num_computed + num_new + num_lookahead
    return max(0, -(-num_slots // block_size) - num_owned - len(hit_ref_counts)) + hit_ref_counts.count(0)


def take_without_lookahead(num_computed, num_new, num_lookahead, max_model_len, num_owned, hit_ref_counts, block_size):
    """Leaves the drafts without slots."""
    num_slots = min(num_computed + num_new, max_model_len)
    return max(0, -(-num_slots // block_size) - num_owned - len(hit_ref_counts)) + hit_ref_counts.count(0)


def take_below_zero(num_computed, num_new, num_lookahead, max_model_len, num_owned, hit_ref_counts, block_size):
    """Gives spare blocks back."""
    num_slots = min(num_computed + num_new + num_lookahead, max_model_len)
    return -(-num_slots // block_size) - num_owned - len(hit_ref_counts) + hit_ref_counts.count(0)


def take_rounded_down(num_computed, num_new, num_lookahead, max_model_len, num_owned, hit_ref_counts, block_size):
    """Loses the partly filled block."""
    num_slots = min(num_computed + num_new + num_lookahead, max_model_len)
    return max(0, num_slots // block_size - num_owned - len(hit_ref_counts)) + hit_ref_counts.count(0)


def take_hits_twice(num_computed, num_new, num_lookahead, max_model_len, num_owned, hit_ref_counts, block_size):
    """Adds the tokens of the hits to a count that has them."""
    num_slots = num_computed + len(hit_ref_counts) * block_size + num_new + num_lookahead
    num_blocks = math.ceil(min(num_slots, max_model_len) / block_size)
    return max(0, num_blocks - num_owned - len(hit_ref_counts)) + hit_ref_counts.count(0)


def names_without_parent(token_ids, block_size, salt):
    """Each block by itself."""
    full = len(token_ids) // block_size
    return [digest(root(salt), token_ids[i * block_size : (i + 1) * block_size]) for i in range(full)]


def names_of_the_tail_too(token_ids, block_size, salt):
    """Names a block that is not full."""
    names, parent = [], root(salt)
    for start in range(0, len(token_ids), block_size):
        parent = digest(parent, token_ids[start : start + block_size])
        names.append(parent)
    return names


def names_without_salt(token_ids, block_size, salt):
    """Right as long as nobody has a salt."""
    names, parent = [], root(None)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = digest(parent, token_ids[start : start + block_size])
        names.append(parent)
    return names


def names_salted_if_true(token_ids, block_size, salt):
    """Takes an empty salt for none."""
    names, parent = [], root(salt or None)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = digest(parent, token_ids[start : start + block_size])
        names.append(parent)
    return names


def names_of_whole_prefixes(token_ids, block_size, salt):
    """Hashes everything again for each block."""
    full = len(token_ids) // block_size
    return [digest(root(salt), token_ids[: (i + 1) * block_size]) for i in range(full)]


def names_with_the_first_as_parent(token_ids, block_size, salt):
    """The parent never moves on."""
    names = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        names.append(digest(names[0] if names else root(salt), token_ids[start : start + block_size]))
    return names


def names_in_hex(token_ids, block_size, salt):
    """Text for bytes."""
    names, parent = [], root(salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = digest(parent, token_ids[start : start + block_size])
        names.append(parent.hex())
    return names


def prefix_with_holes(names, num_tokens, block_size, cached):
    """Walks on after a miss."""
    return [cached[name][0] for name in names[: (num_tokens - 1) // block_size] if name in cached]


def prefix_of_all_tokens(names, num_tokens, block_size, cached):
    """Leaves nothing to compute when everything is cached."""
    hits = []
    for name in names:
        if name not in cached:
            break
        hits.append(cached[name][0])
    return hits


def prefix_without_its_last_block(names, num_tokens, block_size, cached):
    """Drops a block always, to be sure."""
    hits = []
    for name in names[: (num_tokens - 1) // block_size]:
        if name not in cached:
            break
        hits.append(cached[name][0])
    return hits[:-1]


def prefix_of_lists(names, num_tokens, block_size, cached):
    """Takes all blocks of a name for one."""
    hits = []
    for name in names[: (num_tokens - 1) // block_size]:
        if name not in cached:
            break
        hits.append(cached[name])
    return hits


def prefix_without_looking(names, num_tokens, block_size, cached):
    """Expects every name in the map."""
    return [cached[name][0] for name in names[: (num_tokens - 1) // block_size]]


def order_head_first(num_blocks, events):
    """Gives a table back in its own order."""
    queue = list(range(num_blocks))
    for kind, what, *rest in events:
        if kind == "take":
            queue = queue[what:]
        elif kind == "hit":
            queue.remove(what)
        else:
            queue = what[rest[0] :] + queue + what[: rest[0]]
    return queue


def order_without_a_front(num_blocks, events):
    """Everything that comes back goes to the back."""
    queue = list(range(num_blocks))
    for kind, what, *_ in events:
        if kind == "take":
            queue = queue[what:]
        elif kind == "hit":
            queue.remove(what)
        else:
            queue += what[::-1]
    return queue


def order_by_a_search(num_blocks, events):
    """Right, and slow: a list is searched for every hit."""
    queue = deque(range(num_blocks))
    for kind, what, *rest in events:
        if kind == "take":
            for _ in range(what):
                queue.popleft()
        elif kind == "hit":
            queue.remove(what)
        else:
            for i in reversed(range(len(what))):
                if i < rest[0]:
                    queue.append(what[i])
                else:
                    queue.appendleft(what[i])
    return list(queue)


def order_from_the_back(num_blocks, events):
    """A stack: what came back last is handed out first."""
    queue = list(range(num_blocks))
    for kind, what, *rest in events:
        if kind == "take":
            queue = queue[: len(queue) - what]
        elif kind == "hit":
            queue.remove(what)
        else:
            queue = what[rest[0] :] + queue + what[: rest[0]][::-1]
    return queue


def order_deaf_to_hits(num_blocks, events):
    """A hit block stays in the queue."""
    queue = list(range(num_blocks))
    for kind, what, *rest in events:
        if kind == "take":
            queue = queue[what:]
        elif kind == "free":
            queue = what[rest[0] :] + queue + what[: rest[0]][::-1]
    return queue


def allocate_new_first(free, ref_counts, hits, num_new):
    """The exhibit itself."""
    if num_new > len(free):
        return [], list(free), list(ref_counts)
    table = hits + free[:num_new]
    rest = [block for block in free if block not in table]
    return table, rest, [count + table.count(block) for block, count in enumerate(ref_counts)]


def allocate_checked_but_new_first(free, ref_counts, hits, num_new):
    """Counts right, and still takes new blocks before the hits are out of the queue."""
    idle = [block for block in hits if ref_counts[block] == 0]
    if num_new + len(idle) > len(free):
        return [], list(free), list(ref_counts)
    table = hits + free[:num_new]
    rest = [block for block in free if block not in table]
    return table, rest, [count + table.count(block) for block, count in enumerate(ref_counts)]


def allocate_unchecked_hits(free, ref_counts, hits, num_new):
    """The right order without the check: the pool runs dry half way."""
    rest = [block for block in free if block not in hits]
    if num_new > len(free):
        return [], list(free), list(ref_counts)
    table, rest = hits + rest[:num_new], rest[num_new:]
    return table, rest, [count + (block in table) for block, count in enumerate(ref_counts)]


def allocate_counting_all_hits(free, ref_counts, hits, num_new):
    """Makes a request wait for blocks that others hold for it."""
    if num_new + len(hits) > len(free):
        return [], list(free), list(ref_counts)
    rest = [block for block in free if block not in hits]
    table, rest = hits + rest[:num_new], rest[num_new:]
    return table, rest, [count + (block in table) for block, count in enumerate(ref_counts)]


def allocate_touching_first(free, ref_counts, hits, num_new):
    """Takes the hits out of the queue, then finds that the rest is too little, and leaves it at that."""
    rest = [block for block in free if block not in hits]
    if num_new > len(rest):
        return [], rest, list(ref_counts)
    table, rest = hits + rest[:num_new], rest[num_new:]
    return table, rest, [count + (block in table) for block, count in enumerate(ref_counts)]


def allocate_leaving_hits_free(free, ref_counts, hits, num_new):
    """The hits stay in the queue, for the next one to take."""
    idle = [block for block in hits if ref_counts[block] == 0]
    if num_new + len(idle) > len(free):
        return [], list(free), list(ref_counts)
    new = [block for block in free if block not in idle][:num_new]
    rest = [block for block in free if block not in new]
    return hits + new, rest, [count + (block in hits + new) for block, count in enumerate(ref_counts)]


def hand_out_with_a_stale_map(free, names, cached, num_blocks):
    """The exhibit itself."""
    blocks, rest = free[:num_blocks], free[num_blocks:]
    new_names = [None if block in blocks else name for block, name in enumerate(names)]
    return blocks, rest, new_names, cached


def hand_out_forgetting_all_of_a_name(free, names, cached, num_blocks):
    """Deletes the entry of the map, with every block in it."""
    blocks, rest = free[:num_blocks], free[num_blocks:]
    gone = {names[block] for block in blocks}
    new_names = [None if block in blocks else name for block, name in enumerate(names)]
    return blocks, rest, new_names, {name: ids for name, ids in cached.items() if name not in gone}


def hand_out_leaving_empty_entries(free, names, cached, num_blocks):
    """A name that leads nowhere is still in the map."""
    blocks, rest = free[:num_blocks], free[num_blocks:]
    new_names = [None if block in blocks else name for block, name in enumerate(names)]
    left = {name: [block for block in ids if block not in blocks] for name, ids in cached.items()}
    return blocks, rest, new_names, left


def hand_out_with_stale_names(free, names, cached, num_blocks):
    """The map is right, the blocks' own names are not."""
    blocks, rest = free[:num_blocks], free[num_blocks:]
    left = {name: [block for block in ids if block not in blocks] for name, ids in cached.items()}
    return blocks, rest, list(names), {name: ids for name, ids in left.items() if ids}


def hand_out_from_a_shallow_copy(free, names, cached, num_blocks):
    """Copies the map, but not the lists in it."""
    blocks, rest = free[:num_blocks], free[num_blocks:]
    new_names, left = list(names), dict(cached)
    for block in blocks:
        if new_names[block] is not None:
            left[new_names[block]].remove(block)
            new_names[block] = None
    return blocks, rest, new_names, {name: ids for name, ids in left.items() if ids}


def hand_out_forgetting_everything(free, names, cached, num_blocks):
    """Empties the whole map."""
    blocks, rest = free[:num_blocks], free[num_blocks:]
    return blocks, rest, [None if block in blocks else name for block, name in enumerate(names)], {}


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps02.blocks_to_take": [
        (take_beyond_the_limit, "no table grows beyond max_model_len = 32"),
        (take_new_blocks_alone, "a hit that nobody holds sits in the free queue"),
        (take_all_hits, "one that somebody holds (ref count above 0) is not in the free queue"),
        (take_without_lookahead, "7 draft slots must be there before the step"),
        (take_below_zero, "a count cannot be negative"),
        (take_rounded_down, "a block that is only partly filled is a whole block taken"),
        (take_hits_twice, "num_computed has their tokens, and the table has their blocks"),
    ],
    "ps02.block_names": [
        (names_without_salt, "made without the salt, so that requests with other salts would share the block"),
        (names_salted_if_true, "made without the salt"),
        (names_without_parent, "so that the same block after another beginning has the same name"),
        (names_of_the_tail_too, "6 tokens fill 1 block of 4; the last 2 tokens are no full block"),
        (names_of_whole_prefixes, "the parent's name stands for those before it"),
        (names_with_the_first_as_parent, "the parent is the name just before"),
        (names_in_hex, "the list holds a str"),
    ],
    "ps02.cached_prefix": [
        (prefix_with_holes, "the walk ends at the first miss, table entry 1 (b'B')"),
        (prefix_of_all_tokens, "2 hits of 4 are 8 of 8 tokens: one must be left to compute"),
        (prefix_without_its_last_block, "block 2 carries the name of table entry 1"),
        (prefix_of_lists, "the list holds a list ([5]); a hit is the id of one block"),
        (prefix_without_looking, "KeyError: b'C'"),
    ],
    "ps02.free_order": [
        (order_by_a_search, "the order is right, but the queue was searched: 4,022 comparisons for 8 hits"),
        (order_head_first, "block 2 stands behind block 0 in its table"),
        (order_without_a_front, "block 2 has no name, nobody can ever find it"),
        (order_from_the_back, "block 0 was handed out and is not free; blocks are taken from the front"),
        (order_deaf_to_hits, "block 3 was hit and is held by a request"),
    ],
    "ps02.allocate": [
        (allocate_checked_but_new_first, "block 1 is a hit and was handed out as a new block, too"),
        (allocate_new_first, "the request must wait; now block 1 stands twice in the table"),
        (allocate_unchecked_hits, "3 new blocks and 2 idle hits leave the free queue, which has 4"),
        (allocate_counting_all_hits, "the request is served"),
        (allocate_touching_first, "a request that must wait changes nothing: free stays [3, 2, 1, 0]"),
        (allocate_leaving_hits_free, "in the table and still in the free queue"),
    ],
    "ps02.hand_out": [
        (hand_out_forgetting_all_of_a_name, "one entry of the name goes, not all"),
        (hand_out_with_a_stale_map, "the map still leads to it under b'B'"),
        (hand_out_leaving_empty_entries, "the empty entry goes, or a lookup takes it for a hit"),
        (hand_out_with_stale_names, "its name is None, not b'B'"),
        (hand_out_from_a_shallow_copy, "it changed its input cached"),
        (hand_out_forgetting_everything, "block 0 keeps its text, but is not found under b'A' any more"),
    ],
}
