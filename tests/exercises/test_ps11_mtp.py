"""Set 11 beside the engine: its rules are those of the MTP proposer, the runner and the statistics."""

import random

import numpy as np
import pytest
import torch
from classroom import checks_and_what_they_load, solved_sheet

from minivllm.engine.messages import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.engine.spec_stats import SpecDecodeStats
from minivllm.exercises import exercises_of, find
from minivllm.forward_context import ForwardContext
from minivllm.sampling_params import SamplingParams
from minivllm.speculate.mtp import MTPProposer
from minivllm.speculate.proposer import VerifiedStep
from minivllm.worker.batch import PersistentBatch
from minivllm.worker.inputs import prepare_inputs

K, VOCAB_SIZE, MAX_MODEL_LEN, BLOCK_SIZE = 3, 89, 40, 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sheet():
    """All that the solved sheet defines."""
    return solved_sheet("ps11_mtp")


def test_the_checks_of_the_set_load_neither_torch_nor_the_engine():
    checked, loaded = checks_and_what_they_load("ps11")
    assert len(checked) == 6 and loaded == ""


ODD_ANSWERS = [1, True, "a", [], [None], [[1]], {}, (), ([], []), ([None], [0]), ([1], 2), ([0.5], "a"), (0, 1),
               ([True], 1.0), ([0.5, 0.5], float("nan")), [-1], [99], [0, 1, 2], [3, 3, 3]]  # fmt: skip


@pytest.mark.parametrize("exercise", exercises_of("ps11"), ids=lambda exercise: exercise.name)
def test_any_wrong_answer_is_answered_with_words(exercise):
    for case in exercise.cases:
        expected, inputs = exercise.oracle(*case.args), dict(zip(exercise.parameters, case.args, strict=True))
        for answer in ODD_ANSWERS:
            if answer != expected:
                assert exercise.judge(expected, answer, inputs), (case.args, answer)


class Cache:
    device = CPU

    def context(self, attention) -> ForwardContext:
        return ForwardContext(attention, None, {})


class Layer:
    """The set's layer of whole numbers for the engine; its hidden state carries the guess along."""

    def __init__(self, layer) -> None:
        self.layer, self.passes = layer, []

    def __call__(self, input_ids, positions, hidden):
        self.passes.append((input_ids.tolist(), positions.tolist(), hidden[:, 0].long().tolist()))
        rows = [self.layer(*row) for row in zip(*self.passes[-1], strict=True)]
        return torch.tensor(rows, dtype=torch.float64)

    def compute_logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 1].long(), VOCAB_SIZE).float()


def one_step(batch: PersistentBatch, name: str, computed: int, count: int, drafts: list[int]) -> SchedulerOutput:
    message = SchedulerOutput(num_scheduled_tokens={name: count})
    message.scheduled_cached_reqs = CachedRequestData([name], [[]], [computed])
    if drafts:
        message.scheduled_spec_decode_tokens = {name: drafts}
    return message


def test_passes_drafts_positions_and_reads_are_the_engines():
    """Random histories of one request: chunks of a prompt, then verifications with any number of accepted drafts."""
    rng, toy = random.Random(0), find("ps11.draft").cases[0].args[0]
    oracle = {name: find(f"ps11.{name}").oracle for name in ("first_pass", "kept_rows", "draft", "pass_positions")}
    next_reads, num_rejected = find("ps11.next_reads").oracle, 0
    for _ in range(60):
        text = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 12))]
        prompt_length, computed, drafts, reads = len(text), 0, [], None
        layer, batch = Layer(toy), PersistentBatch(2, MAX_MODEL_LEN, BLOCK_SIZE)
        proposer = MTPProposer(K, layer, Cache(), False)
        new = NewRequestData("r", list(text), SamplingParams(), frozenset(), [3, 0, 4, 1, 2], 0)
        while len(text) < MAX_MODEL_LEN - 1:
            in_prompt = computed < prompt_length - 1 and not drafts
            count = rng.randint(1, prompt_length - computed) if in_prompt else len(text) - computed + len(drafts)
            message = one_step(batch, "r", computed, count, drafts)
            if computed == 0:
                message.scheduled_new_reqs, message.scheduled_cached_reqs = [new], CachedRequestData()
            batch.update_states(message)
            inputs = prepare_inputs(batch, message, CPU, K)
            if reads is not None:
                assert inputs.input_ids.tolist() == reads
            accepted = inputs.num_scheduled.copy()
            emitted: list[int] = []
            if computed + count >= len(text):
                num_accepted = rng.randint(0, len(drafts))
                emitted = [*drafts[:num_accepted], rng.randrange(VOCAB_SIZE)]
                accepted[0] -= len(drafts) - num_accepted
                num_rejected += len(drafts) - num_accepted
                batch.append_tokens(inputs.rows, np.array([emitted]), np.array([len(emitted)]))
                text += emitted
            hidden = torch.tensor([[rng.randrange(997)] for _ in range(count)], dtype=torch.float64)
            layer.passes = []
            room_before = max(min(K, MAX_MODEL_LEN - 1 - len(text)), 0)
            found = proposer.propose(VerifiedStep(batch, inputs, hidden, accepted, MAX_MODEL_LEN))
            rejected = count - int(accepted[0])
            ids, positions = oracle["first_pass"](text, computed, count, rejected)
            states = [int(hidden[row, 0]) for row in oracle["kept_rows"]([count], [rejected])]
            assert layer.passes[0] == (ids, positions, states)
            computed += int(accepted[0])
            drafts, reads = [], None
            if emitted:
                guesses = oracle["draft"](toy, ids, positions, states, room_before)
                reads, drafts = next_reads(emitted, guesses, K)
                assert found.token_ids.get("r", []) == drafts
                last = [of_pass[1][-1] for of_pass in layer.passes]
                assert last[: len(drafts)] == oracle["pass_positions"](len(text), K, MAX_MODEL_LEN)
    assert num_rejected > 100


def test_acceptance_is_that_of_the_engines_statistics():
    rng, acceptance = random.Random(1), find("ps11.acceptance").oracle
    for _ in range(200):
        steps = [(sent := rng.randint(1, 4), rng.randint(0, sent)) for _ in range(rng.randint(1, 12))]
        stats = SpecDecodeStats()
        for sent, accepted in steps:
            stats.record(sent, accepted, accepted + 1)
        shares, tokens = acceptance(steps)
        assert tokens == pytest.approx(stats.mean_acceptance_length)
        first_share = stats.accepted[0] / stats.drafted[0]
        assert shares[0] == pytest.approx(first_share) and len(shares) == len(stats.drafted) - 1


def test_the_exhibits_show_their_symptoms_and_the_mended_ones_do_not(sheet, capsys):
    found = sheet["what_the_layer_gets"](sheet["kept_rows_as_found"])
    assert found == [("woman", "the old woman"), (":", "the old woman ,")]
    assert sheet["cache_after_drafting"](sheet["pass_positions_as_found"])[3] == "d6"
    text = list(range(100, 141))
    assert sheet["tokens_a_step"](sheet["next_reads_as_found"], text, 3) == 1.0
    assert sheet["tokens_a_step"](sheet["next_reads"], text, 3) == 4.0
    assert "1.0 tokens a step" in capsys.readouterr().out
