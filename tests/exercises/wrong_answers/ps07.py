"""What students write for set 7 when it goes wrong, and what the checker must tell them."""

import torch


def int8_without_clamp(x, scale):
    """Right as long as everything fits; beyond, a cast wraps around."""
    return (x / scale).round().nan_to_num(0.0).to(torch.int64).to(torch.int8)


def int8_without_round(x, scale):
    """A cast cuts towards zero."""
    return (x / scale).clamp(-127, 127).nan_to_num(0.0).to(torch.int8)


def int8_down_to_minus_128(x, scale):
    """Clamps to the whole range of the type."""
    return (x / scale).clamp(-128, 127).round().nan_to_num(0.0).to(torch.int8)


def int8_rounding_half_up(x, scale):
    """floor(x + 0.5) takes ties upwards."""
    return torch.floor((x / scale).clamp(-127, 127) + 0.5).nan_to_num(0.0).to(torch.int8)


def int8_times_scale(x, scale):
    """Multiplies where it should divide."""
    return (x * scale).clamp(-127, 127).round().nan_to_num(0.0).to(torch.int8)


def int8_left_in_float(x, scale):
    """Right numbers, in the wrong dtype."""
    return (x / scale).clamp(-127, 127).round().nan_to_num(0.0)


def scales_by_maximum(x, block, largest):
    """Forgets the sign: right as long as the largest magnitude is positive."""
    starts = range(0, x.shape[1], block)
    return torch.stack([x[:, s : s + block].float().amax(1) for s in starts], 1) / largest


def scales_of_whole_blocks(x, block, largest):
    """Rounds the number of blocks down."""
    whole = x.shape[1] // block
    return x[:, : whole * block].float().abs().view(len(x), whole, block).amax(2) / largest


def scales_a_token(x, block, largest):
    """One scale for the whole row, repeated."""
    blocks = -(-x.shape[1] // block)
    return (x.float().abs().amax(1, keepdim=True) / largest).repeat(1, blocks)


def scales_upside_down(x, block, largest):
    """The factor that x is multiplied with, not the one that q is."""
    starts = range(0, x.shape[1], block)
    return largest / torch.stack([x[:, s : s + block].float().abs().amax(1) for s in starts], 1)


def scales_in_the_inputs_dtype(x, block, largest):
    """Never leaves x's dtype."""
    starts = range(0, x.shape[1], block)
    return torch.stack([x[:, s : s + block].abs().amax(1) for s in starts], 1) / largest


def scales_widened_too_late(x, block, largest):
    """Divides in x's dtype, and widens the result."""
    return scales_in_the_inputs_dtype(x, block, largest).float()


def product_in_int8(a, b, sa, sb):
    """int8 times int8 stays int8."""
    return (a[:, None] * b[None]).sum(2, dtype=torch.int8).float() * sa * sb.T


def product_in_int16(a, b, sa, sb):
    """Widens, but not enough."""
    return (a.short()[:, None] * b.short()[None]).sum(2, dtype=torch.int16).float() * sa * sb.T


def product_with_scales_swapped(a, b, sa, sb):
    """sa across and sb down: an error of shape, or worse, none."""
    return (a.long() @ b.long().T).float() * sa.T * sb


def product_without_scale_of_b(a, b, sa, sb):
    """Forgets the weight's scales."""
    return (a.long() @ b.long().T).float() * sa


def product_left_in_whole_numbers(a, b, sa, sb):
    """Forgets both scales, and the dtype."""
    return a.long() @ b.long().T


def choice_by_format_alone(table, format, n, k, capability, preferred):
    """The first row that knows the format."""
    return next(row["name"] for row in table if format in row["formats"])


def choice_without_preference(table, format, n, k, capability, preferred):
    """Never looks at what is preferred."""
    for row in table:
        needed = row["capability"]
        fits = needed is None or (capability is not None and capability >= needed)
        if format in row["formats"] and fits and n % row["multiple"] == 0 and k % row["multiple"] == 0:
            return row["name"]


def choice_of_the_preferred_unasked(table, format, n, k, capability, preferred):
    """Takes the preferred row, whether it can serve or not."""
    if preferred != "auto":
        return preferred
    return choice_without_preference(table, format, n, k, capability, preferred)


def choice_without_k(table, format, n, k, capability, preferred):
    """Checks the multiple of N only."""
    for row in sorted(table, key=lambda row: row["name"] != preferred):
        needed = row["capability"]
        fits = needed is None or (capability is not None and capability >= needed)
        if format in row["formats"] and fits and n % row["multiple"] == 0:
            return row["name"]


def choice_by_text(table, format, n, k, capability, preferred):
    """Compares versions as text, where 10 comes before 9."""
    for row in sorted(table, key=lambda row: row["name"] != preferred):
        needed = row["capability"]
        fits = needed is None or (capability is not None and str(capability) >= str(needed))
        if format in row["formats"] and fits and n % row["multiple"] == 0 and k % row["multiple"] == 0:
            return row["name"]


def choice_of_a_row(table, format, n, k, capability, preferred):
    """Returns the row, not its name."""
    return next(row for row in table if format in row["formats"])


def scales_after_the_loop(a, b, sa, sb, block):
    """The exhibit itself: the first step's scales for all of them."""
    rows = torch.arange(len(b)) // block
    return a @ b.T * sa[:, :1] * sb[rows, 0]


def scales_of_the_last_step(a, b, sa, sb, block):
    """The scales that are at hand when the loop ends."""
    rows = torch.arange(len(b)) // block
    return a @ b.T * sa[:, -1:] * sb[rows, -1]


def scales_by_their_mean(a, b, sa, sb, block):
    """One scale for all steps, the mean."""
    rows = torch.arange(len(b)) // block
    return a @ b.T * (sa[:, None] * sb[rows][None]).mean(2)


def scales_on_the_running_sum(a, b, sa, sb, block):
    """Scales the sum so far in each step."""
    rows, out = torch.arange(len(b)) // block, torch.zeros(len(a), len(b))
    for step in range(a.shape[1] // block):
        k = slice(step * block, (step + 1) * block)
        out = (out + a[:, k] @ b[:, k].T) * sa[:, step : step + 1] * sb[rows, step]
    return out


def scales_of_the_first_rows_of_b(a, b, sa, sb, block):
    """Right as long as one row of sb serves all outputs."""
    out = torch.zeros(len(a), len(b))
    for step in range(a.shape[1] // block):
        k = slice(step * block, (step + 1) * block)
        out += a[:, k] @ b[:, k].T * sa[:, step : step + 1] * sb[0, step]
    return out


def rows_without_floor(x):
    """The exhibit itself."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def rows_mended_at_zero_only(x):
    """Mends the row of zeros, and no other small one."""
    x = x.float()
    amax = x.abs().amax(1, keepdim=True)
    scale = torch.where(amax == 0, 1e-4, amax) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def rows_with_nan_painted_over(x):
    """Repairs q, and leaves the scale of 0."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True) / 448
    return (x / scale).nan_to_num(0.0).to(torch.float8_e4m3fn), scale


def rows_with_a_floor_under_the_scale(x):
    """The floor belongs to the magnitude; under the scale it is 448 times too high."""
    x = x.float()
    scale = (x.abs().amax(1, keepdim=True) / 448).clamp(min=1e-4)
    return (x / scale).to(torch.float8_e4m3fn), scale


def rows_with_one_scale(x):
    """One scale for the whole batch: no row is all zeros then, or all are."""
    x = x.float()
    scale = (x.abs().amax().clamp(min=1e-4) / 448).expand(len(x), 1)
    return (x / scale).to(torch.float8_e4m3fn), scale


def rows_left_in_float(x):
    """Never changes the dtype."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-4) / 448
    return x / scale, scale


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps07.quantize_int8": [
        (
            int8_without_clamp,
            "x[0, 0] / scale is 128: beyond the format, so it stays at its end; expected 127, got -128",
        ),
        (int8_without_round, "x[0, 0] / scale is 0.9: the nearest whole number is wanted; expected 1, got 0"),
        (int8_down_to_minus_128, "beyond the format, so it stays at its end; expected -127, got -128"),
        (int8_rounding_half_up, "x[0, 0] / scale is 0.5: half way between two, so the even one is wanted"),
        (int8_times_scale, "x[0, 0] / scale is 2: the nearest whole number is wanted; expected 2, got 0"),
        (int8_left_in_float, "the dtype is torch.float32, not torch.int8"),
    ],
    "ps07.block_scales": [
        (scales_by_maximum, "row 0, numbers 0 to 1: the largest magnitude is 8, so the scale is 8 / 4 = 2, got 0.25"),
        (scales_of_whole_blocks, "the answer has the shape [1, 2], not [M, ceil(K / block)] = [1, 3]"),
        (scales_a_token, "row 0, numbers 0 to 1: the largest magnitude is 4, so the scale is 4 / 4 = 1, got 2"),
        (scales_upside_down, "the largest magnitude is 8, so the scale is 8 / 4 = 2, got 0.5"),
        (scales_in_the_inputs_dtype, "the dtype is torch.bfloat16; scales are torch.float32, whatever x is"),
        (scales_widened_too_late, "the largest magnitude is 3, so the scale is 3 / 448"),
    ],
    "ps07.int8_product": [
        (
            product_in_int8,
            "the sum is 500, times 0.25 (row 0 of a) and 1 (row 0 of b) is 125, got -3: 8 bits have run over",
        ),
        (product_in_int16, "out[0, 0]: the sum is 48387, times 1 (row 0 of a) and 1 (row 0 of b) is 48387"),
        (product_with_scales_swapped, "out[0, 1]: the sum is 3, times 1 (row 0 of a) and 4 (row 1 of b) is 12, got 3"),
        (
            product_without_scale_of_b,
            "out[0, 0]: the sum is 11, times 1 (row 0 of a) and 0.5 (row 0 of b) is 5.5, got 11",
        ),
        (product_left_in_whole_numbers, "the answer has the dtype torch.int64; it must be a float"),
    ],
    "ps07.choose_backend": [
        (choice_without_k, "deep_gemm needs N and K that are multiples of 128, they are 1536 and 576"),
        (choice_by_format_alone, "cutlass needs N and K that are multiples of 16, they are 2111 and 7168"),
        (choice_without_preference, "cublas could serve, but triton is preferred and can serve as well"),
        (choice_of_the_preferred_unasked, "triton does not know fp8_block"),
        (choice_by_text, "reference could serve, but cutlass stands before it in the table and can serve as well"),
        (choice_of_a_row, "the answer is a dict, not the name of a row"),
    ],
    "ps07.block_product": [
        (scales_of_the_first_rows_of_b, "out[0, 2]: the steps' sums are [2, 2] and their scales [3, 50], together 106"),
        (
            scales_after_the_loop,
            "out[0, 0]: the steps' sums are [3, 7] and their scales [1, 10], together 73; got 10",
        ),
        (scales_of_the_last_step, "and their scales [1, 10], together 73; got 100"),
        (scales_by_their_mean, "and their scales [1, 10], together 73; got 55"),
        (scales_on_the_running_sum, "and their scales [1, 10], together 73; got 100"),
    ],
    "ps07.quantize_rows": [
        (rows_mended_at_zero_only, "row 0: 1e-06 counts as 0.0001, so its scale is 2.232e-07, got 2.232e-09"),
        (rows_without_floor, "row 1: 0 counts as 0.0001, so its scale is 2.232e-07, got 0"),
        (rows_with_nan_painted_over, "row 1: 0 counts as 0.0001, so its scale is 2.232e-07, got 0"),
        (rows_with_a_floor_under_the_scale, "row 1: 0 counts as 0.0001, so its scale is 2.232e-07, got 0.0001"),
        (rows_with_one_scale, "row 1: 7 is its largest magnitude, so its scale is 0.01562, got 1"),
        (rows_left_in_float, "q has the dtype torch.float32, not torch.float8_e4m3fn"),
    ],
}
