"""The fused kernels beside their readable twins: in Triton's interpreter on a CPU, compiled on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from minivllm.layers.fused import add_rms_norm, head_norm_and_rotary, silu_and_mul
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import apply_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to two roundings: sums differ in their last bit, and one dtype's rounding may then go the other way."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=4 * eps, atol=4 * eps)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 64, 576, 1000])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_add_rms_norm_is_the_norm_of_the_sum(num_tokens, size, dtype):
    x, residual = randn(num_tokens, size, dtype=dtype), randn(num_tokens, size, dtype=dtype, seed=1)
    weight = randn(size, dtype=dtype, seed=2)
    total = x + residual
    out, kept = add_rms_norm(x, residual, weight, 1e-5)
    check(kept, total)
    check(out, plain_norm(total, weight, 1e-5))
    assert kept is x


def test_without_a_residual_the_input_stays_as_it_is():
    x, weight = randn(3, 64, dtype=torch.float32), randn(64, dtype=torch.float32, seed=2)
    before = x.clone()
    out, kept = add_rms_norm(x, None, weight, 1e-5)
    assert torch.equal(kept, before)
    check(out, plain_norm(before, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_q", "num_k", "head_dim"), [(1, 1, 16), (9, 3, 64), (4, 2, 80), (16, 8, 128)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_normalised_and_rotated_like_the_twin(has_norm, num_q, num_k, head_dim, dtype):
    num_tokens, eps = 4, 1e-6
    wide = randn(num_tokens, num_q + 2 * num_k, head_dim, dtype=dtype)  # q, k and v as one projection gives them
    qk = wide[:, : num_q + num_k]
    angles = torch.arange(num_tokens)[:, None, None] * torch.rand(1, 1, head_dim // 2)
    cos = torch.cat([angles.cos()] * 2, dim=-1).to(dtype).to(DEVICE)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(dtype).to(DEVICE)
    weights = (randn(head_dim, dtype=dtype, seed=1), randn(head_dim, dtype=dtype, seed=2)) if has_norm else None
    expected = qk.clone()
    if has_norm:
        expected[:, :num_q] = plain_norm(expected[:, :num_q], weights[0], eps)
        expected[:, num_q:] = plain_norm(expected[:, num_q:], weights[1], eps)
    v_before = wide[:, num_q + num_k :].clone()
    got = head_norm_and_rotary(wide, num_q, num_k, weights, eps, cos, sin)[:, : num_q + num_k]
    # The twin rounds after each product, the kernel once at the end.
    error = (got.float() - apply_rotary(expected, cos, sin).float()).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * max(1.0, float(expected.abs().max()))
    assert torch.equal(wide[:, num_q + num_k :], v_before)
    assert head_norm_and_rotary(qk[:0], num_q, num_k, weights, eps, cos[:0], sin[:0]).shape[0] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 32), (1, 16), (3, 1024), (2, 1500)])
def test_silu_and_mul_is_the_gated_product(num_tokens, size, dtype):
    gate_up = randn(num_tokens, 2 * size, dtype=dtype) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    check(silu_and_mul(gate_up), F.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layer_takes_the_kernel_on_a_gpu_and_gives_what_a_cpu_gives(dtype):
    norm = RMSNorm(576, 1e-5).to(dtype)
    x, residual = randn(7, 576, dtype=dtype), randn(7, 576, dtype=dtype, seed=1)
    on_cpu = norm(x.cpu(), residual.cpu())
    on_gpu = norm.cuda()(x.cuda(), residual.cuda())
    for got, expected in zip(on_gpu, on_cpu, strict=True):
        check(got.cpu(), expected)
