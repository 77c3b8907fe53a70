"""What students write for set 1 when it goes wrong, and what the checker must tell them."""

import torch


def bytes_that_ignore_head_dim(config, bytes_per_number):
    """Right where heads share the hidden size among them."""
    if "kv_lora_rank" in config:
        numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        stored = config.get("num_key_value_heads", config["num_attention_heads"])
        numbers = 2 * stored * (config["hidden_size"] // config["num_attention_heads"])
    return config["num_hidden_layers"] * numbers * bytes_per_number


def bytes_that_expect_every_field(config, bytes_per_number):
    """Right until a field is left out."""
    if "kv_lora_rank" in config:
        numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        numbers = 2 * config["num_key_value_heads"] * (config["hidden_size"] // config["num_attention_heads"])
    return config["num_hidden_layers"] * numbers * bytes_per_number


def bytes_without_v(config, bytes_per_number):
    """Counts K only."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * bytes_per_number


def bytes_of_one_layer(config, bytes_per_number):
    """Forgets the layers."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_key_value_heads"] * head_dim * bytes_per_number


def bytes_of_all_query_heads(config, bytes_per_number):
    """Takes every model for MHA."""
    return config["num_hidden_layers"] * 2 * config["hidden_size"] * bytes_per_number


def bytes_of_mla_with_heads(config, bytes_per_number):
    """Stores a latent for each head."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    numbers = 2 * config["num_key_value_heads"] * head_dim
    if "kv_lora_rank" in config:
        numbers = config["num_attention_heads"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    return config["num_hidden_layers"] * numbers * bytes_per_number


def bytes_that_are_bits_of_a_float(config, bytes_per_number):
    """Divides with `/`."""
    head_dim = config["hidden_size"] / config["num_attention_heads"]
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * bytes_per_number


def bytes_counted_in_numbers(config, bytes_per_number):
    """Forgets that a number has two bytes."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim


def decode_before_append(k_cache, v_cache, q, k, v):
    """Attends over the past, then stores."""
    out = torch.softmax(k_cache @ q * q.shape[0] ** -0.5, dim=0) @ v_cache
    return out, torch.cat([k_cache, k[None]]), torch.cat([v_cache, v[None]])


def decode_without_scale(k_cache, v_cache, q, k, v):
    """Forgets the square root of D."""
    k_cache, v_cache = torch.cat([k_cache, k[None]]), torch.cat([v_cache, v[None]])
    return torch.softmax(k_cache @ q, dim=0) @ v_cache, k_cache, v_cache


def decode_that_stores_nothing(k_cache, v_cache, q, k, v):
    """Gives the right output and the old caches."""
    keys, values = torch.cat([k_cache, k[None]]), torch.cat([v_cache, v[None]])
    return torch.softmax(keys @ q * q.shape[0] ** -0.5, dim=0) @ values, k_cache, v_cache


def decode_that_stores_in_front(k_cache, v_cache, q, k, v):
    """Puts the new token first."""
    k_cache, v_cache = torch.cat([k[None], k_cache]), torch.cat([v[None], v_cache])
    return torch.softmax(k_cache @ q * q.shape[0] ** -0.5, dim=0) @ v_cache, k_cache, v_cache


def decode_with_a_bare_exp(k_cache, v_cache, q, k, v):
    """A softmax by hand, without the maximum."""
    k_cache, v_cache = torch.cat([k_cache, k[None]]), torch.cat([v_cache, v[None]])
    weights = torch.exp(k_cache @ q * q.shape[0] ** -0.5)
    return weights / weights.sum() @ v_cache, k_cache, v_cache


def decode_that_returns_the_output_only(k_cache, v_cache, q, k, v):
    """Keeps the new caches to itself."""
    k_cache, v_cache = torch.cat([k_cache, k[None]]), torch.cat([v_cache, v[None]])
    return torch.softmax(k_cache @ q * q.shape[0] ** -0.5, dim=0) @ v_cache


def heads_as_they_were_found(k, num_heads):
    """The exhibit itself: repeats the whole list of heads."""
    return k.repeat(1, num_heads // k.shape[1], 1)


def heads_by_remainder(k, num_heads):
    """h % Hkv instead of h // group."""
    return k[:, [head % k.shape[1] for head in range(num_heads)]]


def heads_all_from_the_first(k, num_heads):
    """Takes every model for MQA."""
    return k[:, :1].expand(-1, num_heads, -1)


def heads_along_the_tokens(k, num_heads):
    """Repeats the wrong dimension."""
    return k.repeat_interleave(num_heads // k.shape[1], dim=0)


def heads_of_groups_of_two(k, num_heads):
    """Right for as many groups as the example has."""
    if k.shape[1] in (1, num_heads):
        return k.expand(-1, num_heads, -1)
    return k[:, [min(head // 2, k.shape[1] - 1) for head in range(num_heads)]]


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps01.kv_bytes_per_token": [
        (bytes_that_ignore_head_dim, "heads of size hidden_size / heads = 64, but the config says head_dim = 128"),
        (bytes_that_expect_every_field, "KeyError: 'num_key_value_heads'"),
        (bytes_without_v, "that is half of it: both K and V are stored, and each number takes 2 bytes"),
        (bytes_of_one_layer, "that is one layer; the model has 32, each with a cache of its own"),
        (bytes_of_all_query_heads, "that is one K and V for each of 32 query heads, but only 8 are stored"),
        (bytes_of_mla_with_heads, "once for all heads; your answer is 128 times as much"),
        (bytes_that_are_bits_of_a_float, "the answer is a float (131072.0)"),
        (bytes_counted_in_numbers, "that is half of it: both K and V are stored, and each number takes 2 bytes"),
    ],
    "ps01.decode_step": [
        (decode_before_append, "the newest token does not see itself: append first, then attend"),
        (decode_without_scale, "the scores are not divided by the square root of D"),
        (decode_that_stores_nothing, "k_cache still has 1 row: the new token has to be appended for the next step"),
        (decode_that_stores_in_front, "row 0 of k_cache should be that of token 0"),
        (decode_with_a_bare_exp, "out should be [0.0142, 0.9858] and is [nan, nan]"),
        (decode_that_returns_the_output_only, "the answer is a Tensor, not the tuple (out, k_cache, v_cache)"),
    ],
    "ps01.expand_kv": [
        (heads_as_they_were_found, "query head 1 reads stored head 1; it belongs to the group 0 .. 1"),
        (heads_by_remainder, "query head 1 reads stored head 1; it belongs to the group 0 .. 1"),
        (heads_all_from_the_first, "query head 1 reads stored head 0; it belongs to the group 1 .. 1"),
        (heads_along_the_tokens, "k has the shape [8, 1, 1], not [2, 4, 1]"),
        (heads_of_groups_of_two, "query head 2 reads stored head 1; it belongs to the group 0 .. 3"),
    ],
}
