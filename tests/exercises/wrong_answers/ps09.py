"""What students write for set 9 when it goes wrong, and what the checker must tell them."""


def count_without_length(num_tokens, num_drafts, num_computed, budget, threshold, max_model_len):
    """Threshold and budget, but nothing stops it at the longest length."""
    wanted = num_tokens + num_drafts - num_computed
    if threshold:
        wanted = min(wanted, threshold)
    return max(0, min(wanted, budget))


def count_to_the_last_position(num_tokens, num_drafts, num_computed, budget, threshold, max_model_len):
    """Computes the last position of the longest request as well."""
    wanted = num_tokens + num_drafts - num_computed
    if threshold:
        wanted = min(wanted, threshold)
    return max(0, min(wanted, budget, max_model_len - num_computed))


def count_below_zero(num_tokens, num_drafts, num_computed, budget, threshold, max_model_len):
    """Never asks whether anything is left."""
    wanted = num_tokens + num_drafts - num_computed
    return min(wanted, threshold or wanted, budget, max_model_len - 1 - num_computed)


def count_at_least_one(num_tokens, num_drafts, num_computed, budget, threshold, max_model_len):
    """Thinks that a running request always has something to do."""
    wanted = num_tokens + num_drafts - num_computed
    return max(1, min(wanted, threshold or wanted, budget, max_model_len - 1 - num_computed))


def count_with_zero_as_a_limit(num_tokens, num_drafts, num_computed, budget, threshold, max_model_len):
    """Takes a threshold of 0 literally."""
    wanted = num_tokens + num_drafts - num_computed
    return max(0, min(wanted, threshold, budget, max_model_len - 1 - num_computed))


def count_of_the_threshold(num_tokens, num_drafts, num_computed, budget, threshold, max_model_len):
    """Gives every request the threshold, whatever it lacks."""
    wanted = threshold or num_tokens + num_drafts - num_computed
    return max(0, min(wanted, budget, max_model_len - 1 - num_computed))


def count_without_drafts(num_tokens, num_drafts, num_computed, budget, threshold, max_model_len):
    """Forgets that drafts are computed, too."""
    return count_below_zero(num_tokens, 0, num_computed, budget, threshold, max_model_len)


def count_by_division(num_tokens, num_drafts, num_computed, budget, threshold, max_model_len):
    """Ends in a float."""
    wanted = (num_tokens + num_drafts - num_computed) / 1
    return min(wanted, budget)


def drafts_by_a_bare_slice(num_tokens, num_computed, n, drafts):
    """A negative s counts from the end of the list."""
    return drafts[: n + num_computed - num_tokens]


def drafts_one_too_many(num_tokens, num_computed, n, drafts):
    """Counts the newest token as a draft."""
    return drafts[: max(0, n + num_computed - num_tokens + 1)]


def drafts_all_or_none(num_tokens, num_computed, n, drafts):
    """Drops all drafts when not all of them fit."""
    return drafts if n + num_computed - num_tokens >= len(drafts) else []


def drafts_always_after_one(num_tokens, num_computed, n, drafts):
    """Takes every request for a decode, where n - 1 drafts follow one token."""
    return drafts[: n - 1]


def drafts_of_the_end(num_tokens, num_computed, n, drafts):
    """Keeps the last ones."""
    s = max(0, n + num_computed - num_tokens)
    return drafts[len(drafts) - s :] if s else []


def drafts_counted(num_tokens, num_computed, n, drafts):
    """Returns s itself."""
    return max(0, n + num_computed - num_tokens)


def _blocks(num_tokens, block_size):
    return -(-num_tokens // block_size)


def _names(rows):
    return [row.name for row in rows]


def step_that_stops_at_zero(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """`break` where the request has nothing to compute: those behind it starve."""
    running, waiting, scheduled, gave_way = list(running), list(waiting), {}, False
    for row in list(running):
        n = min(row.num_tokens - row.num_computed, budget)
        if row not in running or n <= 0:
            break
        needed = _blocks(row.num_computed + n, block_size) - _blocks(row.num_computed, block_size)
        while needed > num_free_blocks and row in running:
            victim = running.pop()
            num_free_blocks += _blocks(victim.num_computed, block_size)
            waiting.insert(0, victim)
            gave_way = True
        if row in running:
            scheduled[row.name] = n
            budget, num_free_blocks = budget - n, num_free_blocks - needed
    while waiting and budget > 0 and len(running) < max_num_seqs and not gave_way:
        n = min(waiting[0].num_tokens, budget)
        if _blocks(n, block_size) > num_free_blocks:
            break
        scheduled[waiting[0].name] = n
        budget, num_free_blocks = budget - n, num_free_blocks - _blocks(n, block_size)
        running.append(waiting.pop(0))
    return scheduled, _names(running), _names(waiting)


def step_with_victims_at_the_back(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """Who gave way queues up behind everybody."""
    from minivllm.exercises.ps09_step import plan_step

    scheduled, run, wait = plan_step(running, waiting, budget, max_num_seqs, num_free_blocks, block_size)
    victims = [name for name in wait if name not in _names(waiting)]
    return scheduled, run, [name for name in wait if name not in victims] + victims


def step_with_victims_turned_round(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """Several victims come to the front in the order in which they fell."""
    from minivllm.exercises.ps09_step import plan_step

    scheduled, run, wait = plan_step(running, waiting, budget, max_num_seqs, num_free_blocks, block_size)
    victims = [name for name in wait if name not in _names(waiting)]
    return scheduled, run, victims[::-1] + [name for name in wait if name not in victims]


def step_that_admits_after_a_preemption(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """Fills the place of the victim at once, with whoever is small enough."""
    from minivllm.exercises.ps09_step import plan_step

    scheduled, run, wait = plan_step(running, waiting, budget, max_num_seqs, num_free_blocks, block_size)
    if len(run) < len(running):
        for row in waiting:
            if row.num_tokens <= block_size:
                scheduled[row.name] = row.num_tokens
                run.append(row.name)
                wait.remove(row.name)
    return scheduled, run, wait


def step_that_counts_seqs_anew(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """max_num_seqs taken for the requests that a step may admit."""
    from minivllm.exercises.ps09_step import plan_step

    return plan_step(running, waiting, budget, max_num_seqs + len(running), num_free_blocks, block_size)


def step_that_passes_the_head_by(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """Looks for somebody in the queue who fits."""
    from minivllm.exercises.ps09_step import plan_step

    fits = [row for row in waiting if _blocks(min(row.num_tokens, budget), block_size) <= num_free_blocks]
    scheduled, run, wait = plan_step(running, fits, budget, max_num_seqs, num_free_blocks, block_size)
    return scheduled, run, wait + [row.name for row in waiting if row not in fits]


def step_without_a_budget(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """Each request gets as much as the budget, not as what is left of it."""
    from minivllm.exercises.ps09_step import plan_step

    scheduled, run, wait = plan_step(running, waiting, 10**6, max_num_seqs, num_free_blocks, block_size)
    return {name: min(n, budget) for name, n in scheduled.items()}, run, wait


def step_that_takes_the_first(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """The first of those that run gives way."""
    from minivllm.exercises.ps09_step import plan_step

    scheduled, run, wait = plan_step(running, waiting, budget, max_num_seqs, num_free_blocks, block_size)
    num_victims = len(running) - len(run)
    if num_victims <= 0:
        return scheduled, run, wait
    first, rest = _names(running)[:num_victims], _names(running)[num_victims:]
    return {name: 1 for name in rest}, rest, first + _names(waiting)


def step_of_rows(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """Returns the rows themselves."""
    return {}, list(running), list(waiting)


def step_that_empties_the_queue(running, waiting, budget, max_num_seqs, num_free_blocks, block_size):
    """Pops from the caller's own list."""
    from minivllm.exercises.ps09_step import plan_step

    step = plan_step(running, waiting, budget, max_num_seqs, num_free_blocks, block_size)
    while waiting and waiting[0].name in step[1]:
        waiting.pop(0)
    return step


def booking_without_rejection(num_computed, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens):
    """Leaves the counter where the scheduler had put it."""
    for count, token in enumerate(sampled, start=1):
        total = len(output_ids) + count
        if token == eos_id and total >= min_tokens:
            return num_computed, output_ids + sampled[:count], "stop"
        if total >= max_tokens:
            return num_computed, output_ids + sampled[:count], "length"
    return num_computed, output_ids + sampled, None


def booking_that_forgets_the_bonus(num_computed, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens):
    """rejected = drafts - sampled: the token that is no draft is counted as an accepted one."""
    rejected = len(drafts) - len(sampled) if drafts else 0
    return booking_without_rejection(
        num_computed - rejected, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens
    )


def booking_that_rejects_without_drafts(num_computed, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens):
    """Right for every step that samples; a chunk of a prompt brings nothing, and loses a token."""
    num_computed -= len(drafts) + 1 - len(sampled)
    return booking_without_rejection(num_computed, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens)


def booking_that_looks_at_the_end_only(num_computed, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens):
    """Appends everything, then looks at the last token."""
    num_computed -= len(drafts) + 1 - len(sampled) if drafts else 0
    output_ids = output_ids + sampled
    if sampled and sampled[-1] == eos_id and len(output_ids) >= min_tokens:
        return num_computed, output_ids, "stop"
    return num_computed, output_ids, "length" if len(output_ids) >= max_tokens else None


def booking_with_length_first(num_computed, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens):
    """A stop on the very last token is reported as a length."""
    num_computed -= len(drafts) + 1 - len(sampled) if drafts else 0
    output_ids = list(output_ids)
    for token in sampled:
        output_ids.append(token)
        if len(output_ids) >= max_tokens:
            return num_computed, output_ids, "length"
        if token == eos_id and len(output_ids) >= min_tokens:
            return num_computed, output_ids, "stop"
    return num_computed, output_ids, None


def booking_without_a_minimum(num_computed, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens):
    """min_tokens is not looked at."""
    num_computed -= len(drafts) + 1 - len(sampled) if drafts else 0
    return booking_without_rejection(num_computed, output_ids, drafts, sampled, eos_id, 0, max_tokens)


def booking_that_drops_the_stop(num_computed, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens):
    """The token that ends the text is left out."""
    num_computed -= len(drafts) + 1 - len(sampled) if drafts else 0
    for count, token in enumerate(sampled):
        if token == eos_id:
            return num_computed, output_ids + sampled[:count], "stop"
    return num_computed, output_ids + sampled, None


def booking_in_place(num_computed, output_ids, drafts, sampled, eos_id, min_tokens, max_tokens):
    """Appends to the caller's own list."""
    output_ids.extend(sampled)
    return num_computed - (len(drafts) + 1 - len(sampled)), output_ids, None


def victim_with_the_most_blocks(running, policy):
    """The exhibit itself."""
    return max(running, key=lambda candidate: candidate.num_blocks).name


def victim_at_the_front(running, policy):
    """The oldest has had its turn."""
    return running[0].name


def victim_at_the_end(running, policy):
    """fcfs whatever the policy."""
    return running[-1].name


def victim_by_urgency(running, policy):
    """priority whatever the policy: right as long as all are equally urgent and nobody came back."""
    return max(running, key=lambda candidate: (candidate.priority, candidate.arrival)).name


def victim_by_priority_and_place(running, policy):
    """Among equals the last of the list, which is not always the last to arrive."""
    if policy == "fcfs":
        return running[-1].name
    worst = max(candidate.priority for candidate in running)
    return [candidate for candidate in running if candidate.priority == worst][-1].name


def victim_that_is_most_urgent(running, policy):
    """Takes a large number for a high rank."""
    if policy == "fcfs":
        return running[-1].name
    return min(running, key=lambda candidate: (candidate.priority, -candidate.arrival)).name


def victim_as_a_row(running, policy):
    """Returns the candidate, not its name."""
    return running[-1]


def plan_without_budget_and_cursor(running, scheduled, budget, cursor, victim):
    """The exhibit itself."""
    running = [name for name in running if name != victim]
    scheduled = {name: count for name, count in scheduled.items() if name != victim}
    return running, scheduled, budget, cursor


def plan_without_cursor(running, scheduled, budget, cursor, victim):
    """The first half of the cure."""
    budget += scheduled.get(victim, 0)
    return plan_without_budget_and_cursor(running, scheduled, budget, cursor, victim)


def plan_with_the_cursor_always_back(running, scheduled, budget, cursor, victim):
    """Moves the cursor whoever gives way."""
    return plan_without_cursor(running, scheduled, budget, cursor - 1, victim)


def plan_with_the_cursor_of_the_scheduled(running, scheduled, budget, cursor, victim):
    """Takes "has tokens in this step" for "stands before the cursor"."""
    return plan_without_cursor(running, scheduled, budget, cursor - (victim in scheduled), victim)


def plan_with_the_cursor_at_most(running, scheduled, budget, cursor, victim):
    """Moves the cursor also when the victim stands at it."""
    return plan_without_cursor(running, scheduled, budget, cursor - (running.index(victim) <= cursor), victim)


def plan_with_one_token_back(running, scheduled, budget, cursor, victim):
    """Takes every victim for a decode."""
    cursor -= running.index(victim) < cursor
    budget += victim in scheduled
    return plan_without_budget_and_cursor(running, scheduled, budget, cursor, victim)


def plan_that_keeps_the_entry(running, scheduled, budget, cursor, victim):
    """The worker is still told to compute a request without blocks."""
    cursor -= running.index(victim) < cursor
    return [name for name in running if name != victim], scheduled, budget + scheduled.get(victim, 0), cursor


def plan_in_place(running, scheduled, budget, cursor, victim):
    """Changes the caller's list and dictionary."""
    running.remove(victim)
    return running, scheduled, budget + scheduled.pop(victim, 0), cursor


def plan_that_fails_for_a_stranger(running, scheduled, budget, cursor, victim):
    """Thinks that a victim always has tokens in the step."""
    cursor -= running.index(victim) < cursor
    rest = dict(scheduled)
    budget += rest.pop(victim)
    return [name for name in running if name != victim], rest, budget, cursor


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps09.num_new_tokens": [
        (count_without_length, "12, is never computed, since no token may follow it: 2 tokens at most, got 4"),
        (count_to_the_last_position, "12, is never computed, since no token may follow it: 2 tokens at most, got 3"),
        (count_below_zero, "a count cannot be negative: -3 tokens are left to compute"),
        (count_at_least_one, "0 tokens of it (drafts included) are not in the cache yet"),
        (count_with_zero_as_a_limit, "a threshold of 0 means that there is none"),
        (count_of_the_threshold, "5 tokens of it (drafts included) are not in the cache yet"),
        (count_without_drafts, "4 tokens of it (drafts included) are not in the cache yet, and the limits allow 4"),
        (count_by_division, "the answer is a float (12.0)"),
    ],
    "ps09.scheduled_drafts": [
        (drafts_by_a_bare_slice, "the step ends before it, so no draft is among them (s = -2)"),
        (drafts_one_too_many, "1 draft after it belong"),
        (drafts_all_or_none, "the first ones, in order"),
        (drafts_always_after_one, "the step ends before it, so no draft is among them (s = -30)"),
        (drafts_of_the_end, "the first ones, in order"),
        (drafts_counted, "the answer is a int, not a list of drafts"),
    ],
    "ps09.plan_step": [
        (step_that_stops_at_zero, "b has 1 token to compute and there is budget for it: it must not be passed over"),
        (step_with_victims_at_the_back, "who gave way goes to the front of the queue"),
        (step_with_victims_turned_round, "in the old order: ['b', 'c', 'd', 'e'], got ['d', 'c', 'b', 'e']"),
        (step_that_admits_after_a_preemption, "c gave way in this step, so nobody is admitted in it; d was"),
        (step_that_counts_seqs_anew, "4 requests run, but max_num_seqs is 3: it counts all who run"),
        (step_that_passes_the_head_by, "c can't be admitted: no budget, no blocks, or somebody before it has to wait"),
        (step_without_a_budget, "the step has 12 tokens, but its budget is 10"),
        (step_that_takes_the_first, "the last of those that run gives way: c; got a"),
        (step_of_rows, "running holds a Row; requests are listed by their names"),
        (step_that_empties_the_queue, "it changed its input waiting"),
    ],
    "ps09.book_tokens": [
        (booking_without_rejection, "2 rejected, so num_computed is 14 - 2 = 12, got 14"),
        (booking_that_forgets_the_bonus, "2 rejected, so num_computed is 14 - 2 = 12, got 13"),
        (booking_that_rejects_without_drafts, "no drafts were scheduled, so none was rejected: num_computed stays 40"),
        (booking_that_looks_at_the_end_only, "the request ends with output 3 (token 2); what follows it is dropped"),
        (booking_with_length_first, "the reason is 'stop', got 'length'"),
        (booking_without_a_minimum, "the reason is None, got 'stop'"),
        (booking_that_drops_the_stop, "output_ids should be [90, 5, 2]"),
        (booking_in_place, "it changed its input output_ids to [90, 7]"),
    ],
    "ps09.choose_victim": [
        (victim_with_the_most_blocks, "b was admitted last and gives way; a was admitted before it"),
        (victim_at_the_front, "b was admitted last and gives way; a was admitted before it"),
        (victim_at_the_end, "b (priority 9) is less urgent than c (priority 1)"),
        (victim_by_urgency, "b was admitted last and gives way; a was admitted before it"),
        (victim_by_priority_and_place, "b and a are equally urgent (priority 5), and b arrived later"),
        (victim_that_is_most_urgent, "b (priority 9) is less urgent than a (priority 0)"),
        (victim_as_a_row, "the answer is a Candidate"),
    ],
    "ps09.withdraw": [
        (plan_without_budget_and_cursor, "the step had given a 4 of its budget: 7 is left now, got 3"),
        (plan_without_cursor, "c is now at 1, but the cursor is 2, so that somebody would be passed over"),
        (
            plan_with_the_cursor_always_back,
            "b is now at 1, but the cursor is 0, so that somebody would be served twice",
        ),
        (plan_with_the_cursor_of_the_scheduled, "and a before it: c is now at 1, but the cursor is 2"),
        (plan_with_the_cursor_at_most, "c itself stood at the cursor: nobody before it has moved, the cursor stays 2"),
        (plan_with_one_token_back, "the step had given a 4 of its budget: 7 is left now, got 4"),
        (plan_that_keeps_the_entry, "a has no blocks to compute in, and nothing changes for the others: {'b': 1}"),
        (plan_in_place, "it changed its input running to ['b', 'c', 'd']"),
        (plan_that_fails_for_a_stranger, "KeyError: 'd'"),
    ],
}
