"""What students write for set 4 when it goes wrong, and what the checker must tell them."""

import torch


def tile_from_the_first_page_on(cache, block_table, start, block_n, seq_len):
    """Looks the table up once, and reads on into whoever lies behind."""
    first = int(block_table[start // cache.shape[1]]) * cache.shape[1] + start % cache.shape[1]
    return cache.flatten(0, 1)[first : first + block_n]


def tile_without_table(cache, block_table, start, block_n, seq_len):
    """Takes positions for slots."""
    return cache.flatten(0, 1)[start : start + block_n]


def tile_from_the_beginning(cache, block_table, start, block_n, seq_len):
    """Forgets where the tile begins."""
    position = torch.arange(block_n)
    return cache[block_table[position // cache.shape[1]].long(), position % cache.shape[1]]


def tile_of_whole_pages(cache, block_table, start, block_n, seq_len):
    """Right as long as the tile is full: no mask, so tails of pages and tables are read."""
    position = torch.arange(start, start + block_n)
    return cache[block_table[position // cache.shape[1]].long(), position % cache.shape[1]]


def tile_masked_after_the_load(cache, block_table, start, block_n, seq_len):
    """Multiplies what it should not have read by 0, and 0 x NaN is NaN."""
    position = torch.arange(start, start + block_n)
    entry = (position // cache.shape[1]).clamp(max=max(len(block_table) - 1, 0))
    rows = cache[block_table[entry].long() % cache.shape[0], position % cache.shape[1]]
    return rows * (position < seq_len)[:, None]


def tile_cut_short(cache, block_table, start, block_n, seq_len):
    """Returns only the rows that exist."""
    position = torch.arange(start, max(start, min(start + block_n, seq_len)))
    return cache[block_table[position // cache.shape[1]].long(), position % cache.shape[1]]


def tile_with_one_key_too_many(cache, block_table, start, block_n, seq_len):
    """<= where < was meant: the slot after the last key is read."""
    block_size = cache.shape[1]
    tile = cache.new_zeros(block_n, cache.shape[2])
    for i, position in enumerate(range(start, min(start + block_n, seq_len + 1))):
        if position // block_size < len(block_table):
            tile[i] = cache[block_table[position // block_size], position % block_size]
    return tile


def heads_every_nth(q, num_kv_heads):
    """Deals the heads out in turn, as if K/V head h served the heads h, h + Hkv, …"""
    s_q, num_heads, d = q.shape
    return q.view(s_q, num_heads // num_kv_heads, num_kv_heads, d).permute(2, 0, 1, 3).reshape(num_kv_heads, -1, d)


def heads_outside_tokens(q, num_kv_heads):
    """Right for one token; with several, rows of one token are torn apart."""
    s_q, num_heads, d = q.shape
    return q.transpose(0, 1).reshape(num_kv_heads, num_heads // num_kv_heads * s_q, d)


def rows_by_view_alone(q, num_kv_heads):
    """Renames the dimensions without moving anything."""
    s_q, num_heads, d = q.shape
    return q.reshape(num_kv_heads, s_q * (num_heads // num_kv_heads), d)


def tokens_in_front(q, num_kv_heads):
    """Leaves the K/V heads inside."""
    s_q, num_heads, d = q.shape
    return q.view(s_q, num_kv_heads, num_heads // num_kv_heads, d)


def mean_of_splits(outs, lses):
    """Every split counts the same."""
    return outs.mean(0), torch.logsumexp(lses, dim=0)


def splits_weighted_by_lse(outs, lses):
    """Takes the logarithm itself for a weight."""
    return (outs * lses[:, None]).sum(0) / lses.sum(), torch.logsumexp(lses, dim=0)


def sum_of_splits(outs, lses):
    """Adds the outputs as if they were numerators."""
    return outs.sum(0), torch.logsumexp(lses, dim=0)


def lse_of_the_largest(outs, lses):
    """Right weights, but the LSE of the best split for that of all."""
    return torch.softmax(lses, dim=0) @ outs, lses.max()


def empty_splits_by_softmax(outs, lses):
    """Right as long as no split is empty: 0 x NaN is NaN."""
    return torch.softmax(lses, dim=0) @ outs, torch.logsumexp(lses, dim=0)


def exp_without_maximum(outs, lses):
    """Overflows, or loses everything, in float32."""
    weights = torch.exp(lses)
    written = torch.where(weights[:, None] > 0, outs, 0.0)
    return weights @ written / weights.sum(), torch.log(weights.sum())


def out_without_lse(outs, lses):
    """Forgets the second result."""
    return torch.softmax(lses, dim=0) @ outs


def offsets_in_int32(pages, offsets, page_stride, slot_stride):
    """The exhibit itself."""
    return pages * page_stride + offsets * slot_stride


def offsets_widened_too_late(pages, offsets, page_stride, slot_stride):
    """Widens the result, when the damage is done."""
    return (pages * page_stride + offsets * slot_stride).long()


def offsets_modulo_2_32(pages, offsets, page_stride, slot_stride):
    """Reads the 32 bits as unsigned, which helps as far as 2^32."""
    return (pages * page_stride + offsets * slot_stride).long() % 2**32


def offsets_with_only_the_page_widened(pages, offsets, page_stride, slot_stride):
    """Widens one of the two products."""
    return pages.long() * page_stride + offsets * slot_stride


def offsets_in_float(pages, offsets, page_stride, slot_stride):
    """Escapes into float32."""
    return (pages.float() * page_stride + offsets.float() * slot_stride).long()


def offsets_left_in_float(pages, offsets, page_stride, slot_stride):
    """Escapes into float64 and stays there."""
    return pages.double() * page_stride + offsets.double() * slot_stride


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps04.load_tile": [
        (tile_of_whole_pages, "row 2 is position 10, and the request ends at 10: expected zeros, got [nan, nan]"),
        (
            tile_from_the_first_page_on,
            "row 4 is position 8, in table entry 2 (page 7) at offset 0: expected [70, 8], got [nan, nan]",
        ),
        (tile_without_table, "row 0 is position 0, in table entry 0 (page 5) at offset 0: expected [50, 0]"),
        (tile_from_the_beginning, "row 0 is position 4, in table entry 1 (page 2) at offset 0"),
        (tile_masked_after_the_load, "and the request ends at 10: expected zeros, got [nan, nan]"),
        (tile_cut_short, "the answer has the shape [2, 2], not [block_n, D] = [4, 2]"),
        (tile_with_one_key_too_many, "row 2 is position 10, and the request ends at 10"),
    ],
    "ps04.pack_queries": [
        (
            heads_outside_tokens,
            "row 1 of K/V head 0 is token 0, head 1 (group 2); got token 1, head 0",
        ),
        (heads_every_nth, "row 1 of K/V head 0 is token 0, head 1 (group 2); got token 0, head 2"),
        (rows_by_view_alone, "row 2 of K/V head 0 is token 1, head 0 (group 2); got token 0, head 2"),
        (tokens_in_front, "the answer has the shape [1, 2, 2, 2], not [Hkv, s_q * group, D] = [2, 2, 2]"),
    ],
    "ps04.merge_splits": [
        (empty_splits_by_softmax, "2 splits, 1 of them empty: the outputs weigh [1, 0], so out should be [1, 2]"),
        (mean_of_splits, "the outputs weigh [0.8808, 0.1192], so out should be [0.8808, 0.1192], got [0.5, 0.5]"),
        (splits_weighted_by_lse, "so out should be [0.5, 0.5], got [nan, nan]"),
        (sum_of_splits, "so out should be [0.5, 0.5], got [1, 1]"),
        (lse_of_the_largest, "lse should be 0.6931, got 0.0000"),
        (exp_without_maximum, "lse should be 200.3133, got inf"),
        (out_without_lse, "the answer is a Tensor, not the pair (out, lse)"),
    ],
    "ps04.key_offsets": [
        (offsets_modulo_2_32, "1 x 2^32 too low, a 32-bit number has run over"),
        (offsets_in_int32, "key 1 (page 131072, offset 0) begins at element 2147483648, got -2147483648"),
        (offsets_widened_too_late, "1 x 2^32 too low, a 32-bit number has run over"),
        (offsets_with_only_the_page_widened, "key 0 (page 1, offset 200) begins at element 6711934976"),
        (offsets_in_float, "key 0 (page 600001, offset 3) begins at element"),
        (offsets_left_in_float, "the dtype is torch.float64; an address is a whole number"),
    ],
}
