"""`python -m minivllm bench kernels`: the three attention kernels at the shapes that the field quotes, with peers.

    flash   prefill, causal      TFLOP/s   2 B H S^2 D  (half of the square is counted)
    paged   decode               GB/s      bytes of K and V read
    mla     decode, 16 heads     GB/s      bytes of latents read: memory is the limit
            decode, 128 heads    TFLOP/s   2 B s_q H S (2 d_c + d_r): arithmetic is the limit

Times are of CUDA graph replays, L2 flushed before each, merge of splits included: what a captured decode step pays.
The error is ||out - ref|| / ||ref|| over a sample of rows, against the oracle in float64. A share of the ceiling is
measured in the same run: reads of device memory by a plain kernel, or a large bfloat16 product by cuBLAS.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from minivllm.attention import flash, mla, mla_schedule, paged, reference
from minivllm.attention.store import latent_row_bytes, store_latent
from minivllm.bench.environment import describe_code
from minivllm.bench.kernel_peers import flash_peers, mla_peers, paged_peers
from minivllm.bench.result_file import Measurement, ResultFile
from minivllm.triton_env import INTERPRET, tl, triton

DTYPE = torch.bfloat16
_WARMUP, _REPEATS = 5, 50
_WARMUP_SECONDS = 0.2
_FLUSH_BYTES = 2**28
_SAMPLE_ROWS = 64


@dataclass(frozen=True)
class Case:
    """One shape with everything that runs on it; work in FLOP or bytes."""

    name: str
    shapes: dict[str, int]
    work: float
    unit: str
    choice: str
    """Tiles (and splits) that minivllm chose."""
    ours: Callable[[], Tensor]
    peers: dict[str, Callable[[], Tensor]]
    sample: Callable[[Tensor], Tensor] = field(repr=False)
    """The rows of an output that are compared."""
    wanted: Callable[[], Tensor] = field(repr=False)
    """The oracle's float64 answer for those rows."""
    dtype: str = "bfloat16"


def _cumulative(length: int, batch: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length


def _shuffled_table(batch: int, blocks: int) -> Tensor:
    return torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)


def flash_case(batch: int, length: int, heads: int, kv_heads: int, d: int) -> Case:
    q, k, v = (torch.randn(batch * length, h, d, device="cuda", dtype=DTYPE) for h in (heads, kv_heads, kv_heads))
    cu = _cumulative(length, batch)
    group = heads // kv_heads
    rows = slice(length - _SAMPLE_ROWS, length)
    return Case(
        name=f"flash_b{batch}_s{length}_h{heads}_{kv_heads}_d{d}",
        shapes={"batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": d},
        work=2.0 * batch * heads * length**2 * d,
        unit="TFLOP/s",
        choice=str(tuple(flash.choose_tiles(d, 2))),
        ours=lambda: flash.flash_attn_varlen_func(q, k, v, cu, cu, length, length, causal=True),
        peers=flash_peers(q, k, v, cu, batch, length),
        sample=lambda out: out[rows, :group],
        wanted=lambda: reference.attend(q[rows, :group], k[:length, :1], v[:length, :1], d**-0.5, causal=True)[0],
    )


def paged_case(batch: int, context: int, heads: int, kv_heads: int, block_size: int, d: int = 128) -> Case:
    blocks = context // block_size
    k_cache, v_cache = torch.randn(2, batch * blocks, block_size, kv_heads, d, device="cuda", dtype=DTYPE)
    q = torch.randn(batch, heads, d, device="cuda", dtype=DTYPE)
    cu, table = _cumulative(1, batch), _shuffled_table(batch, blocks)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    splits = paged.choose_num_splits(batch * kv_heads, context, q.device)
    tiles = paged.choose_tiles(heads // kv_heads, d, 2, splits > 1)
    return Case(
        name=f"paged_b{batch}_c{context}_h{heads}_{kv_heads}_p{block_size}",
        shapes={"batch": batch, "context": context, "heads": heads, "kv_heads": kv_heads, "block_size": block_size},
        work=4.0 * batch * context * kv_heads * d,
        unit="GB/s",
        choice=f"{tuple(tiles)} splits {splits}",
        ours=lambda: paged.paged_attention(q, k_cache, v_cache, cu, lengths, table, 1),
        peers=paged_peers(q, k_cache, v_cache, cu, lengths, table, context),
        sample=lambda out: out[:1],
        wanted=lambda: reference.paged_attention(q[:1].double(), k_cache, v_cache, cu[:2], lengths[:1], table[:1], 1),
    )


def mla_case(batch: int, s_q: int, heads: int, context: int, fp8: bool = False, block_size: int = 64) -> Case:
    d_c, d_r, blocks, scale = 512, 64, context // block_size, 192**-0.5
    size = latent_row_bytes(d_c, d_r) if fp8 else d_c + d_r
    shape = (batch * blocks, block_size, 1, size)
    if fp8:
        cache = torch.empty(shape, dtype=torch.uint8, device="cuda")
        for slots in torch.arange(batch * context, device="cuda").split(2**18):
            c, rope = (torch.randn(len(slots), n, device="cuda", dtype=DTYPE) for n in (d_c, d_r))
            store_latent(c, rope, cache, slots)
    else:
        cache = torch.randn(shape, device="cuda", dtype=DTYPE)
    q = torch.randn(batch, s_q, heads, d_c + d_r, device="cuda", dtype=DTYPE)
    table = _shuffled_table(batch, blocks)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    plan = mla.get_mla_metadata(lengths, s_q * heads)
    options = {"softmax_scale": scale, "causal": s_q > 1, "is_fp8_kvcache": fp8}
    bound_by_memory = heads <= 32
    row_bytes = size * (1 if fp8 else 2)
    flops = 2.0 * batch * s_q * heads * context * (2 * d_c + d_r)
    return Case(
        name=f"mla_b{batch}_q{s_q}_h{heads}_c{context}{'_fp8' if fp8 else ''}",
        shapes={"batch": batch, "s_q": s_q, "heads": heads, "context": context, "block_size": block_size},
        work=float(batch * context * row_bytes) if bound_by_memory else flops,
        unit="GB/s" if bound_by_memory else "TFLOP/s",
        choice=f"{tuple(mla_schedule.choose_tiles(s_q * heads, 2, fp8))} parts {plan[0].shape[0]}",
        ours=lambda: mla.flash_mla_with_kvcache(q, cache, table, lengths, d_c, *plan, **options)[0],
        peers=mla_peers(q, cache, table, lengths, scale, fp8),
        sample=lambda out: out[:1],
        wanted=lambda: reference.flash_mla_with_kvcache(q[:1].double(), cache, table[:1], lengths[:1], d_c, **options)[
            0
        ],
    )


CASES: dict[str, list[Callable[[], Case]]] = {
    "flash": [
        lambda: flash_case(32, 512, 32, 8, 128),
        lambda: flash_case(8, 2048, 32, 8, 128),
        lambda: flash_case(4, 4096, 32, 8, 128),
        lambda: flash_case(1, 16384, 32, 8, 128),
        lambda: flash_case(4, 4096, 32, 32, 64),
        lambda: flash_case(1, 16384, 32, 32, 64),
    ],
    "paged": [
        lambda: paged_case(1, 4096, 32, 8, 16),
        lambda: paged_case(1, 131072, 32, 8, 16),
        lambda: paged_case(64, 4096, 32, 8, 16),
        lambda: paged_case(256, 1024, 32, 8, 16),
        lambda: paged_case(64, 4096, 32, 32, 16),
        lambda: paged_case(64, 4096, 32, 8, 64),
        lambda: paged_case(64, 4096, 32, 8, 256),
        lambda: paged_case(1, 131072, 32, 8, 256),
    ],
    "mla": [
        lambda: mla_case(128, 1, 128, 4096),
        lambda: mla_case(128, 2, 128, 4096),
        lambda: mla_case(128, 1, 16, 4096),
        lambda: mla_case(32, 1, 16, 16384),
        lambda: mla_case(1, 1, 128, 32768),
        lambda: mla_case(128, 1, 16, 4096, fp8=True),
    ],
}


@triton.jit
def _read_kernel(x, out, per_program, BLOCK: tl.constexpr):
    """Sum a stretch of x, to have read it: the ceiling of a kernel that only reads."""
    start = tl.program_id(0).to(tl.int64) * per_program
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, per_program, BLOCK):
        total += tl.load(x + start + i + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total))


def measure_ceilings() -> dict[str, float]:
    """GB/s of reads and TFLOP/s of a bfloat16 product on this GPU."""
    x = torch.randn(2**29, device="cuda")
    programs = 2**13
    out = torch.empty(programs, device="cuda")
    read = min(times(lambda: _read_kernel[(programs,)](x, out, x.numel() // programs, BLOCK=4096, num_warps=4)))
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=DTYPE)
    product = min(times(lambda: a @ b.T))
    return {"GB/s": x.numel() * 4 / read / 1e6, "TFLOP/s": 2 * 8192**3 / product / 1e9}


def times(call: Callable[[], object]) -> list[float]:
    """Milliseconds of each of _REPEATS replays of the call, captured in a CUDA graph: clocks up, L2 cache cold."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_REPEATS)]
    # A GPU that has waited for a compiler runs at a lower clock for a while: a kernel of 150 us would be timed there.
    until = time.perf_counter() + _WARMUP_SECONDS
    while time.perf_counter() < until:
        for _ in range(_WARMUP):
            graph.replay()
        torch.cuda.synchronize()
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def measure(case: Case, ceilings: dict[str, float]) -> list[Measurement]:
    """Ours and every peer that takes the shape, as one measurement each, in the case's unit."""
    wanted, found = case.wanted(), []
    divisor = 1e9 if case.unit == "TFLOP/s" else 1e6
    for name, call in {"minivllm": case.ours, **case.peers}.items():
        try:
            error = ((case.sample(call()).double() - wanted).norm() / wanted.norm()).item()
            samples = times(call)
        except (RuntimeError, TypeError, ValueError) as problem:
            if name == "minivllm":
                raise
            print(f"{case.name}: {name} does not take this shape ({str(problem)[:80]!r})", file=sys.stderr)
            continue
        rates = [case.work / ms / divisor for ms in samples]
        extra = {
            "microseconds": sorted(samples)[len(samples) // 2] * 1e3,
            "relative_error": error,
            "warmup_seconds": _WARMUP_SECONDS,
        }
        if name == "minivllm":
            extra["choice"] = case.choice
        m = Measurement.from_samples(
            f"{case.name}/{name}", rates, shapes=dict(case.shapes), dtype=case.dtype, unit=case.unit,
            warmup=_WARMUP, extra=extra,
        )  # fmt: skip
        extra["share_of_ceiling"] = m.median / ceilings[case.unit]
        found.append(Measurement(**{**m.__dict__, "extra": extra}))
        print(
            f"{m.name:44} {m.median:8.1f} {m.unit:8} {extra['microseconds']:9.1f} us  "
            f"{extra['share_of_ceiling']:5.1%} of ceiling  error {error:.1e}  {extra.get('choice', '')}",
            flush=True,
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m minivllm bench kernels`."""
    parser.set_defaults(run=run)
    parser.add_argument("--family", choices=sorted(CASES), help="default: all three")
    parser.add_argument("--json", metavar="OUT", help="write a result file")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a line for each kernel and shape, write the result file; 1 without a GPU."""
    if INTERPRET.value or not torch.cuda.is_available():
        print("bench kernels: needs a GPU: interpreted kernels have no speed worth measuring", file=sys.stderr)
        return 1
    package = Path(__file__).resolve().parents[1]
    code = describe_code([*sorted((package / "attention").glob("*.py")), *sorted(package.glob("triton_*.py"))])
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    print("ceilings: " + ", ".join(f"{value:.0f} {unit}" for unit, value in ceilings.items()))
    families = [arguments.family] if arguments.family else list(CASES)
    measurements = [m for family in families for build in CASES[family] for m in measure(build(), ceilings)]
    if arguments.json:
        name = f"kernels_{arguments.family or 'all'}"
        ResultFile.record(name, "cuda", measurements, code, extra={"ceilings": ceilings}).save(arguments.json)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minivllm bench kernels", description=__doc__.splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
