"""`rejection.verify` as a Triton kernel: one program a row, which reads p and q once or twice and writes two numbers.

A recovered token is found as the ordinary sampler finds its own: the first token at which the running sum of the
residual passes u times its total. Sums are taken in float64, tile by tile, so both versions agree.
"""

import torch

from minivllm.triton_env import tl, triton
from minivllm.triton_launch import launch_kernel

_TILE = 1024


@triton.jit
def _residual(p, q, row, column, V, draft, use_p, HAS_Q: tl.constexpr):
    """One tile of max(p - q, 0), or of p where nothing is left of that; 0 beyond the vocabulary."""
    x = tl.load(p + row * V + column, mask=column < V, other=0.0)
    if HAS_Q:
        left = tl.maximum(x - tl.load(q + row * V + column, mask=column < V, other=0.0), 0.0)
    else:
        left = tl.where(column == draft, 0.0, x)
    return tl.where(use_p, x, left).to(tl.float64)


@triton.jit
def _total(p, q, row, V, draft, use_p, HAS_Q: tl.constexpr, TILE: tl.constexpr):
    total = tl.zeros([], tl.float64)
    for start in range(0, V, TILE):
        total += tl.sum(_residual(p, q, row, start + tl.arange(0, TILE), V, draft, use_p, HAS_Q), 0)
    return total


@triton.jit
def _verify_kernel(
    p, q, draft_ids, u_accept, u_recover, accepted, recovered, V, HAS_Q: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    has_draft = tl.load(draft_ids + row) >= 0
    draft = tl.maximum(tl.load(draft_ids + row), 0)
    p_draft = tl.load(p + row * V + draft).to(tl.float64)
    q_draft = p_draft * 0.0 + 1.0
    if HAS_Q:
        q_draft = tl.load(q + row * V + draft).to(tl.float64)
    is_accepted = has_draft & (q_draft > 0) & (tl.load(u_accept + row) * q_draft < p_draft)
    tl.store(accepted + row, is_accepted.to(tl.int8))

    total = _total(p, q, row, V, draft, False, HAS_Q, TILE)
    use_p = total <= 0
    if use_p:
        total = _total(p, q, row, V, draft, True, HAS_Q, TILE)
    target = tl.load(u_recover + row) * total
    before = tl.zeros([], tl.float64)
    found = tl.full([], -1, tl.int64)
    last = tl.full([], 0, tl.int64)
    for start in range(0, V, TILE):
        column = start + tl.arange(0, TILE)
        x = _residual(p, q, row, column, V, draft, use_p, HAS_Q)
        sums = before + tl.cumsum(x, 0)
        first = tl.min(tl.where((sums > target) & (x > 0), column, V), 0).to(tl.int64)
        found = tl.where((found < 0) & (first < V), first, found)
        # Rounding may push the target to the very end: then it is the last token that has any mass.
        last = tl.maximum(last, tl.max(tl.where(x > 0, column, 0), 0).to(tl.int64))
        before += tl.sum(x, 0)
    tl.store(recovered + row, tl.where(found < 0, last, found))


def verify_rows(
    p: torch.Tensor, q: torch.Tensor | None, draft_ids: torch.Tensor, u_accept: torch.Tensor, u_recover: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rejection.verify`."""
    num_rows, vocab_size = p.shape
    accepted = torch.empty(num_rows, dtype=torch.int8, device=p.device)
    recovered = torch.empty(num_rows, dtype=torch.int64, device=p.device)
    p, q = p.contiguous(), None if q is None else q.contiguous()
    tensors = (p, q, draft_ids, u_accept, u_recover, accepted, recovered)
    tile = min(_TILE, triton.next_power_of_2(vocab_size))
    launch_kernel(_verify_kernel, (num_rows, 1, 1), tensors, (vocab_size,), HAS_Q=q is not None, TILE=tile)
    return accepted.bool(), recovered
