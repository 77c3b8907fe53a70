"""What students write for set 0 when it goes wrong, and what the checker must tell them."""

import math


def slots_of_positions_alone(block_table, start, num_tokens, block_size):
    """Takes a position for a slot."""
    return list(range(start, start + num_tokens))


def slots_from_the_beginning(block_table, start, num_tokens, block_size):
    """Forgets where the range begins."""
    return [block_table[p // block_size] * block_size + p % block_size for p in range(num_tokens)]


def slots_run_on_from_the_first(block_table, start, num_tokens, block_size):
    """Looks the table up once and counts on past the end of the block."""
    first = block_table[start // block_size] * block_size + start % block_size
    return list(range(first, first + num_tokens))


def slots_with_swapped_parts(block_table, start, num_tokens, block_size):
    """Divides where it should take the remainder, and the other way round."""
    return [
        block_table[p % block_size % len(block_table)] * block_size + p // block_size
        for p in range(start, start + num_tokens)
    ]


def slots_as_a_generator(block_table, start, num_tokens, block_size):
    """Forgets the brackets of the list."""
    return (block_table[p // block_size] * block_size + p % block_size for p in range(start, start + num_tokens))


def slots_that_eat_the_table(block_table, start, num_tokens, block_size):
    """Takes blocks off the caller's own table."""
    del block_table[: start // block_size]
    offset = start % block_size
    return [block_table[p // block_size] * block_size + p % block_size for p in range(offset, offset + num_tokens)]


def slots_of_at_least_one_token(block_table, start, num_tokens, block_size):
    """Begins with the first token, also when there is none."""
    slots, p = [], start
    while True:
        slots.append(block_table[p // block_size] * block_size + p % block_size)
        p += 1
        if p >= start + num_tokens:
            return slots


def blocks_rounded_down(num_tokens, num_owned, block_size):
    """Leaves the last, partly filled block out."""
    return max(0, num_tokens // block_size - num_owned)


def blocks_plus_one(num_tokens, num_owned, block_size):
    """Rounds up by adding one, which is one too many when the last block is exactly full."""
    return max(0, num_tokens // block_size + 1 - num_owned)


def blocks_below_zero(num_tokens, num_owned, block_size):
    """Asks for a negative number when drafts were rejected."""
    return math.ceil(num_tokens / block_size) - num_owned


def blocks_in_all(num_tokens, num_owned, block_size):
    """Counts the blocks of the request, not the missing ones."""
    return math.ceil(num_tokens / block_size)


def blocks_as_a_fraction(num_tokens, num_owned, block_size):
    """Divides without rounding."""
    return max(0, num_tokens / block_size - num_owned)


def blocks_without_return(num_tokens, num_owned, block_size):
    """Computes the answer and keeps it."""
    max(0, math.ceil(num_tokens / block_size) - num_owned)


def mask_with_corner_top_left(num_computed, q_len, k_len):
    """The exhibit itself: rows taken for positions."""
    import torch

    return torch.ones(q_len, k_len, dtype=torch.bool).tril()


def mask_with_corner_bottom_right(num_computed, q_len, k_len):
    """Right without padding; with it, every query sees too far."""
    import torch

    return torch.ones(q_len, k_len, dtype=torch.bool).tril(diagonal=k_len - q_len)


def mask_of_strictly_earlier_keys(num_computed, q_len, k_len):
    """A token does not see itself."""
    import torch

    return torch.arange(k_len)[None, :] < torch.arange(num_computed, num_computed + q_len)[:, None]


def mask_of_what_is_hidden(num_computed, q_len, k_len):
    """True where the query may not look."""
    import torch

    return torch.arange(k_len)[None, :] > torch.arange(num_computed, num_computed + q_len)[:, None]


def mask_to_be_added(num_computed, q_len, k_len):
    """0 and -inf, to be added to the scores."""
    import torch

    hidden = torch.arange(k_len)[None, :] > torch.arange(num_computed, num_computed + q_len)[:, None]
    return torch.zeros(q_len, k_len).masked_fill(hidden, -torch.inf)


def mask_of_the_whole_square(num_computed, q_len, k_len):
    """One row for each key, cached ones included."""
    import torch

    return torch.ones(k_len, k_len, dtype=torch.bool).tril()


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps00.slot_mapping": [
        (slots_of_positions_alone, "slot 0 lies in block 0, which this request does not own"),
        (slots_from_the_beginning, "the range begins at `start`, in the middle of a block"),
        (
            slots_run_on_from_the_first,
            "the token at position 4 belongs in slot 8 (table entry 1 is block 2, offset 0)",
        ),
        (slots_with_swapped_parts, "the token at position 1 belongs in slot 29"),
        (slots_as_a_generator, "the answer is a generator, not a list of ints"),
        (slots_that_eat_the_table, "it changed its input block_table to [9]"),
        (slots_of_at_least_one_token, "0 tokens, but 1 slot: each token has exactly one"),
    ],
    "ps00.blocks_needed": [
        (blocks_rounded_down, "a block that is only partly filled is a whole block taken"),
        (blocks_plus_one, "the last block is exactly full, so no further one is begun"),
        (blocks_below_zero, "a count cannot be negative"),
        (blocks_in_all, "34 tokens fill 3 blocks of 16, and the request owns 2"),
        (blocks_as_a_fraction, "the answer is a float (2.5)"),
        (blocks_without_return, "is the `return` missing?"),
    ],
    "ps00.chunk_mask": [
        (mask_with_corner_top_left, "query 0 (position 4) does not see key 1, which is in its past"),
        (mask_with_corner_bottom_right, "query 0 (position 2) sees key 3, which lies in its future"),
        (mask_of_strictly_earlier_keys, "query 0 (position 0) does not see key 0, which is its own"),
        (mask_of_what_is_hidden, "True must mean that the query may see the key"),
        (mask_to_be_added, "the dtype is torch.float32, not torch.bool"),
        (mask_of_the_whole_square, "the shape is [7, 7], not [q_len, k_len] = [3, 7]"),
    ],
}
