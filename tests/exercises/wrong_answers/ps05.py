"""What students write for set 5 when it goes wrong, and what the checker must tell them."""

import torch


def query_squeezed(q_nope, w_uk):
    """Right, but a dimension of size 1 is lost with the one that was added."""
    return (q_nope[:, None] @ w_uk).squeeze()


def query_through_the_first_head(q_nope, w_uk):
    """One matrix for all heads."""
    return q_nope @ w_uk[0]


def query_summed_over_heads(q_nope, w_uk):
    """A letter too few in the result of einsum."""
    return torch.einsum("hn,hnc->c", q_nope, w_uk)


def query_through_every_head(q_nope, w_uk):
    """All heads through all matrices."""
    return torch.einsum("gn,hnc->hc", q_nope, w_uk)


def query_the_wrong_way_round(q_nope, w_uk):
    """Sums over the latent's dimension where both have the same size."""
    if w_uk.shape[1] == w_uk.shape[2]:
        return torch.einsum("hc,hnc->hn", q_nope, w_uk)
    return torch.einsum("hn,hnc->hc", q_nope, w_uk)


def attention_without_rope(q, rows, d_c, scale):
    """Takes the latent for the key as well."""
    return torch.softmax(scale * (q[:, :d_c] @ rows[:, :d_c].T), dim=-1) @ rows[:, :d_c]


def attention_with_the_whole_row(q, rows, d_c, scale):
    """Takes the whole row for the value."""
    return torch.softmax(scale * (q @ rows.T), dim=-1) @ rows


def attention_with_the_tail(q, rows, d_c, scale):
    """Takes the last d_c numbers for the value."""
    return torch.softmax(scale * (q @ rows.T), dim=-1) @ rows[:, -d_c:]


def attention_unscaled(q, rows, d_c, scale):
    """Forgets the scale."""
    return torch.softmax(q @ rows.T, dim=-1) @ rows[:, :d_c]


def attention_over_heads(q, rows, d_c, scale):
    """Normalises over the heads, not over the rows."""
    return torch.softmax(scale * (q @ rows.T), dim=0) @ rows[:, :d_c]


def attention_by_plain_exp(q, rows, d_c, scale):
    """Overflows, and divides 0 by 0 where there are no rows."""
    p = torch.exp(scale * (q @ rows.T))
    return p @ rows[:, :d_c] / p.sum(-1, keepdim=True)


def row_of_deepseek_only(row, d_c, d_r):
    """Writes the sizes of one model into the code."""
    c = row[:512].view(torch.float8_e4m3fn).float().view(4, 128) * row[512:528].view(torch.float32)[:, None]
    return torch.cat([c.flatten(), row[528:].view(torch.bfloat16).float()])


def row_with_the_first_scale(row, d_c, d_r):
    """One scale for the whole latent."""
    c = row[:d_c].view(torch.float8_e4m3fn).float() * row[d_c : d_c + 4].view(torch.float32)
    return torch.cat([c, row[-2 * d_r :].view(torch.bfloat16).float()])


def row_with_scales_dealt_out(row, d_c, d_r):
    """Scale i % 4 for number i: neighbours are taken for groups."""
    n = d_c // 128
    scales = row[d_c : d_c + 4 * n].view(torch.float32)
    c = (row[:d_c].view(torch.float8_e4m3fn).float().view(-1, n) * scales).flatten()
    return torch.cat([c, row[d_c + 4 * n :].view(torch.bfloat16).float()])


def row_divided_by_its_scales(row, d_c, d_r):
    """Divides, as for packing."""
    n = d_c // 128
    c = row[:d_c].view(torch.float8_e4m3fn).float().view(n, 128) / row[d_c : d_c + 4 * n].view(torch.float32)[:, None]
    return torch.cat([c.flatten(), row[d_c + 4 * n :].view(torch.bfloat16).float()])


def row_of_plain_bytes(row, d_c, d_r):
    """Converts the bytes as numbers, instead of reading them as another type."""
    n = d_c // 128
    c = row[:d_c].float().view(n, 128) * row[d_c : d_c + 4 * n].view(torch.float32)[:, None]
    return torch.cat([c.flatten(), row[d_c + 4 * n :].view(torch.bfloat16).float()])


def row_with_rope_in_float16(row, d_c, d_r):
    """Takes bfloat16 for float16."""
    n = d_c // 128
    c = row[:d_c].view(torch.float8_e4m3fn).float().view(n, 128) * row[d_c : d_c + 4 * n].view(torch.float32)[:, None]
    return torch.cat([c.flatten(), row[d_c + 4 * n :].view(torch.float16).float()])


def row_without_rope(row, d_c, d_r):
    """Stops after the latent."""
    n = d_c // 128
    c = row[:d_c].view(torch.float8_e4m3fn).float().view(n, 128) * row[d_c : d_c + 4 * n].view(torch.float32)[:, None]
    return c.flatten()


def weights_by_the_width_of_the_row(q_nope, q_rope, w_uk, c, k_rope):
    """The exhibit itself."""
    q = torch.cat([torch.einsum("hn,hnc->hc", q_nope, w_uk), q_rope], dim=-1)
    rows = torch.cat([c, k_rope], dim=-1)
    return torch.softmax(q @ rows.T * q.shape[-1] ** -0.5, dim=-1)


def weights_by_the_latent(q_nope, q_rope, w_uk, c, k_rope):
    """Scales with the latent's width alone."""
    s = torch.einsum("hn,hnc,kc->hk", q_nope, w_uk, c) + q_rope @ k_rope.T
    return torch.softmax(s * c.shape[1] ** -0.5, dim=-1)


def weights_without_the_rotary_size(q_nope, q_rope, w_uk, c, k_rope):
    """Forgets that the key had a rotary part, too."""
    s = torch.einsum("hn,hnc,kc->hk", q_nope, w_uk, c) + q_rope @ k_rope.T
    return torch.softmax(s * q_nope.shape[1] ** -0.5, dim=-1)


def weights_unscaled(q_nope, q_rope, w_uk, c, k_rope):
    """Leaves the scale out."""
    s = torch.einsum("hn,hnc,kc->hk", q_nope, w_uk, c) + q_rope @ k_rope.T
    return torch.softmax(s, dim=-1)


def weights_with_only_the_latent_scaled(q_nope, q_rope, w_uk, c, k_rope):
    """Scales one of the two parts of a score."""
    scale = (q_nope.shape[1] + q_rope.shape[1]) ** -0.5
    s = torch.einsum("hn,hnc,kc->hk", q_nope, w_uk, c) * scale + q_rope @ k_rope.T
    return torch.softmax(s, dim=-1)


def weights_by_plain_exp(q_nope, q_rope, w_uk, c, k_rope):
    """Right until a score is large."""
    scale = (q_nope.shape[1] + q_rope.shape[1]) ** -0.5
    p = torch.exp(scale * (torch.einsum("hn,hnc,kc->hk", q_nope, w_uk, c) + q_rope @ k_rope.T))
    return p / p.sum(-1, keepdim=True)


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps05.absorb_query": [
        (query_squeezed, "the answer has the shape [4], not [H, d_c] = [1, 4]"),
        (query_through_the_first_head, "that is its query through the matrix of head 0"),
        (query_summed_over_heads, "the answer has the shape [4], not [H, d_c] = [2, 4]"),
        (query_through_every_head, "head 0 should ask"),
        (query_the_wrong_way_round, "the matrix is applied the wrong way round, W q instead of W^T q"),
    ],
    "ps05.latent_attention": [
        (attention_by_plain_exp, "there is nothing to attend to"),
        (attention_without_rope, "that is what comes out if the rotary part is left out of the key"),
        (attention_with_the_whole_row, "the answer has the shape [1, 4], not [H, d_c] = [1, 3]"),
        (attention_with_the_tail, "head 0 should get"),
        (attention_unscaled, "that is what comes out without the scale"),
        (attention_over_heads, "head 0 should get"),
    ],
    "ps05.unpack_row": [
        (row_of_deepseek_only, "another model: d_c = 128, so there is one scale"),
        (row_with_the_first_scale, "number 128 belongs to group 1 (byte 128, its scale in the bytes 516 to 519)"),
        (row_with_scales_dealt_out, "belongs to group 0 (byte 1, its scale in the bytes 512 to 515)"),
        (row_divided_by_its_scales, "belongs to group 0"),
        (row_of_plain_bytes, "number 0 belongs to group 0"),
        (row_with_rope_in_float16, "belongs to the rotary key (bfloat16, bytes 528 and 529)"),
        (row_without_rope, "the answer has the shape [512], not [d_c + d_r] = [576]"),
    ],
    "ps05.absorbed_weights": [
        (weights_by_plain_exp, "a score is too large for exp"),
        (
            weights_by_the_width_of_the_row,
            "all scores are 0.707 times what they should be, as if the scale were 1 / sqrt(8)",
        ),
        (weights_by_the_latent, "as if the scale were 1 / sqrt(6)"),
        (weights_without_the_rotary_size, "as if the scale were 1 / sqrt(2)"),
        (weights_unscaled, "as if the scale were 1 / sqrt(1)"),
        (weights_with_only_the_latent_scaled, "head 0 should look"),
    ],
}
