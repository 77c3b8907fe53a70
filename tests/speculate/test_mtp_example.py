"""What is in draft_token_ids? The worked example, with a scripted target and a scripted MTP layer, k = 3.

Tokens are named by their position: p0 is 100, t4 is 104, d5 is 205 (a draft), x6 is 306 (what the target says instead).
Hidden states are numbers: the target's of position i is i, and each pass of the layer adds 1000.
"""

import numpy as np
import pytest
import torch

from minivllm.engine.messages import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.forward_context import ForwardContext
from minivllm.sampling_params import SamplingParams
from minivllm.speculate.draft_model import DraftModelProposer
from minivllm.speculate.mtp import MTPProposer
from minivllm.speculate.proposer import VerifiedStep
from minivllm.worker.batch import PersistentBatch
from minivllm.worker.inputs import prepare_inputs

K, VOCAB_SIZE, MAX_MODEL_LEN, BLOCKS = 3, 512, 32, [5, 2, 7, 1]
CPU = torch.device("cpu")


class ScriptedCache:
    device = CPU

    def context(self, attention) -> ForwardContext:
        return ForwardContext(attention, None, {})


class ScriptedLayer:
    """Writes down what it reads, and answers with the token of its last row's position + shift."""

    def __init__(self, shift: int) -> None:
        self.shift, self.passes = shift, []

    def __call__(self, input_ids, positions, hidden=None):
        hidden = torch.zeros(len(input_ids), 1) if hidden is None else hidden
        self.passes.append((input_ids.tolist(), positions.tolist(), hidden[:, 0].tolist()))
        return torch.stack((hidden[:, 0] + 1000, positions.float()), 1)

    def compute_logits(self, hidden):
        ids = (hidden[:, 1] + self.shift).long() + 200
        return torch.nn.functional.one_hot(ids, VOCAB_SIZE).float()


class Run:
    """One request with the prompt p0 .. p3, step by step."""

    def __init__(self, make_proposer, shift: int, max_model_len: int = MAX_MODEL_LEN) -> None:
        self.layer = ScriptedLayer(shift)
        self.proposer = make_proposer(K, self.layer, ScriptedCache(), False)
        self.batch = PersistentBatch(2, MAX_MODEL_LEN, 8)
        self.max_model_len = max_model_len
        self.computed, self.drafts = 0, []

    def step(self, count: int, emitted: list[int]) -> list[int]:
        """The target computes `count` tokens (the last drafts among them) and emits these; returns the new drafts."""
        message = SchedulerOutput(num_scheduled_tokens={"r": count})
        if "r" not in self.batch.states:
            message.scheduled_new_reqs = [
                NewRequestData("r", [100, 101, 102, 103], SamplingParams(), frozenset(), BLOCKS, 0)
            ]
        else:
            message.scheduled_cached_reqs = CachedRequestData(["r"], [[]], [self.computed])
        if self.drafts:
            message.scheduled_spec_decode_tokens = {"r": self.drafts}
        self.batch.update_states(message)
        inputs = prepare_inputs(self.batch, message, CPU, K)
        accepted_rows = inputs.num_scheduled.copy()
        if emitted:
            accepted_rows[0] -= len(self.drafts) + 1 - len(emitted)
            self.batch.append_tokens(inputs.rows, np.array([emitted]), np.array([len(emitted)]))
        hidden = inputs.positions[:, None].float()
        self.layer.passes = []
        step = VerifiedStep(self.batch, inputs, hidden, accepted_rows, self.max_model_len)
        self.drafts = self.proposer.propose(step).token_ids.get("r", [])
        self.computed += int(accepted_rows[0])
        return self.drafts


def test_all_drafts_come_from_the_layer_and_the_sampled_token_is_its_input():
    run = Run(MTPProposer, shift=2)
    assert run.step(4, [104]) == [205, 206, 207]
    assert run.layer.passes == [
        ([101, 102, 103, 104], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([205], [4], [1003]),
        ([206], [5], [2003]),
    ]
    # the target reads t4 d5 d6 d7; d5 is right, d6 is wrong
    assert run.step(4, [205, 306]) == [207, 208, 209]
    assert run.computed == 6 and run.batch.num_tokens[run.batch.states["r"].row] == 7
    assert run.layer.passes[0] == ([205, 306], [4, 5], [4, 5])
    assert run.layer.passes[1:] == [([207], [6], [1005]), ([208], [7], [2005])]


def test_in_a_chunk_the_next_prompt_token_takes_the_place_of_the_sampled_one():
    run = Run(MTPProposer, shift=2)
    assert run.step(3, []) == []
    assert run.layer.passes == [([101, 102, 103], [0, 1, 2], [0, 1, 2])]
    assert run.step(1, [104]) == [205, 206, 207]
    assert run.layer.passes[0] == ([104], [3], [3])


@pytest.mark.parametrize("max_model_len", [5, 6, 7, 8, 9])
def test_near_max_model_len_drafting_stops_and_accepted_rows_are_read_all_the_same(max_model_len):
    run = Run(MTPProposer, shift=2, max_model_len=max_model_len)
    most = max(0, min(K, max_model_len - 1 - 5))
    assert run.step(4, [104]) == [205, 206, 207][:most]
    assert run.layer.passes[0] == ([101, 102, 103, 104], [0, 1, 2, 3], [0, 1, 2, 3])
    assert len(run.layer.passes) == max(1, most)


def test_a_draft_model_that_was_right_throughout_reads_its_last_draft_and_the_bonus():
    run = Run(DraftModelProposer, shift=1)
    assert run.step(4, [104]) == [205, 206, 207]
    assert [tokens for tokens, _, _ in run.layer.passes] == [[100, 101, 102, 103, 104], [205], [206]]
    assert run.step(4, [205, 206, 207, 308]) == [209, 210, 211]
    assert run.layer.passes[0][:2] == ([207, 308], [7, 8])
    assert run.step(4, [209, 310]) == [211, 212, 213]
    assert run.layer.passes[0][:2] == ([310], [10])
    assert run.layer.passes[1][:2] == ([211], [11])


def test_a_draft_model_whose_drafts_were_cut_reads_no_more_than_it_lacks():
    run = Run(DraftModelProposer, shift=1)
    run.step(4, [104])
    run.drafts = run.drafts[:1]  # the budget had room for one
    assert run.step(2, [205, 306]) == [207, 208, 209]
    assert run.layer.passes[0][:2] == ([306], [6])
