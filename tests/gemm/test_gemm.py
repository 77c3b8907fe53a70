"""Every backend against the same product in float64: kernels in Triton's interpreter on a CPU, all of them on a GPU."""

import pytest
import torch

from minivllm.gemm import dispatch, fp8_block, int8, triton_bf16
from minivllm.gemm import tiles as tiles_module
from minivllm.gemm.dispatch import gemm
from minivllm.gemm.quantize import (
    FP8,
    dequantize,
    quantize_1x128,
    quantize_128x128,
    quantize_per_channel,
    quantize_per_tensor,
    quantize_per_token,
)
from minivllm.gemm.tiles import Tiles, rows_of_whole_waves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# M, N, K: edges, tails in every direction, and more tiles than programs.
SHAPES = [(0, 48, 128), (1, 33, 128), (7, 100, 256), (16, 130, 384), (129, 65, 128), (33, 0, 256)]
SCHEMES = {
    "fp8_tensor": (quantize_per_tensor, quantize_per_tensor, FP8),
    "fp8_token": (quantize_per_token, quantize_per_channel, FP8),
    "fp8_block": (quantize_1x128, quantize_128x128, FP8),
    "int8": (quantize_per_token, quantize_per_channel, torch.int8),
}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def operands(format, m, n, k):
    """a, b, their scales, and the product of what they stand for, in float64."""
    quantize_a, quantize_b, dtype = SCHEMES[format]
    (a, a_scale), (b, b_scale) = quantize_a(randn(m, k), dtype), quantize_b(randn(n, k, seed=1), dtype)
    wanted = dequantize(a, a_scale, torch.float64) @ dequantize(b, b_scale, torch.float64).T
    return (a, b, a_scale, b_scale), wanted


def error(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def most(dtype):
    """Half a unit of the result's last place, relative to the norm; and what sums in float32 add."""
    return torch.finfo(dtype).eps / 2 + 2e-6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (5, 40, 100), (3, 1, 1), (2, 3, 0)])
def test_triton_bf16_is_the_product_in_float64(shape, dtype):
    m, n, k = shape
    a, b = randn(m, k, dtype=dtype), randn(n, k, seed=1, dtype=dtype)
    got = gemm(a, b, backend="triton_bf16")
    assert got.shape == (m, n) and got.dtype == dtype
    assert error(got, a.double() @ b.double().T) <= most(dtype)
    assert torch.equal(got, gemm(a, b, backend="triton_bf16"))


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("format", "backend"),
    [("fp8_block", "triton_fp8_block"), ("int8", "triton_int8"), ("fp8_token", "triton_int8")],
)
def test_scaled_kernels_are_the_product_in_float64(format, backend, shape, out_dtype):
    arguments, wanted = operands(format, *shape)
    got = gemm(*arguments, out_dtype, backend=backend)
    assert got.shape == wanted.shape and got.dtype == out_dtype
    # A GPU keeps about 14 bits of a sum of fp8 products; the interpreter keeps all.
    slack = 1e-3 if DEVICE == "cuda" and format != "int8" else 0.0
    assert error(got, wanted) <= most(out_dtype) + slack
    assert torch.equal(got, gemm(*arguments, out_dtype, backend=backend))


@pytest.mark.parametrize("format", SCHEMES)
@pytest.mark.parametrize("shape", [*SHAPES, (4, 20, 100)])
def test_the_reference_serves_every_format_and_shape(format, shape):
    arguments, wanted = operands(format, *shape)
    assert error(gemm(*arguments, torch.float32, backend="reference"), wanted) < 2e-6


@pytest.mark.parametrize("k", [100, 128])
def test_int8_serves_any_k_and_is_exact_before_its_scales(k):
    (a, b, a_scale, b_scale), _ = operands("int8", 9, 20, k)
    got = gemm(a, b, torch.ones_like(a_scale), torch.ones_like(b_scale), torch.float32, backend="triton_int8")
    assert torch.equal(got.double(), a.double() @ b.double().T)


TABLES = [
    (triton_bf16, [*triton_bf16.SMALL_TILES.values(), triton_bf16.WIDE, triton_bf16.SQUARE], "bfloat16"),
    (fp8_block, [*fp8_block.SMALL_TILES.values(), fp8_block.SQUARE], "fp8_block"),
    (int8, [*int8.SMALL_TILES.values(), int8.WIDE, int8.SQUARE], "int8"),
]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("format", "tiles"), [(format, tiles) for _, table, format in TABLES for tiles in table], ids=str
)
def test_every_tile_of_the_tables_is_right(format, tiles, splits):
    """K in 3 parts has a part of another length; strides of 256 bytes take the descriptors, where tiles are large."""
    m, n, k = tiles.block_m + 1, tiles.block_n + 3, 512
    tiles = tiles._replace(splits=splits)
    if format == "bfloat16":
        a, b = randn(m, k, dtype=torch.bfloat16), randn(n, k, seed=1, dtype=torch.bfloat16)
        got, wanted = triton_bf16.gemm_bf16(a, b, torch.float32, tiles), a.double() @ b.double().T
    else:
        arguments, wanted = operands(format, m, n, k)
        kernel = fp8_block.gemm_fp8_block if format == "fp8_block" else int8.gemm_row_scaled
        got = kernel(*arguments, torch.float32, tiles)
    assert error(got, wanted) < (1e-3 if DEVICE == "cuda" and format == "fp8_block" else 2e-6)


@pytest.mark.parametrize(
    ("m", "n", "rows"),
    [
        (4096, 2112, 29 * 128),  # 288 tiles of 128 x 256: two waves of 132, and 24; a row of tiles is 9
        (4096, 7168, 4096),  # 896: six waves, and 104, which is more than half of one
        (8192, 8192, 8192),  # 2048: fifteen, and 68
        (4096, 256, 4096),  # 32: no whole wave
        (128, 34048, 128),  # one row of 133 tiles
        (132 * 128, 256, 132 * 128),  # exactly one wave
        (133 * 128, 256, 132 * 128),
        (133 * 128 - 1, 256, 132 * 128),
    ],
)
def test_rows_that_fill_no_whole_wave_are_left_over(m, n, rows):
    assert rows_of_whole_waves(Tiles(128, 256, 64, 8, 3), m, n, 132) == rows


@pytest.mark.parametrize("format", ["bfloat16", "fp8_block", "int8"])
def test_a_product_in_two_pieces_is_the_product(format, monkeypatch):
    """One row of tiles more than a wave has: it is a product of its own, and its K is in several parts."""
    module = {"bfloat16": triton_bf16, "fp8_block": fp8_block, "int8": int8}[format]
    tiles = Tiles(64, 64, 128, 4, 2)
    monkeypatch.setattr(module, "choose_tiles", lambda *_: tiles)
    launches = []
    launch = module.launch
    monkeypatch.setattr(module, "launch", lambda kernel, a, *rest, **more: launches.append((len(a), rest[3].splits)) or
                        launch(kernel, a, *rest, **more))  # fmt: skip
    programs = tiles_module.num_programs(torch.device(DEVICE))
    m, n, k = 64 * (programs + 1) - 3, 60, 1024
    if format == "bfloat16":
        a, b = randn(m, k, dtype=torch.bfloat16), randn(n, k, seed=1, dtype=torch.bfloat16)
        got, wanted = triton_bf16.gemm_bf16(a, b, torch.float32), a.double() @ b.double().T
    else:
        arguments, wanted = operands(format, m, n, k)
        got = (fp8_block.gemm_fp8_block if format == "fp8_block" else int8.gemm_row_scaled)(*arguments, torch.float32)
    assert [rows for rows, _ in launches] == [61, 64 * programs]
    assert [splits > 1 for _, splits in launches] == [True, False]
    assert error(got, wanted) < (1e-3 if DEVICE == "cuda" and format == "fp8_block" else 2e-6)


def test_padding_beyond_the_operands_is_never_read():
    whole_a, whole_b = randn(20, 160), randn(70, 160, seed=1)
    for whole in (whole_a, whole_b):
        whole[:, 100:] = torch.nan
    whole_a[5:], whole_b[33:] = torch.nan, torch.nan
    a, b = whole_a[:5, :100], whole_b[:33, :100]
    assert error(gemm(a, b, backend="triton_bf16"), a.double() @ b.double().T) < 2e-6


def test_scales_may_lie_column_by_column():
    (a, b, a_scale, b_scale), wanted = operands("fp8_block", 7, 100, 256)
    got = gemm(a, b, a_scale.T.contiguous().T, b_scale.T.contiguous().T, torch.float32, backend="triton_fp8_block")
    assert error(got, wanted) < (1e-3 if DEVICE == "cuda" else 2e-6)


def test_a_fresh_accumulator_keeps_what_a_long_sum_would_lose():
    """One block of K is 2^20 times the others. Scaled by itself it costs them nothing."""
    a, b = randn(4, 512), randn(8, 512, seed=1)
    a[:, :128] *= 2.0**20
    a[:, :128] = a[:, :128] - a[:, :128] @ b[:, :128].T @ torch.linalg.pinv(b[:, :128].T)  # its products cancel
    (qa, sa), (qb, sb) = quantize_1x128(a[:, 128:].contiguous()), quantize_128x128(b[:, 128:].contiguous())
    wanted = dequantize(qa, sa, torch.float64) @ dequantize(qb, sb, torch.float64).T
    got = gemm(qa, qb, sa, sb, torch.float32, backend="triton_fp8_block")
    assert error(got, wanted) < (1e-3 if DEVICE == "cuda" else 2e-6)


def test_a_k_without_whole_scales_is_refused_with_the_remedy():
    a, b = (quantize_per_token(randn(4, 100, seed=s))[0] for s in (0, 1))
    with pytest.raises(ValueError, match=r"K should be a multiple of 128 .* got 100: keep such a layer in bfloat16"):
        fp8_block.gemm_fp8_block(a, b, torch.ones(4, 1, device=DEVICE), torch.ones(1, 1, device=DEVICE))
    arguments, _ = operands("fp8_block", 4, 8, 200)
    with pytest.raises(ValueError, match="triton_fp8_block' needs K that is a multiple of 128"):
        gemm(*arguments, backend="triton_fp8_block")


def test_wrong_operands_are_refused_by_name():
    a, b = randn(3, 64), randn(5, 64)
    with pytest.raises(ValueError, match=r"\[M, K\] and \[N, K\]"):
        gemm(a, b[:, :32])
    with pytest.raises(ValueError, match=r"b should be torch\.float32"):
        gemm(a, b.half())
    with pytest.raises(ValueError, match=r"left out for torch\.float32"):
        gemm(a, b, torch.ones(3, 1), torch.ones(5, 1))
    q = quantize_per_token(a)[0]
    with pytest.raises(ValueError, match="should be given"):
        gemm(q, q)
    with pytest.raises(ValueError, match=r"should be \[3, 1\] and \[3, 1\], \[\] and \[\], or"):
        gemm(q, q, torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match="block_n that divides it"):
        (x, y, sx, sy), _ = operands("fp8_block", 4, 8, 128)
        fp8_block.gemm_fp8_block(x, y, sx, sy, tiles=Tiles(32, 256, 128, 4, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 64, 128), (17, 128, 256), (129, 256, 512), (1024, 4096, 1024), (4096, 2112, 7168)]
)
@pytest.mark.parametrize("format", ["bfloat16", *SCHEMES])
def test_every_backend_that_serves_a_shape_on_a_gpu_gives_the_product(format, shape):
    m, n, k = shape
    if format == "bfloat16":
        arguments = (randn(m, k, dtype=torch.bfloat16), randn(n, k, seed=1, dtype=torch.bfloat16))
        wanted = arguments[0].double() @ arguments[1].double().T
    else:
        arguments, wanted = operands(format, m, n, k)
    problem = dispatch.describe(*(*arguments, None, None)[:4], torch.bfloat16)
    serving = [row.name for row in dispatch.TABLE if dispatch.obstacle_of(row, problem, asked=True) is None]
    assert len(serving) >= 2
    for name in serving:
        assert error(gemm(*arguments, backend=name), wanted) < 4e-3, name


@pytest.mark.gpu
def test_a_product_can_be_captured_in_a_graph_and_replayed():
    for m in (4, 300):
        a, b = randn(m, 1024, dtype=torch.bfloat16), randn(512, 1024, seed=1, dtype=torch.bfloat16)
        gemm(a, b, backend="triton_bf16")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gemm(a, b, backend="triton_bf16")
        a.copy_(randn(m, 1024, seed=2, dtype=torch.bfloat16))
        graph.replay()
        assert error(out, a.double() @ b.double().T) < 4e-3
