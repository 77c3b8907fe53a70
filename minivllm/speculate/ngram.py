"""Prompt lookup (Saxena 2023): what followed the same few tokens earlier in this request may follow them again.

    tokens   1 2 3 4 2 3      the suffix [2 3] stands at 1 too: what followed it there was [4 2 3]

The longest suffix of min_n .. max_n tokens that occurs earlier counts, at its earliest place; the two may overlap.
No model, no cache, no probabilities: it pays where a text repeats itself or its prompt.
"""

import numpy as np

from minivllm.speculate.proposer import Drafts, VerifiedStep


class NgramProposer:
    """Looks drafts up in each request's own tokens.

    Args:
        k: most drafts for a request.
        min_n, max_n: shortest and longest suffix, in tokens.
    """

    def __init__(self, k: int, min_n: int, max_n: int) -> None:
        self.k, self.min_n, self.max_n = k, min_n, max_n

    def propose(self, step: VerifiedStep) -> Drafts:
        rows = step.rows
        if not len(rows):
            return Drafts()
        num_tokens = step.batch.num_tokens[rows]
        tokens = step.batch.token_ids[rows, : num_tokens.max()]
        start, count = look_up(tokens, num_tokens, self.min_n, self.max_n, self.k)
        count = np.minimum(count, step.most_drafts(self.k))
        states = [step.inputs.states[index] for index in step.inputs.sampled]
        return Drafts(
            {
                state.req_id: tokens[index, start[index] : start[index] + count[index]].tolist()
                for index, state in enumerate(states)
                if count[index] > 0
            }
        )


def look_up(
    tokens: np.ndarray, num_tokens: np.ndarray, min_n: int, max_n: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where to copy from.

    Args:
        tokens: [B, L] int32; row i counts up to num_tokens[i].
        num_tokens: [B] int64.

    Returns:
        start, count [B]: copy tokens[i, start : start + count], at most k; count is 0 where nothing was found.
    """
    num_rows, length = tokens.shape
    row, place = np.arange(num_rows), np.arange(length)
    # matched[i, e]: how many tokens up to place e equal the last ones of row i, counted backwards, at most max_n
    matched = np.zeros((num_rows, length), dtype=np.int64)
    still = place < num_tokens[:, None] - 1
    for back in range(max_n):
        last = tokens[row, np.maximum(num_tokens - 1 - back, 0)]
        equal = np.zeros((num_rows, length), dtype=bool)
        equal[:, back:] = tokens[:, : length - back] == last[:, None]
        still &= equal
        if not still.any():
            break
        matched += still
    longest = matched.max(axis=1)
    start = matched.argmax(axis=1) + 1  # the first of equals: the earliest place
    count = np.where(longest >= min_n, np.minimum(num_tokens - start, k), 0)
    return start, count
