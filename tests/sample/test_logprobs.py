"""Log-probabilities as they are reported: raw, the token itself first, then the best ones in order."""

import pytest
import torch

from minivllm.sample.logprobs import gather_logprobs


def test_entries_hold_the_token_itself_then_the_best_ones_best_first():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [4.0, 1.0, 2.0, 3.0]])
    first, second = gather_logprobs(logits, torch.tensor([3, 0]), [3, 2])
    expected = logits.log_softmax(-1)
    assert first.token_ids == [3, 1, 2, 0] and first.rank == 4
    assert first.logprobs == pytest.approx(expected[0, [3, 1, 2, 0]].tolist())
    assert second.token_ids == [0, 0, 3] and second.rank == 1
    assert second.logprobs == pytest.approx(expected[1, [0, 0, 3]].tolist())


def test_zero_alternatives_leave_the_token_itself():
    (entry,) = gather_logprobs(torch.tensor([[1.0, 3.0]]), torch.tensor([0]), [0])
    assert entry.token_ids == [0] and len(entry.logprobs) == 1 and entry.rank == 2


def test_more_alternatives_than_tokens_are_all_tokens():
    (entry,) = gather_logprobs(torch.tensor([[1.0, 3.0]]), torch.tensor([0]), [20])
    assert entry.token_ids == [0, 1, 0]


def test_tokens_that_tie_share_the_better_rank():
    entries = gather_logprobs(torch.zeros(2, 3), torch.tensor([0, 2]), [1, 1])
    assert [entry.rank for entry in entries] == [1, 1]


def test_half_precision_logits_are_normalised_in_float32():
    logits = torch.linspace(-20, 20, 1000).to(torch.bfloat16)[None]
    (entry,) = gather_logprobs(logits, torch.tensor([0]), [0])
    assert entry.logprobs[0] == pytest.approx(logits.double().log_softmax(-1)[0, 0].item(), rel=1e-5)
