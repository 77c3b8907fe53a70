"""The oracles of set 7 do what the package does, at the package's own sizes."""

import pytest
import torch

from minivllm.exercises.ps07 import block_scales, int8_product, quantize_int8
from minivllm.exercises.ps07_museum import block_product, quantize_rows
from minivllm.gemm.dispatch import gemm
from minivllm.gemm.quantize import BLOCK, quantize_1x128, quantize_128x128, quantize_per_channel, quantize_per_token

CLOSE = {"rtol": 1e-5, "atol": 1e-4}
"""The reference multiplies dequantised numbers, which rounds a little differently."""


@pytest.fixture
def x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 384, generator=generator)
    x[2, 130], x[4] = 40.0, 0.0
    return x


@pytest.fixture
def w() -> torch.Tensor:
    return torch.randn(200, 384, generator=torch.Generator().manual_seed(1))


def test_int8_and_its_product(x, w):
    (q, sa), (qw, sb) = quantize_per_token(x, torch.int8), quantize_per_channel(w, torch.int8)
    assert torch.equal(quantize_int8(x, sa), q)
    torch.testing.assert_close(int8_product(q, qw, sa, sb), gemm(q, qw, sa, sb, torch.float32), **CLOSE)


def test_rows_and_blocks(x, w):
    q, scale = quantize_per_token(x)
    own_q, own_scale = quantize_rows(x)
    assert torch.equal(own_scale, scale) and torch.equal(own_q.float(), q.float())
    (qx, sx), (qw, sw) = quantize_1x128(x), quantize_128x128(w)
    filled = [row for row in range(len(x)) if x[row].any()]  # a block of zeros has a floor, which exercise 2 leaves out
    torch.testing.assert_close(block_scales(x, BLOCK, 448.0)[filled], sx[filled])
    own = block_product(qx.float(), qw.float(), sx, sw, BLOCK)
    torch.testing.assert_close(own, gemm(qx, qw, sx, sw, torch.float32), **CLOSE)
