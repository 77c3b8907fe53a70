"""The one-kernel sampler draws what its twin draws, up to the rounding of a running sum."""

import pytest
import torch

from minivllm.sample import fused
from minivllm.sample.fused import sample_rows
from minivllm.sample.random import Purpose, uniform
from minivllm.sample.sampler import Sampler, SamplingMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOWEST = 1e-30
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rows(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    positions = torch.randint(0, 2**20, (num_rows,), generator=generator)
    return seeds.to(DEVICE), positions.to(DEVICE)


def randn(*shape, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype).to(DEVICE)


def assert_drawn_by(token_ids, logits, temperature, u):
    """Each u lies in its token's stretch of the distribution, computed in float64; float32 sums may miss by a hair."""
    p = (logits.double() / temperature.double()[:, None]).softmax(-1)
    cdf = p.cumsum(-1)
    upper = cdf.gather(1, token_ids[:, None])[:, 0]
    own = p.gather(1, token_ids[:, None])[:, 0]
    assert (own > 0).all()
    assert (u <= upper + 2e-6).all() and (u >= upper - own - 2e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 1000])
def test_a_token_is_drawn_where_the_running_sum_passes_u(vocab_size, dtype, monkeypatch):
    monkeypatch.setattr(fused, "_BLOCK", 128)
    logits = randn(24, vocab_size, dtype=dtype)
    temperature = torch.tensor([0.3, 1.0, 2.5] * 8, device=DEVICE)
    seeds, positions = rows(24)
    before = logits.clone()
    token_ids = sample_rows(logits, temperature, seeds, positions, LOWEST)
    assert_drawn_by(token_ids, logits, temperature, uniform(seeds, positions, Purpose.SAMPLE))
    assert torch.equal(logits, before)
    assert torch.equal(token_ids, sample_rows(logits, temperature, seeds, positions, LOWEST))


def test_temperature_zero_takes_the_first_of_the_largest():
    logits = torch.zeros(3, 300, device=DEVICE)
    logits[0, [7, 260]] = 5.0
    logits[1, 299] = 1.0
    token_ids = sample_rows(logits, torch.zeros(3, device=DEVICE), *rows(3), LOWEST)
    assert token_ids.tolist() == [7, 299, 0]


def test_a_tiny_temperature_is_greedy_and_nothing_overflows():
    logits = randn(4, 300)
    token_ids = sample_rows(logits, torch.full((4,), 1e-38, device=DEVICE), *rows(4), LOWEST)
    assert torch.equal(token_ids, logits.argmax(-1))


def test_a_token_without_probability_is_never_drawn(monkeypatch):
    monkeypatch.setattr(fused, "_BLOCK", 128)
    logits = torch.full((200, 512), float("-inf"), device=DEVICE)
    logits[:, [3, 300]] = 0.0
    token_ids = sample_rows(logits, torch.ones(200, device=DEVICE), *rows(200), LOWEST)
    assert set(token_ids.tolist()) == {3, 300}


def test_rows_of_a_wider_tensor_and_no_rows():
    wide = randn(6, 100)
    seeds, positions = rows(6)
    temperature = torch.ones(6, device=DEVICE)
    view = wide[:, :77]
    token_ids = sample_rows(view, temperature, seeds, positions, LOWEST)
    assert torch.equal(token_ids, sample_rows(view.contiguous(), temperature, seeds, positions, LOWEST))
    assert sample_rows(wide[:0], temperature[:0], seeds[:0], positions[:0], LOWEST).shape == (0,)


def metadata(temperature, seeds, positions):
    none = torch.zeros(len(temperature), device=DEVICE)
    return SamplingMetadata(
        temperature=temperature, top_k=none.long(), top_p=none + 1, min_p=none, seeds=seeds, positions=positions,
        all_greedy=False, all_random=False, max_top_k=0, any_top_k=False, any_top_p=False, any_min_p=False,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sampler_takes_the_kernel_on_a_gpu_and_draws_like_its_twin(dtype):
    logits = randn(256, 151_936, dtype=dtype)
    seeds, positions = rows(256)
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.5] * 64, device=DEVICE)
    token_ids = Sampler()(logits, metadata(temperature, seeds, positions))
    random = temperature > 0
    u = uniform(seeds, positions, Purpose.SAMPLE)
    assert_drawn_by(token_ids[random], logits[random], temperature[random], u[random])
    on_cpu = Sampler()(logits.cpu(), _moved(metadata(temperature, seeds, positions)))
    assert (on_cpu == token_ids.cpu()).float().mean() > 0.99


def _moved(given):
    return SamplingMetadata(**{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in vars(given).items()})
