"""`python -m minivllm bench moe`: the experts of a layer, routing excluded, beside vLLM's and PyTorch's.

    E128 top8 H2048 I768     many small experts (Qwen3-30B-A3B)
    E8 top2 H4096 I14336     few large ones (Mixtral)

Work is 6 T top_k H I FLOP: gate, up and down of each pair. Where T is small the weights of the experts that are visited
are read for few rows, and microseconds tell more than TFLOP/s. Times are of CUDA graph replays with a cold L2 cache
(kernels.py), sort and final sum included; block fp8 includes quantising its inputs, and its error holds what it costs.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.bench.gemm import run_cases
from minivllm.bench.kernel_peers import vllm_function
from minivllm.bench.kernels import Case
from minivllm.gemm.grouped import choose_block_m, choose_tiles
from minivllm.gemm.quantize import FP8, quantize_128x128
from minivllm.moe.experts import experts_grouped
from minivllm.moe.fused import fused_experts

# Experts, top_k, hidden, width of an expert.
SMALL_EXPERTS, LARGE_EXPERTS = (128, 8, 2048, 768), (8, 2, 4096, 14336)
SHAPES = {SMALL_EXPERTS: (1, 64, 1024, 8192), LARGE_EXPERTS: (64, 1024, 8192)}
FAMILIES = ("bf16", "fp8_block")
_SAMPLE_ROWS = 8


def moe_case(family: str, num_tokens: int, num_experts: int, top_k: int, hidden: int, width: int) -> Case:
    """One layer at one number of tokens."""
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(num_tokens, hidden, **bf16)
    gate_up = torch.randn(num_experts, 2 * width, hidden, **bf16).mul_(hidden**-0.5)
    down = torch.randn(num_experts, hidden, width, **bf16).mul_(width**-0.5)
    scores = torch.randn(num_tokens, num_experts, device="cuda").softmax(-1)
    weights, ids = scores.topk(top_k)
    pairs = num_tokens * top_k
    arguments: tuple[Tensor, ...] = (x, weights, ids, gate_up, down)
    peers = moe_peers(*arguments) if family == "bf16" else {}
    dtype = torch.bfloat16
    wanted = exact(*(tensor[:_SAMPLE_ROWS] for tensor in (x, weights, ids)), gate_up, down)
    if family == "fp8_block":
        dtype = FP8
        (gate_up, gate_up_scale), (down, down_scale) = (_quantize_each(tensor) for tensor in (gate_up, down))
        arguments = (x, weights, ids, gate_up, down, gate_up_scale, down_scale)
    block_m = choose_block_m(pairs, num_experts)
    return Case(
        name=f"moe_{family}_t{num_tokens}_e{num_experts}_k{top_k}_h{hidden}_i{width}",
        shapes={
            "num_tokens": num_tokens, "num_experts": num_experts, "top_k": top_k, "hidden": hidden, "width": width,
        },
        work=6.0 * pairs * hidden * width,
        unit="TFLOP/s",
        choice=" ".join(str(tuple(choose_tiles(block_m, dtype, gated))) for gated in (True, False)),
        ours=lambda: fused_experts(*arguments),
        peers=peers,
        sample=lambda out: out[:_SAMPLE_ROWS],
        wanted=lambda: wanted,
        dtype="bfloat16" if family == "bf16" else "float8_e4m3fn",
    )  # fmt: skip


def _quantize_each(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Expert by expert: in one piece the float32 copies of large experts would not fit."""
    q, scale = zip(*(quantize_128x128(weight) for weight in weights), strict=True)
    return torch.stack(q), torch.stack(scale)


def exact(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The formula in float64, pair by pair: x [T, H] -> [T, H]."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (row, choice) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(row, choice, strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out


def moe_peers(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's grouped product, and vLLM's fused_experts where it is installed."""
    calls: dict[str, Callable[[], Tensor]] = {
        "torch_grouped": lambda: experts_grouped(x, weights, ids, gate_up, down),
    }
    fused = vllm_function("vllm.model_executor.layers.fused_moe", "fused_experts")
    settings, use_settings = (vllm_function("vllm.config", name) for name in ("VllmConfig", "set_current_vllm_config"))
    if fused and settings and use_settings:
        config, ids32 = settings(), ids.int()

        def call() -> Tensor:
            with use_settings(config):
                return fused(x, gate_up, down, weights, ids32)

        calls["vllm_fused_moe"] = call
    return calls


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a line for each way and shape, write the result file; 1 without a GPU."""
    families = [arguments.family] if arguments.family else FAMILIES
    cases = [
        lambda f=family, t=num_tokens, s=shape: moe_case(f, t, *s)
        for family in families
        for shape, counts in SHAPES.items()
        for num_tokens in counts
    ]
    return run_cases("moe", cases, arguments)
