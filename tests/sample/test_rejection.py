"""The rejection rule: the law of what is emitted, exact zeros, seeds, and a kernel beside its PyTorch twin."""

import math

import pytest
import torch

from minivllm.sample.random import Purpose, uniform
from minivllm.sample.rejection import RejectionSampler, emit, verify
from minivllm.sample.sampler import SamplingMetadata, draw

NUM_DRAWS, V = 100_000, 8
NUM_CASES = 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def metadata(temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> SamplingMetadata:
    return SamplingMetadata(
        temperature,
        torch.zeros_like(seeds),
        torch.ones_like(temperature),
        torch.zeros_like(temperature),
        seeds,
        positions,
        all_greedy=not temperature.any(),
        all_random=bool(temperature.all()),
        max_top_k=0,
        any_top_k=False,
        any_top_p=False,
        any_min_p=False,
    )


def random_p(seed: int) -> torch.Tensor:
    """[V, V]: a Markov chain over the vocabulary; row t is what follows token t."""
    return (torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 1.5).softmax(-1)


def disjoint() -> tuple[torch.Tensor, torch.Tensor]:
    p, q = random_p(1), random_p(2)
    p[:, V // 2 :] = 0
    q[:, : V // 2] = 0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def emitted(p: torch.Tensor, q: torch.Tensor | None, num_drafts: int) -> torch.Tensor:
    """[NUM_DRAWS, num_drafts + 1] what requests at token 0 emit; drafts are drawn from q or, for None, greedy."""
    seeds = torch.arange(NUM_DRAWS)
    context, drafts = torch.zeros(NUM_DRAWS, dtype=torch.int64), []
    contexts = [context]
    for j in range(num_drafts):
        law = p if q is None else q
        draft = law[context].argmax(-1) if q is None else draw(q[context], uniform(seeds, seeds * 0 + j, Purpose.DRAFT))
        drafts.append(draft)
        context = draft
        contexts.append(context)
    rows = torch.stack(contexts, 1).flatten()
    draft_ids = torch.stack([*drafts, torch.full_like(context, -1)], 1).flatten()
    positions = torch.arange(num_drafts + 1).repeat(NUM_DRAWS)
    own = metadata(torch.ones(len(rows)), seeds.repeat_interleave(num_drafts + 1), positions)
    cu_rows = torch.arange(NUM_DRAWS + 1) * (num_drafts + 1)
    of_rows = None if q is None else q[rows]
    return RejectionSampler()(p[rows].log(), own, draft_ids, cu_rows, num_drafts, of_rows)


def chi_square_p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Bins with an expectation below 5 are merged into one."""
    assert observed[expected == 0].sum() == 0, "a token that cannot come has come"
    small = expected < 5
    observed = torch.cat((observed[~small], observed[small].sum()[None])).double()
    expected = torch.cat((expected[~small], expected[small].sum()[None])).double()
    keep = expected > 0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = torch.tensor((int(keep.sum()) - 1) / 2, dtype=torch.float64)
    return 1 - torch.special.gammainc(freedom, statistic / 2).item() if freedom > 0 else 1.0


CASES = {
    "random": (random_p(1), random_p(2)),
    "near": (random_p(1), (random_p(1) + 0.1) / (1 + 0.1 * V)),
    "equal": (random_p(1), random_p(1)),
    "disjoint": disjoint(),
    "one-hot": (random_p(3), None),
    "one-hot q given in full": (random_p(3), torch.eye(V)[random_p(3).argmax(-1)]),
}
assert len(CASES) == NUM_CASES


@pytest.mark.parametrize("name", CASES)
def test_the_joint_law_of_all_emitted_tokens_is_the_targets(name):
    """A request goes on by the plain sampler where a step emitted fewer than three tokens, so that all have three."""
    p, q = CASES[name]
    tokens = emitted(p, q, 2)
    for column in (1, 2):
        missing = tokens[:, column] < 0
        law = p[tokens[:, column - 1]]
        later = draw(law, uniform(torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), column + 10), Purpose.SAMPLE))
        tokens[:, column] = torch.where(missing, later, tokens[:, column])
    code = (tokens[:, 0] * V + tokens[:, 1]) * V + tokens[:, 2]
    observed = torch.bincount(code, minlength=V**3)
    expected = (p[0][:, None, None] * p[:, :, None] * p[None]).flatten().double() * NUM_DRAWS
    assert chi_square_p_value(observed, expected) > 0.001 / NUM_CASES


def test_the_test_sees_a_law_that_is_a_little_off():
    p = random_p(1)
    observed = torch.bincount(emitted(p, random_p(2), 1)[:, 0], minlength=V)
    off = p[0] + torch.tensor([0.01, -0.01] + [0.0] * (V - 2))
    assert chi_square_p_value(observed, off.double() * NUM_DRAWS) < 0.001 / NUM_CASES


def test_the_worked_example():
    """p = [.5, .3, .2], q = [.2, .7, .1]: accepted mass .6, residual [.75, 0, .25]."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.7, 0.1]])
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    many = len(u)
    for draft, mass in ((0, 1.0), (1, 3 / 7), (2, 1.0)):
        drafts = torch.full((many,), draft)
        accepted, recovered = verify(p.expand(many, 3), q.expand(many, 3), drafts, u, u)
        assert accepted.double().mean().item() == pytest.approx(mass, abs=1e-4)
        assert torch.bincount(recovered, minlength=3).tolist() == pytest.approx([7500, 0, 2500], abs=1)


@pytest.mark.parametrize("with_q", [True, False])
def test_a_draft_that_either_side_gives_no_chance_is_rejected_also_at_u_0(with_q):
    p = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    q = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]) if with_q else None
    zero = torch.zeros(2, dtype=torch.float64)
    accepted, recovered = verify(p, q, torch.tensor([0, 0 if with_q else 2]), zero, zero)
    assert not accepted.any()
    assert (p.gather(1, recovered[:, None]) > 0).all()


def test_p_and_q_are_not_changed_in_place():
    p, q = random_p(1), random_p(2)
    before = p.clone(), q.clone()
    half = torch.full((V,), 0.5, dtype=torch.float64)
    for given in (q, None):
        verify(p, given, torch.arange(V), half, half)
    assert torch.equal(p, before[0]) and torch.equal(q, before[1])


def test_greedy_rows_emit_the_argmax_up_to_the_first_mismatch_and_company_changes_no_row():
    """A greedy and a sampling request, together and alone."""
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1)
    drafts = torch.stack((best[0], (best[1] + 1) % V, torch.tensor(-1), torch.tensor(3), best[4], best[5], best[6]))
    drafts[6] = -1
    temperature = torch.tensor([0.0] * 3 + [1.0] * 4)
    seeds, positions = torch.tensor([1] * 3 + [2] * 4), torch.tensor([4, 5, 6, 9, 10, 11, 12])
    both = RejectionSampler()(
        logits.clone(), metadata(temperature, seeds, positions), drafts, torch.tensor([0, 3, 7]), 3
    )
    assert both[0].tolist() == [best[0], best[1], -1, -1]
    for part, row in ((slice(0, 3), 0), (slice(3, 7), 1)):
        own = metadata(temperature[part], seeds[part], positions[part])
        cu_rows = torch.tensor([0, part.stop - part.start])
        alone = RejectionSampler()(logits[part].clone(), own, drafts[part], cu_rows, part.stop - part.start - 1)
        assert alone[0].tolist() == both[row, : alone.shape[1]].tolist()


def test_a_request_without_drafts_emits_what_the_ordinary_sampler_chooses():
    p = random_p(5)
    seeds = torch.arange(V)
    cu_rows = torch.arange(V + 1)
    own = metadata(torch.ones(V), seeds, seeds * 3)
    got = RejectionSampler()(p.log(), own, torch.full((V,), -1), cu_rows, 0)
    assert got[:, 0].tolist() == draw(p, uniform(seeds, seeds * 3, Purpose.SAMPLE)).tolist()


def test_emit_ends_with_the_first_draft_that_is_not_accepted():
    accepted = torch.tensor([True, False, True, False, True, True, False, False])
    drafts = torch.tensor([1, 2, 3, -1, 4, 5, -1, -1])
    replacement = torch.tensor([11, 12, 13, 14, 15, 16, 17, 18])
    got = emit(accepted, drafts, replacement, torch.tensor([0, 4, 7, 8]), 3)
    assert got.tolist() == [[1, 12, -1, -1], [4, 5, 17, -1], [18, -1, -1, -1]]


@pytest.mark.parametrize("vocab_size", [5, 1024, 2500])
@pytest.mark.parametrize("with_q", [True, False])
def test_the_kernel_equals_its_pytorch_twin(with_q, vocab_size):
    from minivllm.sample.rejection_triton import verify_rows

    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 40

    def law() -> torch.Tensor:
        p = (torch.randn(num_rows, vocab_size, generator=generator) * 3).softmax(-1)
        return torch.where(p < 0.3 / vocab_size, 0.0, p)

    p = law()
    q = (p + law()) / 2 if with_q else None
    drafts = draw(p if q is None else q, torch.rand(num_rows, generator=generator, dtype=torch.float64))
    drafts[::7] = -1
    if with_q:
        q[3] = p[3]
    else:
        p[3] = 0
        p[3, drafts[3]] = 1.0
    u = torch.rand(2, num_rows, generator=generator, dtype=torch.float64)
    u[:, 5] = 0.0
    u[1, 6] = 1 - 2**-53
    tensors = [None if x is None else x.to(DEVICE) for x in (p, q, drafts, u[0], u[1])]
    accepted, recovered = verify_rows(*tensors)
    expected_accepted, expected_recovered = verify(p, q, drafts, u[0], u[1])
    assert accepted.tolist() == expected_accepted.tolist()
    assert 2 < accepted.sum() < num_rows - 5
    assert recovered.tolist() == expected_recovered.tolist()
    assert math.isfinite(recovered.double().sum().item())
