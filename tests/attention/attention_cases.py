"""Inputs for the kernel tests, made to break kernels: unused memory is NaN, table tails are garbage."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = 2**31 - 1
# Relative error ||out - ref|| / ||ref|| against float64: what rounding p and the output costs.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in a wider buffer, NaN in between: contiguous in the last dimension only."""
    wide = torch.full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 16), torch.nan, device=x.device).to(x.dtype)
    view = wide[..., 1:-2, : x.shape[-1]]
    view.copy_(x)
    return view


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return ((out.double() - ref.double()).norm() / ref.double().norm().clamp(min=1e-30)).item()


def assert_close(
    out: torch.Tensor,
    ref: torch.Tensor,
    lse: torch.Tensor | None = None,
    ref_lse: torch.Tensor | None = None,
    slack: float = 1.0,
):
    """Norms within slack x the dtype's tolerance, no outlier among rows, no NaN, empty rows exactly 0 and -inf."""
    assert out.shape == ref.shape
    assert torch.isfinite(out).all()
    tolerance = TOLERANCE[out.dtype] * slack
    assert relative_error(out, ref) <= tolerance
    if out.numel():
        rows = (out.double() - ref.double()).flatten(0, -2).norm(dim=-1)
        assert (rows <= 8 * tolerance * ref.double().flatten(0, -2).norm(dim=-1) + 1e-30).all()
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == ref_lse.shape
        empty = torch.isneginf(ref_lse)
        assert torch.equal(torch.isneginf(lse), empty)
        assert torch.allclose(lse[~empty], ref_lse[~empty].float(), atol=2e-3 * slack, rtol=1e-4)


def paged(block_size: int, *tensors: list[torch.Tensor], unused: float = torch.nan) -> tuple[torch.Tensor, ...]:
    """Put rows [s_k, ...] of each request into one cache [num_blocks, block_size, ...] for each list in tensors.

    Returns the caches, whose unused slots hold `unused` and whose blocks are shuffled, and then their block table,
    with garbage in its tails.
    """
    counts = [-(-len(r) // block_size) for r in tensors[0]]
    num_blocks, width = sum(counts) + 3, max([*counts, 1]) + 2
    order = torch.randperm(num_blocks).tolist()
    table = torch.full((len(counts), width), GARBAGE, dtype=torch.int32)
    table[:, -1] = -1
    for b, count in enumerate(counts):
        table[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    caches = []
    for rows in tensors:
        cache = torch.full((num_blocks, block_size, *rows[0].shape[1:]), unused, device=DEVICE).to(rows[0].dtype)
        for b, r in enumerate(rows):
            for i, part in enumerate(r.split(block_size) if len(r) else ()):
                cache[table[b, i], : len(part)] = part
        caches.append(cache)
    return *caches, table.to(DEVICE)
