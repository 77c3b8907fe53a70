"""Drafts of tiny-deepseek in the engine are those of teacher forcing on the ids that came out, position by position.

Teacher forcing is the training code on transformers' model: the whole text at once, no cache, no pages, no scheduler.
Pass p at position i + p guesses token i + p + 2, where token i + 1 is the newest when the engine drafts. A pass behind
a wrong draft has no counterpart there, so each list of drafts is compared up to its first wrong one, that one included.
"""

from dataclasses import dataclass, field

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.checkpoints import fetch
from minivllm.checkpoints.training.evaluate import chain_statistics
from minivllm.checkpoints.training.export import load_checkpoint
from minivllm.checkpoints.training.mtp import unroll

K, NUM_TOKENS = 3, 40
PROMPTS = [
    "The king had three sons, and the youngest",
    "Once upon a time there was a poor",
    "They lived happily",
    "The wolf said to the fox:",
]


@dataclass
class Told:
    """What the runner told of one request: its tokens, and (tokens known, drafts) whenever it drafted."""

    token_ids: list[int]
    drafted: list[tuple[int, list[int]]] = field(default_factory=list)
    verified: list[tuple[int, int, int]] = field(default_factory=list)
    """(tokens known before, drafts sent, drafts accepted)."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """[1, V] of each pass that drafted, if the request ran alone."""


def run(temperature: float = 0.0, **settings) -> tuple[list[Told], list]:
    """The prompts through the engine in float32, with everything that the runner told."""
    settings = {"num_gpu_blocks_override": 64, "dtype": "float32", "device": "cpu", **settings}
    llm = LLM("tiny-deepseek", speculative_config={"method": "mtp", "num_speculative_tokens": K}, **settings)
    execute, told = llm.engine.worker.execute_model, {}
    proposer, logits = llm.engine.worker.proposer, []
    compute_logits = proposer.compute_logits
    proposer.compute_logits = lambda hidden: logits.append(compute_logits(hidden)) or logits[-1]

    def recorded(message):
        for new in message.scheduled_new_reqs:
            told[new.req_id] = Told(list(new.prompt_token_ids))
        logits.clear()
        output = execute(message)
        for req_id, emitted in output.sampled_token_ids.items():
            one = told[req_id]
            sent = len(message.scheduled_spec_decode_tokens.get(req_id, ()))
            if sent:
                one.verified.append((len(one.token_ids), sent, len(emitted) - 1))
            one.token_ids += emitted
            if req_id in output.draft_token_ids:
                one.drafted.append((len(one.token_ids), output.draft_token_ids[req_id]))
                one.logits += logits
        return output

    llm.engine.worker.execute_model = recorded
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return list(told.values()), outputs


@pytest.fixture(scope="module")
def teacher():
    """A text's ids [L] -> the logits of each pass at each position, [K, L - 2, V]."""
    model, mtp = load_checkpoint(fetch("tiny-deepseek"), torch.device("cpu"))

    @torch.no_grad()
    def logits(token_ids: list[int]) -> torch.Tensor:
        rows = torch.tensor([token_ids])
        hidden = model.model(input_ids=rows[:, :-2], use_cache=False).last_hidden_state
        return torch.stack([model.lm_head(output)[0] for output in unroll(model, mtp, rows, hidden, K)])

    return logits


def expected_drafts(guesses: list[list[int]], known: int, text: list[int]) -> list[int]:
    """Drafts for the positions from `known` on, up to the first that is not the text's token, that one included."""
    drafts = []
    for index in range(K):
        position = known - 2 + index
        if position >= len(guesses[0]):
            break
        drafts.append(guesses[index][position])
        if drafts[-1] != text[known + index]:
            break
    return drafts


@pytest.mark.parametrize(
    ("temperature", "settings"),
    [
        (0.0, {}),
        (0.0, {"max_num_seqs": 1}),
        (0.0, {"long_prefill_token_threshold": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}),
        (1.0, {}),
    ],
    ids=["batch", "alone", "chunks", "sampled"],
)
def test_the_engines_drafts_are_those_of_teacher_forcing(teacher, temperature, settings):
    told, _ = run(temperature, **settings)
    num_compared = 0
    for one in told:
        guesses = teacher(one.token_ids).argmax(-1).tolist()
        for known, drafts in one.drafted:
            expected = expected_drafts(guesses, known, one.token_ids)
            assert drafts[: len(expected)] == expected
            num_compared += len(expected)
    assert num_compared > len(PROMPTS) * 10


def test_the_logits_behind_the_drafts_are_those_of_teacher_forcing(teacher):
    """Sharper than drafts: a rotation that is off by one position leaves most of them as they are."""
    told, _ = run(max_num_seqs=1)
    largest, num_compared = 0.0, [0] * K
    for one in told:
        expected, passes = teacher(one.token_ids), iter(one.logits)
        guesses = expected.argmax(-1).tolist()
        for known, drafts in one.drafted:
            of_drafts = [next(passes) for _ in drafts]
            for index in range(len(expected_drafts(guesses, known, one.token_ids))):
                difference = of_drafts[index][0] - expected[index, known - 2 + index]
                largest = max(largest, difference.abs().max().item())
                num_compared[index] += 1
        assert next(passes, None) is None
    assert min(num_compared) > 20 and largest < 1e-3, largest


def test_acceptance_on_the_engines_run_is_that_of_teacher_forcing(teacher):
    told, outputs = run()
    counts = {"engine": [0, 0], "teacher": [0, 0]}  # first drafts: verified, right
    for one, output in zip(told, outputs, strict=True):
        guesses = teacher(one.token_ids).argmax(-1).tolist()
        assert [sent for _, sent, _ in one.verified][:-1] == [K] * (len(one.verified) - 1)
        for known, sent, accepted in one.verified:
            if known >= len(one.token_ids) - sent:
                continue  # the text ends before its last draft could have been right
            drafts = expected_drafts(guesses, known, one.token_ids)
            right = [draft == one.token_ids[known + index] for index, draft in enumerate(drafts)]
            assert accepted == sum(right)
            counts["engine"][0] += 1
            counts["engine"][1] += accepted > 0
            counts["teacher"][0] += 1
            counts["teacher"][1] += right[0]
        assert output.outputs[0].token_ids == one.token_ids[len(output.prompt_token_ids) :][:NUM_TOKENS]
        # the same walk as on the model card
        hits = [
            [guess == token for guess, token in zip(of_pass, one.token_ids[2:], strict=True)] for of_pass in guesses
        ]
        walk = chain_statistics([hits], len(output.prompt_token_ids))
        steps = walk["offered"][0]
        seen = [accepted for _, _, accepted in one.verified[:steps]]
        assert walk["offered"] == [sum(a >= j for a in seen) for j in range(K)]
        assert walk["accepted"] == [
            sum(a > j for a in seen) / sum(a >= j for a in seen) if sum(a >= j for a in seen) else 0.0 for j in range(K)
        ]
    assert counts["engine"] == counts["teacher"] and counts["engine"][0] > 30
    assert 0.6 < counts["engine"][1] / counts["engine"][0] < 1.0, counts
