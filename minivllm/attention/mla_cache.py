"""How MLA's kernel finds and reads rows of the latent cache: through pages or slots, plain or FP8.

    look_up   page numbers or slots of a tile of keys     (one load from a table, made a tile ahead)
    place     offsets of their rows in the cache, and which rows exist
    load_rows the rows themselves, as they are stored

store.py has the layouts. Rows that do not exist come back as zeros and their memory is not touched.
"""

from minivllm.attention.common import load_pages
from minivllm.triton_env import tl, triton


@triton.jit
def look_up(table, n, hi, SPARSE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the keys n .. n + BLOCK_N are said to be: their pages, or with SPARSE their slots, -1 for none."""
    if SPARSE:
        key = n + tl.arange(0, BLOCK_N)
        entry = tl.load(table + key, mask=key < hi, other=-1).to(tl.int64)
    else:
        entry = load_pages(table, n, hi, BLOCK_SIZE, BLOCK_N)
    return entry


@triton.jit
def place(entry, n, hi, cache_block, cache_slot, SPARSE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets of the rows of the keys n .. n + BLOCK_N in elements of the cache, and which of them exist."""
    key = n + tl.arange(0, BLOCK_N)
    if SPARSE:
        offset = entry // BLOCK_SIZE * cache_block + entry % BLOCK_SIZE * cache_slot
        inside = entry >= 0
    else:
        offset = entry * cache_block + key % BLOCK_SIZE * cache_slot
        inside = key < hi
    return offset, inside


@triton.jit
def load_rows(
    cache, offset, inside, FP8: tl.constexpr,
    DC: tl.constexpr, DR: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rows as they are stored: c [N, BLOCK_C], rope [N, BLOCK_R], scale [N, BLOCK_C / 128]; 0 where not inside."""
    column = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    row = cache + offset[:, None]
    c_mask = inside[:, None] & (column < DC)[None, :]
    r_mask = inside[:, None] & (r < DR)[None, :]
    if FP8:
        group = tl.arange(0, BLOCK_C // 128)
        c_at = row.to(tl.pointer_type(tl.float8e4nv)) + column[None, :]
        scale_at = (row + DC).to(tl.pointer_type(tl.float32)) + group[None, :]
        rope_at = (row + DC + DC // 32).to(tl.pointer_type(tl.bfloat16)) + r[None, :]
        scale = tl.load(scale_at, mask=inside[:, None] & (group < DC // 128)[None, :], other=0.0)
    else:
        c_at = row + column[None, :]
        rope_at = row + DC + r[None, :]
        scale = 1.0
    return tl.load(c_at, mask=c_mask, other=0.0), tl.load(rope_at, mask=r_mask, other=0.0), scale
