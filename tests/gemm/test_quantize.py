"""Quantising: scales are what the formats say, and what comes back is as near as the format allows."""

import pytest
import torch

from minivllm.gemm.quantize import (
    FP8,
    dequantize,
    quantize_1x128,
    quantize_128x128,
    quantize_per_channel,
    quantize_per_tensor,
    quantize_per_token,
)

SCHEMES = [quantize_per_tensor, quantize_per_token, quantize_per_channel, quantize_1x128, quantize_128x128]
# Half of the largest relative step (1/8) of e4m3; half of a step of int8, relative to the region's largest.
HALF_STEP = {FP8: 1 / 16, torch.int8: 0.5 / 127}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 100), (129, 300), (3, 130, 256), (0, 128)])
def test_numbers_come_back_within_half_a_step(shape, scheme, dtype):
    x = randn(*shape)
    q, scale = scheme(x, dtype)
    assert q.shape == x.shape and q.dtype == dtype and scale.dtype == torch.float32
    error = (dequantize(q, scale) - x).abs()
    largest = x.abs().max().item() if x.numel() else 0.0
    bound = x.abs() * HALF_STEP[dtype] if dtype == FP8 else largest * HALF_STEP[dtype]
    # Below e4m3's normal numbers (2^-6 of a scale's unit) steps are equal: 2^-9.
    assert (error <= bound * 1.001 + (scale.max() * 2**-10 if scale.numel() and dtype == FP8 else 0)).all()


@pytest.mark.parametrize("dtype", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("scheme", "wanted"),
    [
        (quantize_per_tensor, ()),
        (quantize_per_token, (130, 1)),
        (quantize_1x128, (130, 3)),
        (quantize_128x128, (2, 3)),
    ],
)
def test_each_region_has_its_own_scale_amax_over_the_largest_number(scheme, wanted, dtype):
    x = randn(130, 300)
    _, scale = scheme(x, dtype)
    assert scale.shape == wanted
    largest = 448.0 if dtype == FP8 else 127.0
    last_region = {(): x, (130, 1): x[129:], (130, 3): x[129:, 256:], (2, 3): x[128:, 256:]}[wanted]
    assert scale.flatten()[-1].item() == pytest.approx(last_region.abs().max().item() / largest)


def test_an_outlier_is_felt_in_its_own_region_only():
    x = randn(128, 256) * 0.001
    x[5, 200] = 1000.0
    # The smallest numbers fall below what e4m3 resolves at the outlier's scale.
    errors = {s.__name__: (dequantize(*s(x)) - x)[:, :128].norm() / x[:, :128].norm() for s in SCHEMES}
    assert errors["quantize_1x128"] < 0.05 and errors["quantize_128x128"] < 0.05
    assert errors["quantize_per_tensor"] > 0.5
    assert (dequantize(*quantize_per_token(x)) - x)[6:].norm() / x[6:].norm() < 0.05


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_have_a_scale_and_come_back_as_zeros(scheme):
    q, scale = scheme(torch.zeros(3, 200))
    assert (scale == torch.tensor(1e-4) / 448).all() and (dequantize(q, scale) == 0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_power_of_two_is_the_next_one_up(scheme):
    x = randn(130, 200)
    (_, plain), (q, rounded) = scheme(x), scheme(x, power_of_two=True)
    assert (torch.log2(rounded) == torch.log2(rounded).round()).all()
    assert ((rounded >= plain) & (rounded < 2 * plain)).all()
    assert (dequantize(q, rounded) - x).norm() / x.norm() < 0.05


def test_bfloat16_is_quantised_by_its_own_values():
    x = randn(4, 256).bfloat16()
    q, scale = quantize_1x128(x)
    wanted_q, wanted = quantize_1x128(x.float())
    assert torch.equal(scale, wanted) and torch.equal(q.float(), wanted_q.float())


def test_not_a_number_stays_one_in_e4m3_and_becomes_zero_in_int8():
    x = torch.tensor([[1.0, float("nan")]])
    assert quantize_per_token(x)[0].float().isnan().any()
    assert quantize_per_token(x, torch.int8)[0].tolist() == [[0, 0]]


def test_wrong_formats_and_scales_are_refused_by_name():
    with pytest.raises(ValueError, match="dtype should be one of"):
        quantize_per_token(randn(2, 2), torch.int16)
    with pytest.raises(ValueError, match=r"scale should be \[130, 1\], \[130, 3\] or \[2, 3\]"):
        dequantize(quantize_per_token(randn(130, 300))[0], torch.ones(3, 3))
    with pytest.raises(ValueError, match="one number"):
        dequantize(quantize_per_token(randn(2, 2))[0], torch.ones(2))
