"""What students write for set 8 when it goes wrong, and what the checker must tell them."""

import torch


def route_weighted_by_b(scores, bias, num_groups, topk_group, top_k, scaling):
    """The bias gets into the weights."""
    size, ranked = len(scores) // num_groups, [s + b for s, b in zip(scores, bias, strict=True)]
    groups = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -groups[g])[:topk_group]
    ids = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: -ranked[e])[:top_k]
    total = sum(ranked[e] for e in ids)
    return ids, [scaling * ranked[e] / total for e in ids]


def route_without_bias(scores, bias, num_groups, topk_group, top_k, scaling):
    """Chooses by s."""
    size = len(scores) // num_groups
    groups = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -groups[g])[:topk_group]
    ids = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: -scores[e])[:top_k]
    total = sum(scores[e] for e in ids)
    return ids, [scaling * scores[e] / total for e in ids]


def route_by_the_best_of_a_group(scores, bias, num_groups, topk_group, top_k, scaling):
    """V2's score of a group: its maximum."""
    size, ranked = len(scores) // num_groups, [s + b for s, b in zip(scores, bias, strict=True)]
    groups = [max(ranked[g * size : (g + 1) * size]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -groups[g])[:topk_group]
    ids = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: -ranked[e])[:top_k]
    total = sum(scores[e] for e in ids)
    return ids, [scaling * scores[e] / total for e in ids]


def route_by_the_whole_group(scores, bias, num_groups, topk_group, top_k, scaling):
    """The sum of all of a group, not of its two best."""
    size, ranked = len(scores) // num_groups, [s + b for s, b in zip(scores, bias, strict=True)]
    groups = [sum(ranked[g * size : (g + 1) * size]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -groups[g])[:topk_group]
    ids = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: -ranked[e])[:top_k]
    total = sum(scores[e] for e in ids)
    return ids, [scaling * scores[e] / total for e in ids]


def route_without_sum(scores, bias, num_groups, topk_group, top_k, scaling):
    """V2's weights: not divided by their sum."""
    size, ranked = len(scores) // num_groups, [s + b for s, b in zip(scores, bias, strict=True)]
    groups = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -groups[g])[:topk_group]
    ids = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: -ranked[e])[:top_k]
    return ids, [scaling * scores[e] for e in ids]


def route_closed_with_zero(scores, bias, num_groups, topk_group, top_k, scaling):
    """Right as long as b is positive."""
    size, ranked = len(scores) // num_groups, [s + b for s, b in zip(scores, bias, strict=True)]
    groups = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -groups[g])[:topk_group]
    ranked = [b if e // size in kept else 0.0 for e, b in enumerate(ranked)]
    ids = sorted(range(len(scores)), key=lambda e: -ranked[e])[:top_k]
    total = sum(scores[e] for e in ids)
    return ids, [scaling * scores[e] / total for e in ids]


def route_ties_to_the_higher(scores, bias, num_groups, topk_group, top_k, scaling):
    """Sorts upwards and reads from the end."""
    size, ranked = len(scores) // num_groups, [s + b for s, b in zip(scores, bias, strict=True)]
    groups = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: groups[g])[-topk_group:]
    ids = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: ranked[e])[::-1][:top_k]
    total = sum(scores[e] for e in ids)
    return ids, [scaling * scores[e] / total for e in ids]


def experts_closed_with_zero(ranked, num_groups, topk_group, top_k):
    """The exhibit itself."""
    size = len(ranked) // num_groups
    scores = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -scores[g])[:topk_group]
    ranked = [b if e // size in kept else 0.0 for e, b in enumerate(ranked)]
    return sorted(range(len(ranked)), key=lambda e: -ranked[e])[:top_k]


def experts_closed_with_minus_one(ranked, num_groups, topk_group, top_k):
    """Low enough, until it isn't."""
    size = len(ranked) // num_groups
    scores = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -scores[g])[:topk_group]
    ranked = [b if e // size in kept else -1.0 for e, b in enumerate(ranked)]
    return sorted(range(len(ranked)), key=lambda e: -ranked[e])[:top_k]


def experts_closed_by_the_smallest(ranked, num_groups, topk_group, top_k):
    """The smallest b of all: a tie with the expert that has it."""
    size = len(ranked) // num_groups
    scores = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -scores[g])[:topk_group]
    closed = min(ranked)
    ranked = [b if e // size in kept else closed for e, b in enumerate(ranked)]
    return sorted(range(len(ranked)), key=lambda e: -ranked[e])[:top_k]


def experts_of_any_group(ranked, num_groups, topk_group, top_k):
    """Forgets the groups."""
    return sorted(range(len(ranked)), key=lambda e: -ranked[e])[:top_k]


def counts_of_tokens_used(ids, num_experts):
    """Only the experts that are in use."""
    flat = sorted(expert for row in ids for expert in row)
    counts = [flat.count(expert) for expert in sorted(set(flat))]
    return counts, [sum(counts[:i]) for i in range(len(counts))]


def counts_with_ends(ids, num_experts):
    """A prefix sum that includes the expert itself."""
    flat = [expert for row in ids for expert in row]
    counts = [flat.count(expert) for expert in range(num_experts)]
    return counts, [sum(counts[: expert + 1]) for expert in range(num_experts)]


def counts_of_first_choices(ids, num_experts):
    """Only the best expert of each token."""
    flat = [row[0] for row in ids]
    counts = [flat.count(expert) for expert in range(num_experts)]
    return counts, [sum(counts[:expert]) for expert in range(num_experts)]


def counts_up_to_the_last(ids, num_experts):
    """Right if the last expert has work: bincount without its length."""
    flat = [expert for row in ids for expert in row]
    counts = [flat.count(expert) for expert in range(max(flat) + 1)]
    return counts, [sum(counts[:expert]) for expert in range(len(counts))]


def pairs_without_padding(ids, num_experts, tile):
    """Sorted, but the experts share tiles."""
    flat = [expert for row in ids for expert in row]
    order = sorted(range(len(flat)), key=lambda pair: flat[pair])
    order += [len(flat)] * (-len(order) % tile)
    return order, [flat[order[i]] for i in range(0, len(order), tile)]


def pairs_padded_with_minus_one(ids, num_experts, tile):
    """Another mark for padding."""
    flat = [expert for row in ids for expert in row]
    pairs, owners = [], []
    for expert in range(num_experts):
        own = [pair for pair, e in enumerate(flat) if e == expert]
        own += [-1] * (-len(own) % tile)
        pairs, owners = pairs + own, owners + [expert] * (len(own) // tile)
    extra = min(len(flat), (len(flat) + num_experts * (tile - 1)) // tile) - len(owners)
    return pairs + [-1] * (extra * tile), owners + [-1] * extra


def tokens_for_pairs(ids, num_experts, tile):
    """Notes the token where the pair is wanted."""
    top_k = len(ids[0]) if ids else 1
    flat = [expert for row in ids for expert in row]
    pairs, owners = [], []
    for expert in range(num_experts):
        own = [pair // top_k for pair, e in enumerate(flat) if e == expert]
        own += [len(flat)] * (-len(own) % tile)
        pairs, owners = pairs + own, owners + [expert] * (len(own) // tile)
    extra = min(len(flat), (len(flat) + num_experts * (tile - 1)) // tile) - len(owners)
    return pairs + [len(flat)] * (extra * tile), owners + [-1] * extra


def tiles_in_use_only(ids, num_experts, tile):
    """Needs to know what the router said: on a GPU the host would have to wait."""
    flat = [expert for row in ids for expert in row]
    pairs, owners = [], []
    for expert in range(num_experts):
        own = [pair for pair, e in enumerate(flat) if e == expert]
        own += [len(flat)] * (-len(own) % tile)
        pairs, owners = pairs + own, owners + [expert] * (len(own) // tile)
    return pairs, owners


def tiles_by_the_formula_alone(ids, num_experts, tile):
    """Forgets that no more tiles than pairs can be needed."""
    flat = [expert for row in ids for expert in row]
    pairs, owners = [], []
    for expert in range(num_experts):
        own = [pair for pair, e in enumerate(flat) if e == expert]
        own += [len(flat)] * (-len(own) % tile)
        pairs, owners = pairs + own, owners + [expert] * (len(own) // tile)
    extra = (len(flat) + num_experts * (tile - 1)) // tile - len(owners)
    return pairs + [len(flat)] * (extra * tile), owners + [-1] * extra


def combine_with_clamp(rows, pairs, weights):
    """The exhibit itself."""
    num_tokens, top_k = weights.shape
    pair = pairs.clamp(max=num_tokens * top_k - 1)
    contribution = rows * weights.flatten()[pair, None]
    return rows.new_zeros(num_tokens, rows.shape[1]).index_add(0, pair // top_k, contribution)


def combine_times_zero(rows, pairs, weights):
    """Right as long as padding is finite: 0 x NaN is NaN."""
    num_tokens, top_k = weights.shape
    flat = torch.cat([weights.flatten(), weights.new_zeros(1)])
    out = rows.new_zeros(num_tokens + 1, rows.shape[1])
    if num_tokens == 0:
        return out[:0]
    token = (pairs // top_k).clamp(max=num_tokens - 1)
    return out[:num_tokens].index_add(0, token, rows * flat[pairs, None])


def combine_unweighted(rows, pairs, weights):
    """A plain sum."""
    num_tokens, top_k = weights.shape
    live = pairs < num_tokens * top_k
    return rows.new_zeros(num_tokens, rows.shape[1]).index_add(0, pairs[live] // top_k, rows[live])


def combine_by_place(rows, pairs, weights):
    """Takes the rows to be in the order of the pairs."""
    num_tokens, top_k = weights.shape
    return (rows[: num_tokens * top_k].view(num_tokens, top_k, -1) * weights[..., None]).sum(1)


def combine_with_plain_assignment(rows, pairs, weights):
    """`out[token] += …` with an index tensor: of several rows of one token the last one wins."""
    num_tokens, top_k = weights.shape
    live = pairs < num_tokens * top_k
    out = rows.new_zeros(num_tokens, rows.shape[1])
    out[pairs[live] // top_k] += rows[live] * weights.flatten()[pairs[live], None]
    return out


def fake_of_the_logits(hidden_states, router_logits, layer_name):
    """The wrong input."""
    return torch.empty_like(router_logits), torch.empty_like(router_logits)


def fake_with_default_dtype(hidden_states, router_logits, layer_name):
    """Right for a float32 model."""
    device = hidden_states.device
    return torch.empty(hidden_states.shape, device=device), torch.empty(hidden_states.shape, device=device)


def fake_on_the_default_device(hidden_states, router_logits, layer_name):
    """Makes its tensors on the CPU."""
    shape, dtype = hidden_states.shape, hidden_states.dtype
    return torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)


def fake_that_returns_its_input(hidden_states, router_logits, layer_name):
    """The shape is right…"""
    return hidden_states, hidden_states


def fake_with_one_tensor(hidden_states, router_logits, layer_name):
    """One tensor under two names."""
    out = hidden_states.new_empty(hidden_states.shape)
    return out, out


def fake_with_strides_of_the_input(hidden_states, router_logits, layer_name):
    """empty_like keeps the order of the dimensions in memory."""
    return torch.empty_like(hidden_states), torch.empty_like(hidden_states)


def fake_that_looks_at_numbers(hidden_states, router_logits, layer_name):
    """Does what the operator does."""
    busiest = int(router_logits.sum(0).argmax())
    return hidden_states.new_empty(hidden_states.shape), hidden_states.new_empty(hidden_states.shape) * busiest


def fake_of_the_routed_only(hidden_states, router_logits, layer_name):
    """Forgets the second result."""
    return hidden_states.new_empty(hidden_states.shape)


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps08.route": [
        (route_closed_with_zero, "which is out: the groups score [-0.95, -0.9, -1, -1.3], and [0, 1] stay"),
        (route_weighted_by_b, "the bias is in your weights: they are made from s, not from b"),
        (route_without_bias, "lies in group 0, which is out: the groups score [1.05, 1.1, 1.3, 0.7], and [1, 2] stay"),
        (route_by_the_best_of_a_group, "lies in group 2, which is out: the groups score [1.05, 1.1, 1, 0.7]"),
        (route_by_the_whole_group, "lies in group 1, which is out: the groups score [1.7, 1.1], and [0] stay"),
        (route_without_sum, "they are not divided by their sum"),
        (route_ties_to_the_higher, "which is out"),
    ],
    "ps08.choose_experts": [
        (experts_closed_with_minus_one, "lies in group 1, which is out"),
        (experts_closed_with_zero, "expert 2 (b = -0.1) lies in group 1, which is out: the groups score [0.1, -0.5]"),
        (experts_closed_by_the_smallest, "expert 0 (b = -0.3) lies in group 0, which is out"),
        (experts_of_any_group, "expert 2 (b = -0.1) lies in group 1, which is out"),
    ],
    "ps08.count_experts": [
        (counts_up_to_the_last, "counts must be a list of 6 numbers, one an expert; got [1, 1]"),
        (counts_of_tokens_used, "counts must be a list of 4 numbers, one an expert; got [2, 2]"),
        (counts_with_ends, "these are the ends, the sums with its own pairs"),
        (counts_of_first_choices, "expert 0 has 3 pairs, got 1"),
    ],
    "ps08.sort_pairs": [
        (tiles_by_the_formula_alone, "2 pairs on 4 experts are bounded by 2 tiles of 16, 2 of them in use; got 3"),
        (tiles_in_use_only, "4 pairs on 2 experts are bounded by 3 tiles of 2, 2 of them in use; got 2"),
        (pairs_without_padding, "6 pairs on 3 experts are bounded by 4 tiles of 2, 4 of them in use; got 3"),
        (pairs_padded_with_minus_one, "is padding: it holds 6, the number of pairs, got -1"),
        (tokens_for_pairs, "row 0 of tile 0 (expert 0) holds pair 1, got pair 0, which wants expert 2"),
    ],
    "ps08.combine": [
        (combine_times_zero, "a padding row was read (rows [1, 3]), and 0 times NaN is NaN"),
        (combine_with_clamp, "rows [3, 5] are padding and belong to no token, not to the last one either"),
        (combine_unweighted, "token 0 is 0.5 x row 0 + 0.5 x row 6"),
        (combine_by_place, "token 0 is"),
        (combine_with_plain_assignment, "token 0 is"),
    ],
    "ps08.moe_shared_fake": [
        (fake_with_default_dtype, "routed has the dtype torch.float32, but the operator returns"),
        (fake_with_strides_of_the_input, "routed has the strides (1, 6), but the operator returns contiguous rows"),
        (fake_of_the_logits, "routed has the shape [5, 4], not that of hidden_states, [5, 8]"),
        (fake_on_the_default_device, "routed is on the device cpu, hidden_states is on meta"),
        (fake_that_returns_its_input, "routed is an input, or a view of one"),
        (fake_with_one_tensor, "routed and shared are the same tensor twice"),
        (fake_that_looks_at_numbers, "it raised an error"),
        (fake_of_the_routed_only, "the answer is a Tensor, not the pair (routed, shared)"),
    ],
}
