"""What students write for set 3 when it goes wrong, and what the checker must tell them."""

import torch


def step_without_alpha(s, v, m, l, acc):
    """The bug of this kind of kernel: adds new terms to old ones under another maximum."""
    m_new = torch.maximum(m, s.amax(dim=1))
    p = torch.exp(s - m_new[:, None])
    return m_new, l + p.sum(dim=1), acc + p @ v


def step_that_forgets_acc(s, v, m, l, acc):
    """Puts the denominator right, and not the numerator."""
    m_new = torch.maximum(m, s.amax(dim=1))
    p = torch.exp(s - m_new[:, None])
    return m_new, l * torch.exp(m - m_new) + p.sum(dim=1), acc + p @ v


def step_with_alpha_upside_down(s, v, m, l, acc):
    """exp(m' - m) instead of exp(m - m')."""
    m_new = torch.maximum(m, s.amax(dim=1))
    p, alpha = torch.exp(s - m_new[:, None]), torch.exp(m_new - m)
    return m_new, l * alpha + p.sum(dim=1), acc * alpha[:, None] + p @ v


def step_with_the_tiles_own_maximum(s, v, m, l, acc):
    """Takes the maximum of the tile for that of the row."""
    m_new = s.amax(dim=1)
    p, alpha = torch.exp(s - m_new[:, None]), torch.exp(m - m_new)
    return m_new, l * alpha + p.sum(dim=1), acc * alpha[:, None] + p @ v


def step_without_a_guard(s, v, m, l, acc):
    """Right until a row has seen no key."""
    m_new = torch.maximum(m, s.amax(dim=1))
    p, alpha = torch.exp(s - m_new[:, None]), torch.exp(m - m_new)
    return m_new, l * alpha + p.sum(dim=1), acc * alpha[:, None] + p @ v


def step_in_place(s, v, m, l, acc):
    """Writes into the caller's accumulator."""
    m_new = torch.maximum(m, s.amax(dim=1))
    p, alpha = torch.exp(s - m_new[:, None]), torch.exp(m - m_new)
    return m_new, l * alpha + p.sum(dim=1), acc.mul_(alpha[:, None]).add_(p @ v)


def step_that_returns_the_output(s, v, m, l, acc):
    """Divides too early, and returns that alone."""
    m_new = torch.maximum(m, s.amax(dim=1))
    p, alpha = torch.exp(s - m_new[:, None]), torch.exp(m - m_new)
    return (acc * alpha[:, None] + p @ v) / (l * alpha + p.sum(dim=1))[:, None]


def ranges_from_the_top_left(first, block_m, block_n, s_q, s_k):
    """Takes row i for position i."""
    last = min(first + block_m, s_q) - 1
    return (first + 1) // block_n * block_n, min(last + 1, s_k)


def ranges_full_by_the_last_row(first, block_m, block_n, s_q, s_k):
    """Calls a tile full if the last row sees it."""
    last = min(first + block_m, s_q) - 1
    end = max(0, last + s_k - s_q + 1)
    return end // block_n * block_n, end


def ranges_without_own_key(first, block_m, block_n, s_q, s_k):
    """A row does not see itself."""
    last = min(first + block_m, s_q) - 1
    return max(0, first + s_k - s_q) // block_n * block_n, max(0, last + s_k - s_q)


def ranges_below_zero(first, block_m, block_n, s_q, s_k):
    """Right until rows come before every key."""
    last = min(first + block_m, s_q) - 1
    return (first + s_k - s_q + 1) // block_n * block_n, last + s_k - s_q + 1


def ranges_with_a_border_inside_a_tile(first, block_m, block_n, s_q, s_k):
    """Does not round to whole tiles."""
    last = min(first + block_m, s_q) - 1
    return max(0, first + s_k - s_q + 1), max(0, last + s_k - s_q + 1)


def ranges_that_mask_everything(first, block_m, block_n, s_q, s_k):
    """Right, but every tile pays for a mask."""
    last = min(first + block_m, s_q) - 1
    return 0, max(0, last + s_k - s_q + 1)


def ranges_of_rows_that_do_not_exist(first, block_m, block_n, s_q, s_k):
    """Forgets that the last tile of queries may be short."""
    return max(0, first + s_k - s_q + 1) // block_n * block_n, max(0, first + block_m + s_k - s_q)


def merge_as_it_was_found(out_a, lse_a, out_b, lse_b):
    """The exhibit itself: -inf - -inf."""
    largest = torch.maximum(lse_a, lse_b)
    a, b = torch.exp(lse_a - largest), torch.exp(lse_b - largest)
    return (a[:, None] * out_a + b[:, None] * out_b) / (a + b)[:, None], largest + torch.log(a + b)


def merge_that_averages(out_a, lse_a, out_b, lse_b):
    """Weights both parts alike."""
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


def merge_that_adds_logs(out_a, lse_a, out_b, lse_b):
    """Adds the logarithms, not what they are logarithms of."""
    w = torch.softmax(torch.stack([lse_a, lse_b]), dim=0)
    return w[0][:, None] * out_a + w[1][:, None] * out_b, lse_a + lse_b


def merge_that_multiplies_by_zero(out_a, lse_a, out_b, lse_b):
    """Guards the difference, and reads buffers that nobody wrote."""
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.exp(lse_a - safe)[:, None] * out_a + torch.exp(lse_b - safe)[:, None] * out_b, lse


def merge_without_subtracting(out_a, lse_a, out_b, lse_b):
    """exp of the lse itself, with a floor against division by zero."""
    a, b = torch.exp(lse_a), torch.exp(lse_b)
    total = (a + b).clamp(min=1e-30)
    out = (torch.where(a > 0, a, 0)[:, None] * out_a.nan_to_num() + b[:, None] * out_b.nan_to_num()) / total[:, None]
    return out, torch.log(a + b)


def merge_that_hides_nan(out_a, lse_a, out_b, lse_b):
    """Lets the NaN arise in both results, and wipes it away in one."""
    largest = torch.maximum(lse_a, lse_b)
    a, b = torch.exp(lse_a - largest), torch.exp(lse_b - largest)
    out = (a[:, None] * out_a + b[:, None] * out_b) / (a + b)[:, None]
    return out.nan_to_num(0.0), largest + torch.log(a + b)


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps03.online_step": [
        (step_without_alpha, "l of row 0 was not put right: its old part still stands under the maximum 0.693147"),
        (step_that_forgets_acc, "acc of row 0 was not put right"),
        (step_with_alpha_upside_down, "l is NaN in row 0, whose maximum goes from -inf to 0.693147"),
        (step_with_the_tiles_own_maximum, "the maximum of row 0 fell from 1.38629 to 0.693147"),
        (step_without_a_guard, "row 0 has seen no key yet: expected m = -inf, l = 0 and zeros in acc, but l is NaN"),
        (step_in_place, "it changed its input acc"),
        (step_that_returns_the_output, "the answer is a Tensor, not the tuple (m, l, acc)"),
    ],
    "ps03.tile_ranges": [
        (ranges_from_the_top_left, "the last row, 1, stands at key 9 and still sees key 9; end is 2"),
        (ranges_full_by_the_last_row, "row 0 sees keys up to 0 only, so the tile that ends with key 3 needs the mask"),
        (ranges_without_own_key, "the last row, 3, stands at key 3 and still sees key 3; end is 3"),
        (ranges_below_zero, "rows that come before every key see none of them, and both borders are 0"),
        (ranges_with_a_border_inside_a_tile, "full_end is 1, in the middle of a tile of 4 keys"),
        (ranges_that_mask_everything, "every row sees the tile 0 .. 3 entirely: it needs no mask"),
        (ranges_of_rows_that_do_not_exist, "end is 12, but there are only 10 keys"),
    ],
    "ps03.merge": [
        (merge_as_it_was_found, "row 1 has no visible key in either part: expected zeros, got NaN"),
        (merge_that_averages, "out in row 0, column 0 should be 7.0000 and is 6.0000 (lse_a = 0, lse_b = 1.099)"),
        (merge_that_adds_logs, "lse in row 0 should be 0.6931 and is 0.0000"),
        (merge_that_multiplies_by_zero, "row 0 has no key in part b, so out_b was never written and must not be used"),
        (merge_without_subtracting, "(lse_a = 500, lse_b = 500)"),
        (merge_that_hides_nan, "row 1 has no visible key in either part: expected lse = -inf, got NaN"),
    ],
}
