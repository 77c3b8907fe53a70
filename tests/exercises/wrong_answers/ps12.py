"""What students write for set 12 when it goes wrong, and what the checker must tell them."""


def layers_with_the_rest_in_front(num_layers, num_stages):
    """Left-over layers go to the first stages."""
    share, rest = divmod(num_layers, num_stages)
    return [share + (stage < rest) for stage in range(num_stages)]


def layers_with_the_rest_at_the_end(num_layers, num_stages):
    """Left-over layers go to the last stages."""
    share, rest = divmod(num_layers, num_stages)
    return [share + (stage >= num_stages - rest) for stage in range(num_stages)]


def layers_with_the_rest_in_the_last(num_layers, num_stages):
    """All that is left over goes to one stage."""
    share, rest = divmod(num_layers, num_stages)
    return [share] * (num_stages - 1) + [share + rest]


def layers_with_the_rest_in_the_middle(num_layers, num_stages):
    """Neither the first stage nor the last one ever gets one more."""
    share, rest = divmod(num_layers, num_stages)
    return [share] + [share + (stage >= num_stages - 1 - rest) for stage in range(1, num_stages - 1)] + [share]


def layers_rounded_up(num_layers, num_stages):
    """As many as fit, stage by stage."""
    size = -(-num_layers // num_stages)
    return [min(size, max(0, num_layers - size * stage)) for stage in range(num_stages)]


def layers_rounded_down(num_layers, num_stages):
    """Drops what is left over."""
    return [num_layers // num_stages] * num_stages


def layers_by_division(num_layers, num_stages):
    """Floats."""
    return [num_layers / num_stages] * num_stages


def copy_that_keeps_the_old_table(copy, news):
    """Appends the blocks of a resumed request as well."""
    return type(copy)(copy.token_ids + news.new_token_ids, copy.block_ids + news.new_block_ids, news.num_computed)


def copy_that_forgets_outputs(copy, news):
    """Takes a resumed request for a new one."""
    if news.is_resumed:
        return type(copy)(news.new_token_ids, news.new_block_ids, news.num_computed)
    return copy_that_keeps_the_old_table(copy, news)


def copy_that_takes_the_last_token(copy, news):
    """A step brings one token, it thinks."""
    return copy_that_keeps_the_old_table(copy, news._replace(new_token_ids=news.new_token_ids[-1:]))


def copy_that_counts_by_itself(copy, news):
    """Works the counter out from what it knows: all but the newest token."""
    blocks = news.new_block_ids if news.is_resumed else copy.block_ids + news.new_block_ids
    tokens = copy.token_ids + news.new_token_ids
    return type(copy)(tokens, blocks, len(tokens) - 1)


def copy_that_cuts_rejected_drafts(copy, news):
    """Takes tokens back when the counter goes back."""
    blocks = news.new_block_ids if news.is_resumed else copy.block_ids + news.new_block_ids
    tokens = copy.token_ids + news.new_token_ids
    if news.num_computed < copy.num_computed:
        tokens = tokens[: news.num_computed]
    return type(copy)(tokens, blocks, news.num_computed)


def copy_in_place(copy, news):
    """Extends the caller's own lists."""
    copy.token_ids.extend(news.new_token_ids)
    copy.block_ids.extend(news.new_block_ids)
    return copy._replace(num_computed=news.num_computed)


def copy_without_tokens(copy, news):
    """Only the last stage needs tokens, it thinks."""
    blocks = news.new_block_ids if news.is_resumed else copy.block_ids + news.new_block_ids
    return type(copy)(list(copy.token_ids), blocks, news.num_computed)


def traffic_of_one_rank_too(kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element):
    """Forgets that one rank has nobody to talk to."""
    payload = num_tokens * hidden_size * bytes_per_element
    if kind == "pipeline":
        return num_ranks - 1, 2 * payload
    return 2 * num_layers, 2 * num_layers * (2 * (num_ranks - 1) * payload // num_ranks)


def traffic_without_residual(kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element):
    """Sends hidden states only."""
    exchanges, num_bytes = traffic_of_one_rank_too(
        kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element
    )
    return exchanges, num_bytes // 2 if kind == "pipeline" else num_bytes


def traffic_over_all_links(kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element):
    """Adds the gaps of a pipeline up."""
    exchanges, num_bytes = traffic_of_one_rank_too(
        kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element
    )
    return exchanges, num_bytes * (num_ranks - 1) if kind == "pipeline" else num_bytes


def traffic_with_a_send_a_rank(kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element):
    """The last stage sends on, too."""
    exchanges, num_bytes = traffic_of_one_rank_too(
        kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element
    )
    return exchanges + (kind == "pipeline"), num_bytes


def traffic_with_one_sum_a_layer(kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element):
    """Forgets that attention and MLP both need one."""
    exchanges, num_bytes = traffic_of_one_rank_too(
        kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element
    )
    return (exchanges, num_bytes) if kind == "pipeline" else (exchanges // 2, num_bytes // 2)


def traffic_without_a_ring(kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element):
    """Counts the tensor once for each all-reduce."""
    exchanges, num_bytes = traffic_of_one_rank_too(
        kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element
    )
    payload = num_tokens * hidden_size * bytes_per_element
    return (exchanges, num_bytes) if kind == "pipeline" else (exchanges, exchanges * payload)


def traffic_in_floats(kind, num_tokens, hidden_size, num_layers, num_ranks, bytes_per_element):
    """Divides with `/`."""
    return float(num_ranks - 1), 2.0 * num_tokens * hidden_size * bytes_per_element


def _batch(running, share, budget, *, stop=False, at_least=0):
    batch, decodes = {}, 0
    for row in running:
        n = min(max(at_least, row.num_tokens - row.num_computed), budget)
        is_decode = row.num_tokens - row.num_computed <= 1
        if n <= 0 or (is_decode and decodes >= share):
            if stop:
                break
            continue
        decodes += is_decode
        batch[row.name] = n
        budget -= n
    return batch


def batch_of_everybody(running, num_stages, budget):
    """No share: all in one batch."""
    return _batch(running, len(running), budget)


def batch_of_the_rounded_down_share(running, num_stages, budget):
    """floor instead of ceil."""
    return _batch(running, len(running) // num_stages, budget)


def batch_that_stops(running, num_stages, budget):
    """`break` at the first who has nothing to compute, or is beyond the share."""
    return _batch(running, -(-len(running) // num_stages), budget, stop=True)


def batch_with_those_in_flight(running, num_stages, budget):
    """A running request has at least one token to compute, it thinks."""
    return _batch(running, -(-len(running) // num_stages), budget, at_least=1)


def batch_that_shares_prompts_out(running, num_stages, budget):
    """Takes a share of the requests, whatever they compute."""
    share, batch = -(-len(running) // num_stages), {}
    for row in running:
        n = min(row.num_tokens - row.num_computed, budget)
        if n > 0 and len(batch) < share:
            batch[row.name] = n
            budget -= n
    return batch


def batch_without_a_budget(running, num_stages, budget):
    """Everyone gets all it lacks."""
    return _batch(running, -(-len(running) // num_stages), 10**6)


def batch_as_names(running, num_stages, budget):
    """A list of names."""
    return list(_batch(running, -(-len(running) // num_stages), budget))


def tokens_by_the_classic_rule(all_token_ids, num_known, num_computed, num_scheduled, num_drafts):
    """The exhibit itself."""
    sent = all_token_ids[num_computed : num_computed + num_scheduled - num_drafts]
    num_new = num_computed + len(sent) - num_known
    return sent[-num_new:] if num_new > 0 else []


def tokens_that_the_step_reaches(all_token_ids, num_known, num_computed, num_scheduled, num_drafts):
    """From what is known, but only as far as the step computes."""
    return all_token_ids[num_known : num_computed + num_scheduled - num_drafts]


def the_newest_token(all_token_ids, num_known, num_computed, num_scheduled, num_drafts):
    """A step brings one token."""
    return all_token_ids[-1:]


def tokens_not_computed(all_token_ids, num_known, num_computed, num_scheduled, num_drafts):
    """Everything that has no K and V yet."""
    return all_token_ids[num_computed:]


def all_tokens(all_token_ids, num_known, num_computed, num_scheduled, num_drafts):
    """Sends the whole request each time."""
    return list(all_token_ids)


def number_of_tokens(all_token_ids, num_known, num_computed, num_scheduled, num_drafts):
    """Returns a count."""
    return len(all_token_ids) - num_known


def step_that_waits_first(num_in_flight, max_in_flight, num_ready):
    """The exhibit itself."""
    if num_in_flight:
        return ["collect"]
    return ["submit", "collect"] if num_ready else []


def step_that_always_collects(num_in_flight, max_in_flight, num_ready):
    """Waits even if nothing is on its way."""
    return ["submit"] * min(max_in_flight - num_in_flight, num_ready) + ["collect"]


def step_that_collects_before_it_fills(num_in_flight, max_in_flight, num_ready):
    """The right actions in the wrong order."""
    actions = step_that_always_collects(num_in_flight, max_in_flight, num_ready)
    return actions[::-1]


def step_that_never_looks_at_room(num_in_flight, max_in_flight, num_ready):
    """Sends off all that can be planned."""
    return ["submit"] * num_ready + ["collect"]


def step_that_drains(num_in_flight, max_in_flight, num_ready):
    """Collects everything that is in flight."""
    num_new = min(max_in_flight - num_in_flight, num_ready)
    return ["submit"] * num_new + ["collect"] * (num_in_flight + num_new)


def step_that_submits_what_is_not_there(num_in_flight, max_in_flight, num_ready):
    """Fills every place."""
    return ["submit"] * (max_in_flight - num_in_flight) + ["collect"]


def step_as_counts(num_in_flight, max_in_flight, num_ready):
    """Two numbers."""
    return min(max_in_flight - num_in_flight, num_ready), 1


WRONG_ANSWERS = {
    "ps12.layers_per_stage": [
        (layers_with_the_rest_in_front, "one each for the stages before the last, back to front"),
        (layers_with_the_rest_at_the_end, "the last stage has the head to compute as well"),
        (layers_with_the_rest_in_the_last, "the stages hold between 1 and 3 layers"),
        (layers_with_the_rest_in_the_middle, "the model has 7 layers, but the stages hold 6 together"),
        (layers_rounded_up, "stage 3 has no layer: every stage needs one"),
        (layers_rounded_down, "the model has 6 layers, but the stages hold 4 together"),
        (layers_by_division, "not a list of whole numbers"),
    ],
    "ps12.apply_message": [
        (copy_that_keeps_the_old_table, "it is resumed, so its old table is void and [9, 2] are all its blocks"),
        (copy_that_forgets_outputs, "a preempted request keeps its outputs"),
        (copy_that_takes_the_last_token, "all of new_token_ids, in order, belong behind what it knows"),
        (copy_that_counts_by_itself, "num_computed comes anew with each message, 4"),
        (copy_that_cuts_rejected_drafts, "a rejected draft was never sent"),
        (copy_in_place, "it changed its input copy"),
        (copy_without_tokens, "the stage has not taken up new_token_ids"),
    ],
    "ps12.traffic": [
        (traffic_of_one_rank_too, "one rank has nobody to talk to: (0, 0)"),
        (traffic_without_residual, "a link carries hidden and residual, 917,504 bytes each, once"),
        (traffic_over_all_links, "a link carries hidden and residual, 917,504 bytes each, once"),
        (traffic_with_a_send_a_rank, "8 stages have 7 gaps between them"),
        (traffic_with_one_sum_a_layer, "two all-reduces in each of 6 layers are 12; got 6"),
        (traffic_without_a_ring, "a ring of 8 moves 2 (8 - 1) / 8 times the 917,504 bytes"),
        (traffic_in_floats, "not two whole numbers"),
    ],
    "ps12.next_batch": [
        (batch_of_everybody, "6 decodes in one batch, but 6 running on 3 stages make ceil(6 / 3) = 2 at most"),
        (batch_of_the_rounded_down_share, "b has a decode, and the share is not used up"),
        (batch_that_stops, "c has a decode, and the share is not used up"),
        (batch_with_those_in_flight, "the newest token of a is still on its way"),
        (batch_that_shares_prompts_out, "b has part of its prompt left, and there is budget"),
        (batch_without_a_budget, "its budget is 8"),
        (batch_as_names, "not a dictionary from names to whole numbers"),
    ],
    "ps12.new_token_ids": [
        (tokens_by_the_classic_rule, "the stage knows 11 tokens, the scheduler 14: [21, 22] are lost"),
        (tokens_that_the_step_reaches, "the stage knows 7 tokens, the scheduler 8: [17] is lost"),
        (the_newest_token, "the stage knows all 10 tokens already"),
        (tokens_not_computed, "the stage knows all 10 tokens already"),
        (all_tokens, "positions 10 to 10, in order, are news: [20]"),
        (number_of_tokens, "the answer is a int (1), not a list of token ids"),
    ],
    "ps12.engine_step": [
        (step_that_waits_first, "so 3 should be submitted before anything is waited for; got 1"),
        (step_that_always_collects, "waiting for a result would never end"),
        (step_that_collects_before_it_fills, "it waits before the queue is full"),
        (step_that_never_looks_at_room, "3 in flight and 5 more are over the 3 that are allowed"),
        (step_that_drains, "one result is collected a step, the oldest"),
        (step_that_submits_what_is_not_there, "batches submitted: 3, but only 1 can be planned"),
        (step_as_counts, 'not a list of "submit" and "collect"'),
    ],
}
