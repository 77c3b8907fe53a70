"""One small case of every attention kernel, at odd sizes, for a tool that watches each access to memory.

    compute-sanitizer --tool memcheck python tests/attention/memory_cases.py
    python tests/attention/memory_cases.py --guard

With --guard every input lies between two stretches of NaN (of 2^31 - 1 where it holds indices), which must not reach
any output. Without it every tensor is an allocation of its own, as long as PYTORCH_NO_CUDA_MEMORY_CACHING=1 is set.
"""

import sys
from collections.abc import Callable

import torch
from attention_cases import DEVICE, GARBAGE, cumulative, int32, paged, randn

from minivllm.attention import flash, flash_backward, mla, mla_schedule, store
from minivllm.attention import paged as paged_kernel

BF16 = torch.bfloat16
GUARD = 4096

Wrap = Callable[[torch.Tensor], torch.Tensor]


def guarded(x: torch.Tensor) -> torch.Tensor:
    """The same values, with poison in front and behind."""
    poison = torch.nan if x.is_floating_point() else 255 if x.dtype == torch.uint8 else GARBAGE
    buffer = torch.full((x.numel() + 2 * GUARD,), poison, device=x.device).to(x.dtype)
    view = buffer[GUARD : GUARD + x.numel()].view(x.shape)
    return view.copy_(x)


def flash_forward(wrap: Wrap) -> list[torch.Tensor]:
    queries, keys = [1, 0, 33], [5, 7, 70]
    q = wrap(randn(sum(queries), 4, 80, dtype=BF16))
    k, v = (wrap(randn(sum(keys), 2, 80, dtype=BF16)) for _ in "kv")
    cu_q, cu_k = wrap(cumulative(queries)), wrap(cumulative(keys))
    return [flash.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(queries), max(keys), causal=True)]


def flash_gradients(wrap: Wrap) -> list[torch.Tensor]:
    q, k, v = (wrap(randn(1, 33, 2, 64, dtype=torch.float16)).requires_grad_() for _ in "qkv")
    out = flash_backward.flash_attn_func(q, k, v, causal=True)
    out.backward(wrap(torch.ones_like(out)))
    return [out.detach(), q.grad, k.grad, v.grad]


def paged_rows(wrap: Wrap, num_splits: int) -> list[torch.Tensor]:
    queries, contexts = [1, 4, 0, 1], [17, 33, 0, 1]
    k, v, table = paged(16, *([randn(n, 2, 80, dtype=BF16) for n in contexts] for _ in "kv"))
    q = wrap(randn(sum(queries), 6, 80, dtype=BF16))
    where = wrap(cumulative(queries)), wrap(int32(contexts)), wrap(table)
    return [paged_kernel.paged_attention(q, wrap(k), wrap(v), *where, max(queries), num_splits=num_splits)]


def latent_rows(wrap: Wrap, fp8: bool, sparse: bool) -> list[torch.Tensor]:
    contexts, s_q, heads, d_c, d_r = [65, 1, 0, 130], 2, 17, 128, 16
    c, table = paged(64, [randn(n, 1, d_c + d_r, dtype=BF16) for n in contexts])
    if fp8:
        rows = c.view(-1, d_c + d_r)
        used = (~rows[:, 0].isnan()).nonzero().flatten()
        size = store.latent_row_bytes(d_c, d_r)
        c = torch.full((*c.shape[:3], size), 255, dtype=torch.uint8, device=DEVICE)
        store.store_latent(rows[used, :d_c], rows[used, d_c:], c, used)
    q, lengths = wrap(randn(len(contexts), s_q, heads, d_c + d_r, dtype=BF16)), wrap(int32(contexts))
    indices = None
    if sparse:
        first = table[:, 0].clamp(0, c.shape[0] - 1).long() * 64
        indices = torch.stack((first, torch.full_like(first, -1)), 1)[:, None].expand(-1, s_q, -1)
        indices = torch.where(lengths[:, None, None] > 0, indices, -1).int().contiguous()
    topk = None if indices is None else indices.shape[2]
    plan = (
        mla_schedule.schedule(lengths, 3)
        if indices is None
        else mla.get_mla_metadata(lengths, s_q * heads, 1, num_heads_q=heads, topk=topk)
    )
    out, _ = mla.flash_mla_with_kvcache(
        q, wrap(c), wrap(table), lengths, d_c, *plan, softmax_scale=0.1, is_fp8_kvcache=fp8, indices=indices
    )
    return [out]


def stored(wrap: Wrap) -> list[torch.Tensor]:
    slots = wrap(torch.tensor([0, -1, 11], device=DEVICE))
    k_cache, v_cache = (wrap(torch.zeros(3, 4, 3, 80, device=DEVICE)) for _ in "kv")
    store.store_kv(wrap(randn(3, 3, 80)), wrap(randn(3, 3, 80)), k_cache, v_cache, slots)
    latents = wrap(torch.zeros(1, 16, 1, 48, device=DEVICE))
    store.store_latent(wrap(randn(3, 32)), wrap(randn(3, 16)), latents, slots)
    return [k_cache, v_cache, latents]


CASES: dict[str, Callable[[Wrap], list[torch.Tensor]]] = {
    "flash": flash_forward,
    "flash backward": flash_gradients,
    "paged": lambda wrap: paged_rows(wrap, 1),
    "paged, split": lambda wrap: paged_rows(wrap, 3),
    "mla": lambda wrap: latent_rows(wrap, fp8=False, sparse=False),
    "mla, fp8": lambda wrap: latent_rows(wrap, fp8=True, sparse=False),
    "mla, sparse": lambda wrap: latent_rows(wrap, fp8=False, sparse=True),
    "store": stored,
}


def run_all(wrap: Wrap) -> list[str]:
    """Runs every case; raises AssertionError where an output is not finite. Returns their names."""
    torch.manual_seed(0)
    for name, case in CASES.items():
        for out in case(wrap):
            assert torch.isfinite(out).all(), f"{name}: memory that is not its own reached the output"
    return list(CASES)


if __name__ == "__main__":
    print("ran", ", ".join(run_all(guarded if "--guard" in sys.argv else torch.clone)))
