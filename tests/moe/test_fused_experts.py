"""The fused kernels beside the loop over experts: in Triton's interpreter on a CPU, compiled on a GPU."""

import pytest
import torch

from minivllm.gemm.grouped import FP8_TILES, TILES, choose_block_m, choose_tiles, grouped_gemm
from minivllm.gemm.quantize import FP8, dequantize, quantize_1x128, quantize_128x128
from minivllm.gemm.quantize_kernel import launch_quantize, quantize_activations
from minivllm.moe.align import align_and_sort, count_tiles
from minivllm.moe.experts import experts_by_loop, run_experts, sort_into_tiles
from minivllm.moe.fused import fused_experts
from minivllm.moe.routing import noaux_tc

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def choices(num_tokens, num_experts, top_k, load="even"):
    scores = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    if load == "skewed":  # the last expert is visited by all, the first by none
        scores[:, -1] += 10.0
        scores[:, 0] -= 10.0
    weights, ids = scores.softmax(-1).topk(top_k)
    if load == "one":
        ids = torch.full_like(ids, 2)
    return weights.to(DEVICE), ids.to(DEVICE)


def error(got, wanted):
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def in_float64(x, weights, ids, gate_up, down):
    """The formula, pair by pair."""
    pairs = x.double().repeat_interleave(ids.shape[1], dim=0)
    gate, up = torch.einsum("ph,pnh->pn", pairs, gate_up.double()[ids.flatten()]).chunk(2, dim=-1)
    y = torch.einsum("pi,phi->ph", gate * gate.sigmoid() * up, down.double()[ids.flatten()])
    return (y.view(*ids.shape, -1) * weights.double()[..., None]).sum(1)


@pytest.mark.parametrize("load", ["even", "skewed", "one"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "tile"),
    [(0, 4, 2, 16), (1, 8, 2, 16), (3, 3, 2, 2), (40, 6, 2, 4), (100, 5, 3, 16), (300, 9, 2, 32), (33, 128, 8, 16)],
)
def test_the_sort_is_that_of_the_reference(num_tokens, num_experts, top_k, tile, load):
    _, ids = choices(num_tokens, num_experts, top_k, load)
    pairs, expert_of_tile = align_and_sort(ids, num_experts, tile)
    assert len(expert_of_tile) == count_tiles(ids.numel(), num_experts, tile)
    if num_tokens == 0:
        assert len(pairs) == 0
        return
    wanted_pairs, wanted_experts = sort_into_tiles(ids, num_experts, tile)
    assert torch.equal(pairs.long(), wanted_pairs) and torch.equal(expert_of_tile.long(), wanted_experts)


def test_chunks_in_their_hundreds_are_summed_up_in_several_rounds():
    ids = torch.randint(3, (40_000, 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    if DEVICE == "cpu":
        ids = ids[: 128 * 20]
    pairs, experts = align_and_sort(ids, 3, 64)
    wanted_pairs, wanted_experts = sort_into_tiles(ids, 3, 64)
    assert torch.equal(pairs.long(), wanted_pairs) and torch.equal(experts.long(), wanted_experts)


@pytest.mark.parametrize("scores", ["ties", "nan"])
def test_ties_and_gates_that_are_not_numbers_lose_no_pair(scores):
    logits = torch.zeros(9, 8, device=DEVICE)
    if scores == "nan":
        logits[::2] = torch.nan
    _, ids = noaux_tc(logits, torch.zeros(8, device=DEVICE), top_k=3)
    pairs, experts = align_and_sort(ids, 8, 16)
    rows = pairs.view(-1, 16).cpu()
    found = [(pair, expert) for row, expert in zip(rows.tolist(), experts.tolist(), strict=True) for pair in row]
    assert sorted(found)[: ids.numel()] == list(enumerate(ids.flatten().tolist()))
    assert all(pair == ids.numel() for pair, _ in sorted(found)[ids.numel() :])


@pytest.mark.parametrize("load", ["even", "skewed", "one"])
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 33])
@pytest.mark.parametrize(("hidden", "width"), [(40, 24), (64, 100)])
def test_fused_experts_are_the_formula(hidden, width, num_tokens, load):
    x, gate_up, down = randn(num_tokens, hidden), randn(6, 2 * width, hidden, seed=1), randn(6, hidden, width, seed=2)
    weights, ids = choices(num_tokens, 6, 2, load)
    wanted = in_float64(x, weights, ids, gate_up, down)
    got = fused_experts(x, weights, ids, gate_up, down)
    assert error(got, wanted) < 2e-6
    assert torch.equal(got, fused_experts(x, weights, ids, gate_up, down))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_m", TILES)
def test_every_tile_of_the_table_is_right(block_m, dtype):
    hidden, width, num_tokens = 136, 72, 21
    x, gate_up, down = (
        randn(*shape, seed=seed, dtype=dtype)
        for seed, shape in enumerate([(num_tokens, hidden), (3, 2 * width, hidden), (3, hidden, width)])
    )
    weights, ids = choices(num_tokens, 3, 2, "skewed")
    wanted = in_float64(x, weights, ids, gate_up, down)
    # What is rounded on the way: the activated rows, the weighted rows, the sum.
    assert error(fused_experts(x, weights, ids, gate_up, down, block_m=block_m), wanted) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("width", [128, 192])
@pytest.mark.parametrize("block_m", FP8_TILES)
def test_block_scaled_products_are_those_of_the_dequantised_numbers(block_m, width):
    """192: gate and up meet inside of a block of 128 rows, and share its scale."""
    num_tokens, hidden, num_experts = 9, 256, 3
    (x, x_scale), (b, b_scale) = (
        quantize_1x128(randn(num_tokens, hidden)),
        quantize_128x128(randn(num_experts, 2 * width, hidden, seed=1)),
    )
    weights, ids = choices(num_tokens, num_experts, 2)
    pairs = align_and_sort(ids, num_experts, block_m)
    exact_x, exact_b = dequantize(x, x_scale, torch.float64), dequantize(b, b_scale, torch.float64)
    of_pairs = torch.einsum("pk,pnk->pn", exact_x.repeat_interleave(2, dim=0), exact_b[ids.flatten()])
    gate, up = of_pairs.chunk(2, dim=-1)
    slack = 1e-3 if DEVICE == "cuda" else 2e-6
    arguments = (x, b, *pairs, ids.numel(), 2)
    scales = {"a_scale": x_scale, "b_scale": b_scale, "out_dtype": torch.float32}
    assert error(grouped_gemm(*arguments, gated=True, **scales), gate * gate.sigmoid() * up) < slack
    flat = weights.flatten()
    assert error(grouped_gemm(*arguments, weights=flat, **scales), of_pairs * flat[:, None]) < slack


def test_fused_experts_in_block_fp8_lose_what_quantising_loses():
    num_tokens, hidden, width = 17, 128, 128
    x, gate_up, down = randn(num_tokens, hidden), randn(4, 2 * width, hidden, seed=1), randn(4, hidden, width, seed=2)
    weights, ids = choices(num_tokens, 4, 2)
    (q_gate_up, gate_up_scale), (q_down, down_scale) = quantize_128x128(gate_up), quantize_128x128(down)
    got = fused_experts(x, weights, ids, q_gate_up, q_down, gate_up_scale, down_scale)
    assert got.dtype == x.dtype
    assert error(got, experts_by_loop(x, weights, ids, gate_up, down)) < 0.08
    exact = (x, weights, ids, dequantize(q_gate_up, gate_up_scale), dequantize(q_down, down_scale))
    assert error(got, experts_by_loop(*exact)) < 0.05


def test_no_tokens_give_no_rows():
    weights, ids = choices(0, 4, 2)
    assert fused_experts(randn(0, 16), weights, ids, randn(4, 8, 16), randn(4, 16, 4)).shape == (0, 16)


def test_weights_of_other_experts_and_rows_of_padding_are_never_read():
    x, gate_up, down = randn(5, 32), randn(4, 16, 32, seed=1), randn(4, 32, 8, seed=2)
    weights, ids = choices(5, 4, 1, "one")
    wanted = experts_by_loop(x, weights, ids, gate_up, down)
    for expert in (0, 1, 3):
        gate_up[expert] = down[expert] = torch.nan
    assert error(fused_experts(x, weights, ids, gate_up, down), wanted) < 2e-6


def test_offsets_beyond_32_bits_are_right():
    """Two experts 2^31 + 64 numbers apart, most of which nobody touches, so that no memory stands behind them."""
    apart = 2**31 + 64
    memory = torch.empty(apart + 128, dtype=torch.float16, device=DEVICE)
    b = torch.as_strided(memory, (2, 8, 16), (apart, 16, 1))
    b.copy_(randn(2, 8, 16, seed=1))
    pairs, experts = align_and_sort(torch.ones(3, 1, dtype=torch.int64, device=DEVICE), 2, 16)
    a = randn(3, 16, dtype=torch.float16)
    assert error(grouped_gemm(a, b, pairs, experts, 3), a.double() @ b[1].double().T) < 1e-3


def test_tiles_follow_the_load():
    if DEVICE == "cuda":
        assert [choose_block_m(tokens * 8, 128) for tokens in (1, 64, 1024, 8192)] == [16, 16, 128, 128]
    assert choose_tiles(64, torch.bfloat16, True).block_m == choose_tiles(64, FP8, False).block_m == 64


def test_wrong_arguments_are_refused_by_name():
    x, gate_up, down = randn(3, 16), randn(4, 8, 16), randn(4, 16, 4)
    weights, ids = choices(3, 4, 2)
    with pytest.raises(ValueError, match="ids should be of the shape of weights"):
        fused_experts(x, weights[:2], ids, gate_up, down)
    with pytest.raises(ValueError, match=r"down should be of shape \(4, 16, 4\)"):
        fused_experts(x, weights, ids, gate_up, down[:, :8])
    pairs = align_and_sort(ids, 4, 16)
    with pytest.raises(ValueError, match="a should be of K = 16"):
        grouped_gemm(randn(3, 8), gate_up, *pairs, 6, 2)
    with pytest.raises(ValueError, match="even number of rows"):
        grouped_gemm(x, gate_up[:, :7], *pairs, 6, 2, gated=True)
    with pytest.raises(ValueError, match="weights should be 6 float32 numbers"):
        grouped_gemm(x, gate_up, *pairs, 6, 2, weights=torch.ones(5))
    q = torch.zeros(3, 100, dtype=FP8, device=DEVICE)
    with pytest.raises(ValueError, match="K should be a multiple of 128"):
        grouped_gemm(q, torch.zeros(4, 8, 100, dtype=FP8, device=DEVICE), *pairs, 6, 2)
    q = torch.zeros(3, 128, dtype=FP8, device=DEVICE)
    with pytest.raises(ValueError, match="a_scale should be float32 of shape"):
        grouped_gemm(q, torch.zeros(4, 8, 128, dtype=FP8, device=DEVICE), *pairs, 6, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (5, 128), (3, 1300), (0, 16)])
def test_the_int8_kernel_rounds_like_its_twin(shape, dtype):
    x = randn(*shape, dtype=dtype) * 3
    (q, scale), (wanted, wanted_scale) = launch_quantize(x, "int8"), quantize_activations(x.cpu(), "int8")
    torch.testing.assert_close(scale.cpu(), wanted_scale)
    assert (q.cpu().int() - wanted.int()).abs().max() <= 1 if x.numel() else q.shape == x.shape
    assert (q.cpu() != wanted).float().mean() < 0.01 if x.numel() else True


def test_scales_of_1x128_lie_column_by_column():
    x = randn(5, 300)
    _, scale = launch_quantize(x, "fp8_block")
    torch.testing.assert_close(scale, quantize_1x128(x)[1])
    assert scale.stride() == (1, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8_token", "fp8_block", "int8"])
@pytest.mark.parametrize("shape", [(1, 64), (129, 576), (64, 7168), (3, 20_000)])
def test_on_a_gpu_kernels_quantise_like_their_twins(shape, format):
    x = randn(*shape, dtype=torch.bfloat16)
    (q, scale), (wanted, wanted_scale) = quantize_activations(x, format), quantize_activations(x.cpu(), format)
    torch.testing.assert_close(scale.cpu(), wanted_scale)
    assert (q.cpu().float() != wanted.float()).float().mean() < 0.01


@pytest.mark.gpu
def test_on_a_gpu_a_layer_runs_the_fused_kernels_and_can_be_captured():
    x, gate_up, down = (
        randn(*shape, seed=seed, dtype=torch.bfloat16)
        for seed, shape in enumerate([(64, 512), (16, 512, 512), (16, 512, 256)])
    )
    weights, ids = choices(64, 16, 4)
    assert torch.equal(run_experts(x, weights, ids, gate_up, down), fused_experts(x, weights, ids, gate_up, down))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_experts(x, weights, ids, gate_up, down)
    ids.copy_(choices(64, 16, 4, "skewed")[1])
    graph.replay()
    wanted = in_float64(x, weights, ids, gate_up, down)
    assert error(out, wanted) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 1024, 8192])
def test_on_a_gpu_real_shapes_are_right(num_tokens):
    x = randn(num_tokens, 2048, dtype=torch.bfloat16)
    gate_up, down = (
        torch.randn(s, device=DEVICE, dtype=torch.bfloat16) / 32 for s in ((128, 1536, 2048), (128, 2048, 768))
    )
    weights, ids = choices(num_tokens, 128, 8)
    got = fused_experts(x, weights, ids, gate_up, down)
    wanted = experts_by_loop(x, weights, ids, gate_up, down)
    assert error(got, wanted) < 1e-2
