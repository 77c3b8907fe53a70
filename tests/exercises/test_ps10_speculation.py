"""Set 10 beside the engine: its rules are those of the proposer, the rejection sampler and the block manager."""

import random

import numpy as np
import pytest
import torch
from classroom import checks_and_what_they_load, solved_sheet
from helpers import make_request

from minivllm.engine.kv_cache import KVCacheManager
from minivllm.exercises import exercises_of, find
from minivllm.sample.rejection import emit, verify
from minivllm.speculate.ngram import look_up


@pytest.fixture(scope="module")
def sheet():
    """All that the solved sheet defines."""
    return solved_sheet("ps10_speculation")


def test_the_checks_of_the_set_load_neither_torch_nor_the_engine():
    checked, loaded = checks_and_what_they_load("ps10")
    assert len(checked) == 6 and loaded == ""


ODD_ANSWERS = [
    1,
    True,
    "a",
    [],
    [None],
    [[1]],
    {"a": None},
    (),
    (1, 2, 3),
    (0, "1"),
    (None, 1.0),
    (0, float("nan")),
    (True, 1.0),
    [float("nan")] * 2,
    [float("nan")] * 3,
    [0.5, "0.5"],
    [0.75, 0.0, 0.25, 0.0, 0.0],
    [1] * 9,
    [0, 0, 0, 0],
    [-1],
    [1.0],
    [99, 100],
]


@pytest.mark.parametrize("exercise", exercises_of("ps10"), ids=lambda exercise: exercise.name)
def test_any_wrong_answer_is_answered_with_words(exercise):
    for case in exercise.cases:
        expected, inputs = exercise.oracle(*case.args), dict(zip(exercise.parameters, case.args, strict=True))
        for answer in ODD_ANSWERS:
            if answer != expected:
                assert exercise.judge(expected, answer, inputs), (case.args, answer)


def test_the_lookup_is_the_engines():
    rng, propose = random.Random(0), find("ps10.propose_ngram").oracle
    for _ in range(500):
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 14))]
        min_n = rng.randint(1, 3)
        max_n, k = min_n + rng.randint(0, 3), rng.randint(1, 5)
        start, count = look_up(np.array([tokens], dtype=np.int32), np.array([len(tokens)]), min_n, max_n, k)
        assert propose(tokens, min_n, max_n, k) == tokens[start[0] : start[0] + count[0]]


def test_greedy_verification_is_the_engines():
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    for _ in range(300):
        k = rng.randint(0, 4)
        rows = torch.randint(0, 3, (k + 1, 4), generator=generator).float()
        best = rows.argmax(-1)
        drafts = [int(best[j]) if rng.random() < 0.7 else rng.randint(0, 3) for j in range(k)]
        ids = torch.tensor([*drafts, -1])
        emitted = emit(best == ids, ids, best, torch.tensor([0, k + 1]), k)[0]
        assert find("ps10.verify_greedy").oracle(drafts, rows.tolist()) == emitted[emitted >= 0].tolist()


def random_law(generator: torch.Generator) -> torch.Tensor:
    law = torch.rand(6, generator=generator)
    law[torch.rand(6, generator=generator) < 0.3] = 0
    law[0] += 0.1
    return (law / law.sum()).float()


def test_verification_with_chances_is_the_engines():
    generator, rng, num_rejected = torch.Generator().manual_seed(1), random.Random(1), 0
    for _ in range(300):
        k = rng.randint(1, 4)
        p, q = (torch.stack([random_law(generator) for _ in range(k + 1)]) for _ in range(2))
        drafts = [rng.randint(0, 5) for _ in range(k)]
        u = torch.rand(2, k + 1, generator=generator, dtype=torch.float64)
        u[0, rng.randint(0, k)] = 0.0
        ids = torch.tensor([*drafts, -1])
        accepted, replacement = verify(p, q, ids, u[0], u[1])
        _, bonus = verify(p, torch.zeros_like(p), ids, u[0], u[1])
        replacement[-1] = bonus[-1]
        emitted = emit(accepted, ids, replacement, torch.tensor([0, k + 1]), k)[0]
        rows = p.tolist(), q[:k].tolist(), drafts, u[0, :k].tolist(), u[1].tolist()
        assert find("ps10.verify_sampled").oracle(*rows) == emitted[emitted >= 0].tolist()
        num_rejected += int(emitted[-1] < 0)
    assert 50 < num_rejected < 300


def test_the_recovered_law_and_the_accepted_drafts_make_up_the_target():
    generator, recovered = torch.Generator().manual_seed(2), find("ps10.recovered_law").oracle
    for _ in range(100):
        p, q = (random_law(generator).double().tolist() for _ in range(2))
        accepted = [min(a, b) for a, b in zip(p, q, strict=True)]
        law, left = recovered(p, q), 1 - sum(accepted)
        assert [a + left * b for a, b in zip(accepted, law, strict=True)] == pytest.approx(p, abs=1e-6)


def test_the_named_blocks_are_the_engines():
    rng, blocks_to_name = random.Random(3), find("ps10.blocks_to_name").oracle
    for _ in range(500):
        size = rng.choice([1, 2, 4, 8])
        manager, request = KVCacheManager(64, size, 60), make_request("a", rng.randint(1, 40))
        n = rng.randint(1, request.num_tokens)
        for drafts in (0, rng.randint(0, 4)):
            table = manager._tables.get("a")
            num_named = table.num_named if table else 0
            arguments = request.num_tokens, request.num_computed_tokens, n, size
            expected = blocks_to_name(num_named, *arguments)
            manager.allocate(request, n)
            table = manager._tables["a"]
            named = [index for index, block in enumerate(table.blocks) if block.block_hash is not None]
            assert named[num_named:] == expected
            request.num_computed_tokens += n
            n = request.num_tokens - request.num_computed_tokens + drafts + rng.randint(0, 3)
            if n == 0:
                break


def test_the_exhibit_draws_the_text_to_the_drafter(sheet, capsys):
    shares = sheet["emit_many"](sheet["recovered_law_as_found"], [0.5, 0.3, 0.2], [0.2, 0.7, 0.1])
    assert shares == pytest.approx([0.4, 0.42, 0.18], abs=0.01)
    assert "emitted 0.40 0.42 0.18" in capsys.readouterr().out


def test_the_exhibit_lets_another_request_read_what_a_draft_left(sheet):
    assert sheet["two_requests"](sheet["blocks_to_name_as_found"]) == [0, 1, 2, 3, 4, 5, 6, 99]
    assert sheet["two_requests"](sheet["blocks_to_name"]) == [0, 1, 2, 3]
