"""RMSNorm against the formula in float64 and against transformers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minivllm.layers.norm import RMSNorm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(size: int, dtype: torch.dtype, eps: float = 1e-5) -> RMSNorm:
    torch.manual_seed(0)
    norm = RMSNorm(size, eps).to(dtype)
    norm.weight.copy_(torch.randn(size))
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_transformers(dtype):
    norm = make(96, dtype)
    reference = LlamaRMSNorm(96, 1e-5).to(dtype)
    reference.weight.data.copy_(norm.weight)
    x = (torch.randn(7, 96) * 30).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(norm.normalise(x), reference(x), rtol=tolerance, atol=tolerance)
    assert norm.normalise(x).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_residual_is_addition_then_norm(dtype):
    norm = make(64, dtype)
    x, residual = torch.randn(2, 5, 64).to(dtype)
    total = x + residual
    normed, new_residual = norm(x.clone(), residual)
    assert torch.equal(new_residual, total)
    assert torch.equal(normed, norm.normalise(total))


def test_without_residual_the_input_becomes_the_residual():
    norm, x = make(64, torch.float32), torch.randn(5, 64)
    normed, residual = norm(x, None)
    assert residual is x
    assert torch.equal(normed, norm.normalise(x))


def test_the_residual_given_is_not_changed():
    norm = make(64, torch.float32)
    residual = torch.randn(5, 64)
    before = residual.clone()
    norm(torch.randn(5, 64), residual)
    assert torch.equal(residual, before)


def test_large_float16_values_do_not_overflow():
    norm = make(64, torch.float16)
    assert torch.isfinite(norm.normalise(torch.full((1, 64), 60_000.0, dtype=torch.float16))).all()


def test_a_row_is_the_same_alone_and_in_a_batch():
    norm, x = make(576, torch.float32), torch.randn(100, 576)
    whole = norm.normalise(x)
    assert all(torch.equal(norm.normalise(x[:rows]), whole[:rows]) for rows in (1, 2, 7, 33))
