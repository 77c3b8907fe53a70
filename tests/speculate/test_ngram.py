"""Prompt lookup beside the obvious loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.speculate.ngram import look_up


def naive(tokens: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + k]
    return []


def found(rows: list[list[int]], min_n: int, max_n: int, k: int) -> list[list[int]]:
    padded = np.full((len(rows), max(map(len, rows)) + 2), 1, dtype=np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    start, count = look_up(padded, np.array([len(row) for row in rows]), min_n, max_n, k)
    return [padded[i, start[i] : start[i] + count[i]].tolist() for i in range(len(rows))]


@pytest.mark.parametrize(
    ("tokens", "min_n", "max_n", "k", "expected"),
    [
        ([1, 2, 3, 4, 2, 3], 2, 3, 4, [4, 2, 3]),
        ([1, 2, 3, 4, 2, 3], 2, 3, 2, [4, 2]),
        ([1, 2, 3, 4, 2, 3], 3, 3, 4, []),
        ([7, 7, 7, 7], 1, 3, 4, [7]),  # overlap: the suffix of three begins one place earlier
        ([5, 1, 5, 2, 5], 1, 2, 2, [1, 5]),  # the earliest of two places
        ([1, 2, 9, 2, 1, 2, 8, 0, 1, 2], 1, 2, 1, [9]),
        ([4], 1, 3, 3, []),
    ],
)
def test_worked_examples(tokens, min_n, max_n, k, expected):
    assert found([tokens], min_n, max_n, k) == [expected] == [naive(tokens, min_n, max_n, k)]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_a_batch_gives_what_the_loop_gives_each_row(rows, min_n, more, k):
    assert found(rows, min_n, min_n + more, k) == [naive(row, min_n, min_n + more, k) for row in rows]
