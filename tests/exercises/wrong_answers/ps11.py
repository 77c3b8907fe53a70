"""What students get wrong about the MTP layer's inputs: one function for each mistake."""

from minivllm.exercises import find


def pass_unshifted(tokens, computed, scheduled, rejected):
    """The target's own ids once more."""
    positions = list(range(computed, computed + scheduled - rejected))
    return [tokens[p] for p in positions], positions


def pass_with_shifted_positions(tokens, computed, scheduled, rejected):
    """Positions of the tokens."""
    positions = list(range(computed + 1, computed + 1 + scheduled - rejected))
    return [tokens[p] for p in positions], positions


def pass_over_all_rows(tokens, computed, scheduled, rejected):
    """Rejected rows too."""
    positions = list(range(computed, computed + scheduled))
    return [tokens[p + 1] for p in positions if p + 1 < len(tokens)], positions


def pass_with_the_newest(tokens, computed, scheduled, rejected):
    """Always ends with the newest token: right unless the step is a chunk of a prompt."""
    positions = list(range(computed, computed + scheduled - rejected))
    return [*tokens[computed + 1 : computed + len(positions)], tokens[-1]], positions


def pass_from_zero(tokens, computed, scheduled, rejected):
    """Forgets what was computed before."""
    positions = list(range(scheduled - rejected))
    return [tokens[p + 1] for p in positions], positions


def rows_from_the_end(scheduled, rejected):
    """The exhibit itself."""
    rows, end = [], 0
    for count, wrong in zip(scheduled, rejected, strict=True):
        end += count
        rows += range(end - (count - wrong), end)
    return rows


def rows_close_together(scheduled, rejected):
    """The next request begins where the kept rows end."""
    rows, start = [], 0
    for count, wrong in zip(scheduled, rejected, strict=True):
        rows += range(start, start + count - wrong)
        start += count - wrong
    return rows


def rows_all(scheduled, rejected):
    return list(range(sum(scheduled)))


def rows_without_the_newest(scheduled, rejected):
    """Drafts only: drops the row of the newest token."""
    rows, start = [], 0
    for count, wrong in zip(scheduled, rejected, strict=True):
        rows += range(start + 1, start + count - wrong)
        start += count
    return rows


def rows_in_steps_of_the_first(scheduled, rejected):
    """As if all requests had as many rows as the first one."""
    pairs = enumerate(zip(scheduled, rejected, strict=True))
    return [scheduled[0] * i + row for i, (count, wrong) in pairs for row in range(count - wrong)]


def rows_nested(scheduled, rejected):
    """A list for each request."""
    return [list(range(count - wrong)) for count, wrong in zip(scheduled, rejected, strict=True)]


def _draft(layer, ids, positions, hidden, k, step=1, feed=True, first=-1):
    token, position, state, drafts = ids[first], positions[first], hidden[first], []
    for _ in range(k):
        own, token = layer(token, position, state)
        state, position = own if feed else state, position + step
        drafts.append(token)
    return drafts


def draft_at_one_position(layer, ids, positions, hidden, k):
    return _draft(layer, ids, positions, hidden, k, step=0)


def draft_with_the_targets_state(layer, ids, positions, hidden, k):
    """Gives the target's hidden state to every pass."""
    return _draft(layer, ids, positions, hidden, k, feed=False)


def draft_from_the_first_row(layer, ids, positions, hidden, k):
    return _draft(layer, ids, positions, hidden, k, first=0)


def draft_with_the_sampled_token(layer, ids, positions, hidden, k):
    """Counts the token that the target sampled."""
    return [ids[-1], *_draft(layer, ids, positions, hidden, max(k - 1, 0))]


def draft_that_reads_one_token(layer, ids, positions, hidden, k):
    """Never reads its own guesses."""
    drafts, state = [], hidden[-1]
    for index in range(k):
        state, guess = layer(ids[-1], positions[-1] + index, state)
        drafts.append(guess)
    return drafts


def draft_at_least_once(layer, ids, positions, hidden, k):
    return _draft(layer, ids, positions, hidden, max(k, 1))


def draft_once_a_layer(layer, ids, positions, hidden, k):
    """One pass for each layer of the checkpoint."""
    return _draft(layer, ids, positions, hidden, min(k, 1))


def positions_that_stay(known, k, max_model_len):
    """The exhibit itself."""
    return [known - 2] * max(min(k, max_model_len - 1 - known), 0)


def positions_of_the_tokens(known, k, max_model_len):
    return [known - 1 + index for index in range(max(min(k, max_model_len - 1 - known), 0))]


def positions_without_an_end(known, k, max_model_len):
    """No look at max_model_len."""
    return [known - 2 + index for index in range(k)]


def positions_with_a_draft_at_the_end(known, k, max_model_len):
    """A draft in the last place, with no room for the token after it."""
    return [known - 2 + index for index in range(max(min(k, max_model_len - known), 0))]


def positions_with_a_negative_room(known, k, max_model_len):
    """Slices with a number that may be negative."""
    return [known - 2 + index for index in range(k)][: max_model_len - 1 - known]


def reads_with_the_newest_as_a_draft(emitted, guesses, room):
    """The exhibit itself."""
    drafts = [emitted[-1], *guesses][:room]
    return [emitted[-1], *drafts], drafts


def reads_drafts_alone(emitted, guesses, room):
    return guesses[:room], guesses[:room]


def reads_all_that_was_emitted(emitted, guesses, room):
    """Accepted drafts were read already."""
    return [*emitted, *guesses[:room]], guesses[:room]


def reads_all_guesses(emitted, guesses, room):
    """No look at the room."""
    return [emitted[-1], *guesses], list(guesses)


def reads_with_the_first_emitted(emitted, guesses, room):
    return [emitted[0], *guesses[:room]], guesses[:room]


def reads_without_repetitions(emitted, guesses, room):
    """Takes a guess that is equal to the newest token for the newest token."""
    drafts = [guess for guess in guesses[:room] if guess != emitted[-1]]
    return [emitted[-1], *drafts], drafts


def reads_within_the_room(emitted, guesses, room):
    """Counts the newest token against the drafts' room."""
    return [emitted[-1], *guesses][:room], guesses[: max(room - 1, 0)]


def _shares(steps, count, extra=1):
    most = max((sent for sent, _ in steps), default=0)
    tokens = sum(accepted + extra for _, accepted in steps) / len(steps) if steps else 0.0
    return [count(index) for index in range(most)], tokens


def acceptance_of_all_steps(steps):
    """As if every draft were looked at in every step."""
    return _shares(steps, lambda j: sum(a > j for _, a in steps) / len(steps))


def acceptance_that_divides_by_zero(steps):
    def share(j):
        return sum(a > j for _, a in steps) / sum(s > j and a >= j for s, a in steps)

    return _shares(steps, share)


def acceptance_of_unsent_drafts(steps):
    """Counts steps that had no such draft."""

    def share(j):
        reached = sum(a >= j for _, a in steps)
        return sum(a > j for _, a in steps) / reached if reached else 0.0

    return _shares(steps, share)


def acceptance_without_the_targets_token(steps):
    return find("ps11.acceptance").oracle(steps)[0], sum(a for _, a in steps) / max(len(steps), 1)


def acceptance_over_all_drafts(steps):
    """One share for all."""
    sent = sum(s for s, _ in steps)
    rate = sum(a for _, a in steps) / sent if sent else 0.0
    return _shares(steps, lambda j: rate)


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps11.first_pass": [
        (pass_unshifted, "at position 0 the layer reads token 1 of the text, 101; got 100"),
        (pass_with_shifted_positions, "positions are those of the hidden states, not of the tokens: one less"),
        (pass_over_all_rows, "of the 4 rows from position 4 on the last 2 are rejected, so positions are [4, 5]"),
        (pass_with_the_newest, "at position 2 the layer reads token 3 of the text, 103; got 104"),
        (pass_from_zero, "of the 4 rows from position 4 on"),
    ],
    "ps11.kept_rows": [
        (rows_from_the_end, "row 2 (row 2 of the 4 of request 0) has read a rejected draft"),
        (rows_close_together, "row 2 (row 2 of the 3 of request 0) has read a rejected draft"),
        (rows_all, "row 2 (row 2 of the 4 of request 0) has read a rejected draft"),
        (rows_without_the_newest, "row 0 (row 0 of the 4 of request 0) has read an accepted token and is missing"),
        (rows_in_steps_of_the_first, "row 4 (row 1 of the 3 of request 2) has read a rejected draft"),
        (rows_nested, "[0, 1] is none of the 4 rows of the step"),
    ],
    "ps11.draft": [
        (draft_at_one_position, "draft 2: pass 2 reads token"),
        (draft_with_the_targets_state, "with the output of pass 1"),
        (draft_from_the_first_row, "draft 1: pass 1 reads token 6 at position 5 with the target's hidden state, 50"),
        (draft_with_the_sampled_token, "6 is the last token that pass 1 reads: it is known, and no draft"),
        (draft_that_reads_one_token, "draft 2: pass 2 reads token"),
        (draft_at_least_once, "k = 0, so 0 drafts; got 1"),
        (draft_once_a_layer, "k = 3, so 3 drafts; got 1"),
    ],
    "ps11.pass_positions": [
        (positions_that_stay, "pass 2 reads at position 4, not at 3 again: there it would overwrite what pass 1"),
        (positions_of_the_tokens, "pass 1 reads at position 3: that of its hidden state; got 4"),
        (positions_without_an_end, "so 2 drafts would fit, and k = 3: number of passes 2, got 3"),
        (positions_with_a_draft_at_the_end, "a draft leaves room for one token after it"),
        (positions_with_a_negative_room, "so 0 drafts would fit, and k = 3: number of passes 0, got 2"),
    ],
    "ps11.next_reads": [
        (reads_with_the_newest_as_a_draft, "104 was emitted by the target itself: it is known, and not a draft"),
        (reads_drafts_alone, "the step reads the newest token, 104, and then the drafts"),
        (reads_all_that_was_emitted, "205 was read by a step before: the next one begins with the newest token, 306"),
        (reads_all_guesses, "there is room for 2 drafts, not for 3"),
        (reads_with_the_first_emitted, "the step reads the newest token, 306, and then the drafts"),
        (reads_without_repetitions, "drafts are the first of the layer's guesses, at most 2: [104, 104]; got []"),
        (reads_within_the_room, "drafts are the first of the layer's guesses, at most 3"),
    ],
    "ps11.acceptance": [
        (acceptance_of_all_steps, "draft 2 was looked at in 3 steps"),
        (acceptance_that_divides_by_zero, "ZeroDivisionError"),
        (acceptance_of_unsent_drafts, "draft 2 was looked at in 2 steps"),
        (acceptance_without_the_targets_token, "a step emits its accepted drafts and one token more: 2.25 on average"),
        (acceptance_over_all_drafts, "draft 1 was looked at in 4 steps"),
    ],
}
