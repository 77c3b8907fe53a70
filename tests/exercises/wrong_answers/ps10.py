"""What students write for set 10 when it goes wrong, and what the checker must tell them."""


def ngram_from_the_right(tokens, min_n, max_n, k):
    """Takes the latest place, not the earliest."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + k]
    return []


def ngram_shortest_first(tokens, min_n, max_n, k):
    """Tries short suffixes first."""
    for n in range(min_n, max_n + 1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + k]
    return []


def ngram_that_finds_itself(tokens, min_n, max_n, k):
    """The suffix is always found: where it stands."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n + 1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + k]
    return []


def ngram_without_overlap(tokens, min_n, max_n, k):
    """Looks only before the suffix."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - 2 * n + 1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + k]
    return []


def ngram_that_copies_the_suffix(tokens, min_n, max_n, k):
    """Starts to copy where the suffix starts."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start : start + k]
    return []


def ngram_without_a_limit(tokens, min_n, max_n, k):
    """Copies to the end."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n :]
    return []


def ngram_that_says_none(tokens, min_n, max_n, k):
    """Nothing found, nothing returned."""
    return ngram_from_the_right(tokens, min_n, max_n, k) or None


def _best(row):
    return row.index(max(row))


def greedy_all_rows(drafts, rows):
    """Emits the choice of every row."""
    return [_best(row) for row in rows]


def greedy_without_the_correction(drafts, rows):
    """Only accepted drafts, no token of the target's own."""
    emitted = []
    for draft, row in zip(drafts, rows, strict=False):
        if _best(row) != draft:
            break
        emitted.append(draft)
    return emitted


def greedy_without_the_bonus(drafts, rows):
    """Forgets the last row."""
    emitted = []
    for draft, row in zip(drafts, rows, strict=False):
        emitted.append(_best(row))
        if emitted[-1] != draft:
            break
    return emitted


def greedy_that_emits_the_draft(drafts, rows):
    """Emits the draft where it is wrong."""
    emitted = []
    for draft, row in zip(drafts, rows, strict=False):
        emitted.append(draft)
        if _best(row) != draft:
            return emitted
    return [*emitted, _best(rows[-1])]


def greedy_that_skips(drafts, rows):
    """Keeps every draft that fits, wherever it stands."""
    right = [draft for draft, row in zip(drafts, rows, strict=False) if _best(row) == draft]
    return [*right, _best(rows[len(right)])]


def greedy_with_the_last_of_equals(drafts, rows):
    """Ties go to the highest id."""
    emitted = []
    for j, row in enumerate(rows):
        emitted.append(max(range(len(row)), key=lambda token: (row[token], token)))
        if j == len(drafts) or emitted[-1] != drafts[j]:
            break
    return emitted


def greedy_off_by_one(drafts, rows):
    """Compares draft j with row j + 1."""
    emitted = [_best(rows[0])]
    for draft, row in zip(drafts, rows[1:], strict=False):
        if emitted[-1] != draft:
            break
        emitted.append(_best(row))
    return tuple(emitted)


def law_of_the_target(p, q):
    """The exhibit itself."""
    return list(p)


def law_without_the_sum(p, q):
    """Not normalised."""
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def law_with_negatives(p, q):
    """p - q as it is."""
    return [a - b for a, b in zip(p, q, strict=True)]


def law_that_divides_by_zero(p, q):
    """Right until p and q are equal."""
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return [value / sum(left) for value in left]


def law_of_the_absolute(p, q):
    """|p - q| instead of its positive part."""
    left = [abs(a - b) for a, b in zip(p, q, strict=True)]
    return [value / sum(left) for value in left] if sum(left) else list(p)


def law_of_zeros(p, q):
    """All zeros when nothing is left."""
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return [value / (sum(left) or 1.0) for value in left]


def law_turned_round(p, q):
    """What q has too much of."""
    left = [max(b - a, 0.0) for a, b in zip(p, q, strict=True)]
    return [value / sum(left) for value in left] if sum(left) else list(p)


def law_without_the_likely_draft(p, q):
    """Thinks of drafts that were not drawn: p with the draft's place at 0."""
    draft = q.index(max(q))
    left = [0.0 if token == draft else value for token, value in enumerate(p)]
    return [value / sum(left) for value in left] if sum(left) else list(p)


def law_in_place(p, q):
    """Changes p."""
    for token, value in enumerate(q):
        p[token] = max(p[token] - value, 0.0)
    return p


def _sample(p, q, drafts, u_accept, u_draw, accepts, law):
    from minivllm.exercises.ps10_rejection import draw

    emitted = []
    for j, d in enumerate(drafts):
        if not accepts(p[j][d], q[j][d], u_accept[j]):
            return [*emitted, draw(law(p[j], q[j], d), u_draw[j])]
        emitted.append(d)
    return [*emitted, draw(p[-1], u_draw[-1])]


def _law(p, q, d):
    from minivllm.exercises.ps10_rejection import recovered_law

    return recovered_law(p, q)


def _rule(p, q, u):
    return q > 0 and u * q < p


def sampled_with_the_target_law(p, q, drafts, u_accept, u_draw):
    """The museum piece once more: recovered from p."""
    return _sample(p, q, drafts, u_accept, u_draw, _rule, lambda p, q, d: p)


def sampled_with_at_most(p, q, drafts, u_accept, u_draw):
    """<= for <: at u = 0 it accepts what p never gives."""
    return _sample(p, q, drafts, u_accept, u_draw, lambda p, q, u: q > 0 and u * q <= p, _law)


def sampled_without_a_look_at_q(p, q, drafts, u_accept, u_draw):
    """Accepts with p alone."""
    return _sample(p, q, drafts, u_accept, u_draw, lambda p, q, u: u < p, _law)


def sampled_by_a_division(p, q, drafts, u_accept, u_draw):
    """p / q."""
    return _sample(p, q, drafts, u_accept, u_draw, lambda p, q, u: u < p / q, _law)


def sampled_without_q_above_zero(p, q, drafts, u_accept, u_draw):
    """u 0 < p holds for a draft that was never drawn."""
    return _sample(p, q, drafts, u_accept, u_draw, lambda p, q, u: u * q < p, _law)


def sampled_that_goes_on(p, q, drafts, u_accept, u_draw):
    """Goes on behind a rejected draft."""
    parts = [_sample(p[j : j + 1] * 2, q[j : j + 1], [d], [u_accept[j]], [u_draw[j]] * 2, _rule, _law)[:1]
             for j, d in enumerate(drafts)]  # fmt: skip
    return [token for part in parts for token in part] + _sample(p[-1:], [], [], [], u_draw[-1:], _rule, _law)


def sampled_without_the_bonus(p, q, drafts, u_accept, u_draw):
    """As many tokens as drafts, at most."""
    return _sample(p, q, drafts, u_accept, u_draw, _rule, _law)[: len(drafts)]


def sampled_with_a_greedy_bonus(p, q, drafts, u_accept, u_draw):
    """The bonus token is the likeliest one."""
    emitted = _sample(p, q, drafts, u_accept, u_draw, _rule, _law)
    return [*drafts, p[-1].index(max(p[-1]))] if len(emitted) > len(drafts) else emitted


def sampled_without_the_draft(p, q, drafts, u_accept, u_draw):
    """Takes every draft for one that was not drawn."""
    from minivllm.exercises.ps10_rejection import recovered_law

    def law(p, q, d):
        return recovered_law(p, [float(token == d) for token in range(len(p))])

    return _sample(p, q, drafts, u_accept, u_draw, _rule, law)


def _choose(speed_ups):
    return speed_ups.index(max(speed_ups)), max(speed_ups)


def best_by_the_closed_form(acceptance, cost, largest):
    """(1 - a^(k+1)) / (1 - a), which a = 1 does not like."""
    return _choose(
        [(1 - acceptance ** (k + 1)) / (1 - acceptance) / (1 + k * cost) for k in range(largest + 1)]
    )  # fmt: skip


def best_of_the_last_equals(acceptance, cost, largest):
    """Takes the largest of equals."""
    speed_ups = [sum(acceptance**j for j in range(k + 1)) / (1 + k * cost) for k in range(largest + 1)]
    return max(range(largest + 1), key=lambda k: (speed_ups[k], k)), max(speed_ups)


def best_without_zero(acceptance, cost, largest):
    """Always drafts something."""
    speed_ups = [sum(acceptance**j for j in range(k + 1)) / (1 + k * cost) for k in range(1, largest + 1)]
    return 1 + speed_ups.index(max(speed_ups)), max(speed_ups)


def best_without_the_bonus(acceptance, cost, largest):
    """a + a^2 + ...: the token of the target's own is missing."""
    return _choose([sum(acceptance**j for j in range(1, k + 1)) / (1 + k * cost) for k in range(largest + 1)])


def best_with_independent_drafts(acceptance, cost, largest):
    """1 + k a: as if a draft counted whatever became of those before it."""
    return _choose([(1 + k * acceptance) / (1 + k * cost) for k in range(largest + 1)])


def best_without_costs(acceptance, cost, largest):
    """Tokens a step, at any price."""
    return largest, sum(acceptance**j for j in range(largest + 1))


def best_without_the_target(acceptance, cost, largest):
    """Forgets that the target costs a step."""
    return _choose([sum(acceptance**j for j in range(k + 1)) / (k * cost or 1) for k in range(largest + 1)])


def best_k_alone(acceptance, cost, largest):
    """Returns k without the speed-up."""
    return best_of_the_last_equals(acceptance, cost, largest)[0]


def named_with_drafts(num_named, num_tokens, num_computed, n, block_size):
    """The exhibit itself."""
    return list(range(num_named, (num_computed + n) // block_size))


def named_ahead_of_the_step(num_named, num_tokens, num_computed, n, block_size):
    """All known tokens, whether they are computed or not."""
    return list(range(num_named, num_tokens // block_size))


def named_again(num_named, num_tokens, num_computed, n, block_size):
    """Names the whole table anew."""
    return list(range(min(num_computed + n, num_tokens) // block_size))


def named_one_short(num_named, num_tokens, num_computed, n, block_size):
    """Never trusts the newest token."""
    return list(range(num_named, min(num_computed + n, num_tokens - 1) // block_size))


def named_when_begun(num_named, num_tokens, num_computed, n, block_size):
    """A block with a token in it."""
    return list(range(num_named, -(-min(num_computed + n, num_tokens) // block_size)))


def named_in_this_step(num_named, num_tokens, num_computed, n, block_size):
    """Counts from the first block the step touches."""
    return list(range(num_computed // block_size, min(num_computed + n, num_tokens) // block_size))


def named_as_a_range(num_named, num_tokens, num_computed, n, block_size):
    """Not a list."""
    return range(num_named, min(num_computed + n, num_tokens) // block_size)


# For each exercise: the answer, and words of the message that it must get.
WRONG_ANSWERS = {
    "ps10.propose_ngram": [
        (ngram_from_the_right, "it stands first at 0"),
        (ngram_shortest_first, "the longest suffix that stands earlier, too, has 2 tokens: [1, 2]"),
        (ngram_that_finds_itself, "4 tokens at most, is [4, 2, 3]; got []"),
        (ngram_without_overlap, "has 3 tokens: [7, 7, 7]; it stands first at 0"),
        (ngram_that_copies_the_suffix, "is [4, 2, 3]; got [2, 3, 4, 2]"),
        (ngram_without_a_limit, "2 tokens at most, is [4, 2]; got [4, 2, 3]"),
        (ngram_that_says_none, "it returned nothing"),
    ],
    "ps10.verify_greedy": [
        (greedy_all_rows, "the rows after it have read a wrong token and are void, so it ends here"),
        (greedy_without_the_correction, "draft 1 is 6, but the target says 3: that token is emitted, too"),
        (greedy_without_the_bonus, "all 3 drafts are right, so the last row gives a token more (the bonus)"),
        (greedy_that_emits_the_draft, "row 1 is largest at token 3; got token 6"),
        (greedy_that_skips, "row 1 is largest at token 3; got token 7"),
        (greedy_with_the_last_of_equals, "row 0 is largest at token 0, the lowest of equals; got token 1"),
        (greedy_off_by_one, "the answer is a tuple, not a list of tokens"),
    ],
    "ps10.recovered_law": [
        (law_of_the_target, "token 0 lacks p - q = 0.3, a share of 0.75 of what is missing in all; got 0.5"),
        (law_without_the_sum, "these are max(p - q, 0), but they sum to 0.4: divide by that"),
        (law_with_negatives, "token 1 has the probability -0.4: where q is larger than p it must be 0"),
        (law_that_divides_by_zero, "ZeroDivisionError"),
        (law_of_the_absolute, "token 0 lacks p - q = 0.3, a share of 0.75"),
        (law_of_zeros, "p and q are equal, so nothing of p - q is left"),
        (law_turned_round, "token 0 lacks p - q = 0.3, a share of 0.75 of what is missing in all; got 0"),
        (law_without_the_likely_draft, "token 0 lacks p - q = 0.3, a share of 0.75"),
        (law_in_place, "it changed its input p"),
    ],
    "ps10.verify_sampled": [
        (sampled_with_the_target_law, "drawn by u = 0.5 from [0.6667, 0.0, 0.3333, 0.0]"),
        (sampled_with_at_most, "draft 0 (token 3) is rejected: u q(d) = 0 x 0.125 and p(d) = 0"),
        (sampled_without_a_look_at_q, "draft 0 (token 1) is accepted: u q(d) = 0.25 x 0.5 and p(d) = 0.25"),
        (sampled_by_a_division, "ZeroDivisionError"),
        (sampled_without_q_above_zero, "draft 0 (token 1) is rejected: q(d) = 0, so it cannot have been drawn"),
        (sampled_that_goes_on, "from [0.6667, 0.0, 0.3333, 0.0], and there it ends"),
        (sampled_without_the_bonus, "all drafts are accepted, so a bonus token is drawn from the last row of p"),
        (sampled_with_a_greedy_bonus, "a bonus token is drawn from the last row of p: 1"),
        (sampled_without_the_draft, "In its place comes token"),
    ],
    "ps10.best_k": [
        (best_by_the_closed_form, "ZeroDivisionError"),
        (best_of_the_last_equals, "are equally fast: take the smaller one"),
        (best_without_zero, "k = 0 is faster: 1 times plain decoding"),
        (best_without_the_bonus, "a step emits 1.75 tokens on average"),
        (best_with_independent_drafts, "a step emits"),
        (best_without_costs, "costs 2 plain steps"),
        (best_without_the_target, "costs 1.25 plain steps"),
        (best_k_alone, "the answer is a int, not the pair (k, speed-up)"),
    ],
    "ps10.blocks_to_name": [
        (named_with_drafts, "only 7 tokens are known: from position 7 on it holds drafts"),
        (named_ahead_of_the_step, "and the step computes up to 11: it isn't full"),
        (named_again, "entry 0 has its name already (num_named = 1)"),
        (named_one_short, "entry 1 is full after the step (up to position 7), all of it known tokens: it gets a name"),
        (named_when_begun, "entry 2 holds positions 8 to 11, and the step computes up to 9: it isn't full"),
        (named_in_this_step, "entry 1 has its name already (num_named = 2)"),
        (named_as_a_range, "the answer is a range, not a list of table entries"),
    ],
}
