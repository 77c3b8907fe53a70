"""Set 4, PagedAttention: the steps of a kernel that attends over pages.

Which slots does a tile of keys come from (`load_tile`)? How do query heads become rows (`pack_queries`)? How do the
results of splits become one (`merge_splits`)? At which element of the cache does a key begin (`key_offsets`)?

    keys of the request    |--- tile 0 ---|--- tile 1 ---|-- tile 2      n .. n + BLOCK_N - 1, the last one cut short
    pages                  |--- 5 ---|--- 2 ---|--- 7 ---|- -1 - 2^31-1 -     tails of pages and of tables: garbage

Inputs are small and their numbers tell where they come from: a key of page b, offset o reads 10 b + o.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.exercises.checking import Case, Exercise, plural
from minivllm.exercises.tensors import LazyCases, not_a_tensor, numbers, wrong_shape

if TYPE_CHECKING:
    from torch import Tensor

NAN = float("nan")
INF = float("inf")
INT32_MAX = 2**31 - 1


def show_rows(tensor: "Tensor") -> str:
    """A tensor with its shape, one line a row."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor[None]
    lines = [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"]
    return "\n".join(lines + [numbers(row) for row in rows])


def load_tile(cache: "Tensor", block_table: "Tensor", start: int, block_n: int, seq_len: int) -> "Tensor":
    """The keys of positions start .. start + block_n - 1, [block_n, D]; zeros for positions from seq_len on."""
    block_size = cache.shape[1]
    tile = cache.new_zeros(block_n, cache.shape[2])
    for i, position in enumerate(range(start, min(start + block_n, seq_len))):
        tile[i] = cache[block_table[position // block_size], position % block_size]
    return tile


def judge_tile(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first key that is wrong, and where it should have come from."""
    why = not_a_tensor(got) or wrong_shape(expected, got, "[block_n, D]")
    if why:
        return why
    start, seq_len, block_size = inputs["start"], inputs["seq_len"], inputs["cache"].shape[1]
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        if (want == have).all():
            continue
        position = start + i
        if position >= seq_len:
            end = f"the request ends at {seq_len}"
            return f"row {i} is position {position}, and {end}: expected zeros, got {numbers(have)}"
        entry, offset = position // block_size, position % block_size
        page = int(inputs["block_table"][entry])
        return (
            f"row {i} is position {position}, in table entry {entry} (page {page}) at offset {offset}: "
            f"expected {numbers(want)}, got {numbers(have)}"
        )
    return None


def tile_case(table: list[int], block_size: int, start: int, block_n: int, seq_len: int, **about: Any) -> Case:
    """A pool of 8 pages in which only the request's own slots hold numbers; the rest is NaN."""
    import torch

    cache = torch.full((8, block_size, 2), NAN)
    for position in range(seq_len):
        page, offset = table[position // block_size], position % block_size
        cache[page, offset] = torch.tensor([10.0 * page + offset, float(position)])
    return Case((cache, torch.tensor(table, dtype=torch.int32), start, block_n, seq_len), **about)


LOAD_TILE = Exercise(
    name="ps04.load_tile",
    oracle=load_tile,
    judge=judge_tile,
    show=show_rows,
    hint="walk the table position by position, and stop at seq_len: what lies behind it is neither looked up nor read",
    cases=LazyCases(
        lambda: (
            tile_case([5, 2, 7], 4, 0, 4, 12, hint="the first tile is the first page, wherever that lies"),
            tile_case([5, 2, 7], 4, 4, 8, 12, hint="a tile of 8 keys takes two pages of 4"),
            tile_case([5, 2, 7], 4, 2, 4, 12, hint="a tile may begin in the middle of a page"),
            tile_case([6, 1], 8, 8, 4, 16, hint="a page may hold several tiles: this one is the first half of page 1"),
            tile_case([5, 2, 7], 4, 8, 4, 10, hidden=True, hint="the last page is partly filled: the rest is masked"),
            tile_case(
                [5, 2, -1, INT32_MAX],
                4,
                4,
                8,
                8,
                hidden=True,
                hint="the table's tail holds anything: entries of positions from seq_len on must not be looked up",
            ),
            tile_case([3], 4, 4, 4, 3, hidden=True, hint="a tile that lies behind the request is all zeros"),
            tile_case([], 4, 0, 4, 0, hidden=True, hint="a request without keys has an empty table"),
            tile_case(
                [4, 0, 6], 1, 0, 4, 3, hidden=True, hint="with pages of one slot each key has an entry of its own"
            ),
            tile_case([7, 0], 4, 4, 4, 5, hidden=True, hint="a single key in the last page"),
        )
    ),
)


def pack_queries(q: "Tensor", num_kv_heads: int) -> "Tensor":
    """q [s_q, H, D] -> [Hkv, s_q * group, D]: row r of K/V head h is token r // group, head h group + r % group."""
    import torch

    s_q, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    row = torch.arange(s_q * group)
    return torch.stack([q[row // group, h * group + row % group] for h in range(num_kv_heads)])


def judge_packed(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first row that holds another query than it should."""
    why = not_a_tensor(got) or wrong_shape(expected, got, "[Hkv, s_q * group, D]")
    if why:
        return why
    q = inputs["q"]
    group = q.shape[1] // inputs["num_kv_heads"]
    for kv_head in range(expected.shape[0]):
        for row in range(expected.shape[1]):
            want, have = expected[kv_head, row], got[kv_head, row]
            if (want == have).all():
                continue
            token, head = row // group, kv_head * group + row % group
            found = (q == have).all(-1).nonzero().tolist()
            what = f"token {found[0][0]}, head {found[0][1]}" if found else f"{numbers(have)}, which is no query"
            return f"row {row} of K/V head {kv_head} is token {token}, head {head} (group {group}); got {what}"
    return None


def queries(s_q: int, num_heads: int) -> "Tensor":
    """q [s_q, H, 2] whose numbers are the token and the head."""
    import torch

    token, head = torch.meshgrid(torch.arange(s_q), torch.arange(num_heads), indexing="ij")
    return torch.stack([token, head], dim=-1).float()


PACK_QUERIES = Exercise(
    name="ps04.pack_queries",
    oracle=pack_queries,
    judge=judge_packed,
    show=show_rows,
    hint="split the heads into [Hkv, group], then bring Hkv to the front; the tokens stay outside the group",
    cases=LazyCases(
        lambda: (
            Case((queries(1, 4), 2), hint="a decode: neighbouring heads share a K/V head"),
            Case((queries(1, 6), 2), hint="heads 0, 1, 2 belong to K/V head 0; not every second one"),
            Case((queries(1, 8), 1), hint="MQA: all heads are rows of one tile"),
            Case((queries(3, 4), 2), hidden=True, hint="with several tokens the rows of one token stay together"),
            Case((queries(2, 3), 3), hidden=True, hint="MHA: a group of one, rows are tokens"),
            Case((queries(2, 6), 1), hidden=True, hint="MQA with two tokens: six rows each"),
            Case((queries(4, 6), 3), hidden=True),
            Case((queries(0, 4), 2), hidden=True, hint="no tokens: a tile of no rows, but of the right shape"),
        )
    ),
)


def merge_splits(outs: "Tensor", lses: "Tensor") -> "tuple[Tensor, Tensor]":
    """outs [splits, D] and lses [splits] of one row -> its out [D] and lse, a tensor without dimensions."""
    import torch

    lse = torch.logsumexp(lses, dim=0)
    out = torch.zeros_like(outs[0])
    for o, part_lse in zip(outs, lses, strict=True):
        if part_lse > -INF:
            out = out + torch.exp(part_lse - lse) * o
    return out, lse


def judge_merge(expected: "tuple[Tensor, Tensor]", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare lse first, since the weights follow from it."""
    import torch

    if not isinstance(got, tuple) or len(got) != 2:
        return f"the answer is a {type(got).__name__}, not the pair (out, lse)"
    out, lse = got
    why = (
        not_a_tensor(out, "out")
        or not_a_tensor(lse, "lse")
        or wrong_shape(expected[0], out, "[D]", "out")
        or wrong_shape(expected[1], lse, "[]", "lse")
    )
    if why:
        return why
    lses = inputs["lses"]
    empty = int((lses == -INF).sum())
    kinds = f"{plural(len(lses), 'split')}, {empty} of them empty"
    if not torch.allclose(lse, expected[1], rtol=1e-5, atol=1e-6):
        return f"{kinds}: lse should be {expected[1]:.4f}, got {lse:.4f}"
    if not torch.allclose(out, expected[0], rtol=1e-5, atol=1e-6):
        weights = torch.exp(lses - expected[1]).nan_to_num(0.0)
        return (
            f"{kinds}: the outputs weigh {numbers(weights)}, so out should be {numbers(expected[0])}, "
            f"got {numbers(out)}"
        )
    return None


def show_pair(pair: "tuple[Tensor, Tensor]") -> str:
    out, lse = pair
    return f"out {numbers(out)}, lse {lse:.4f}"


def merge_case(outs: list[list[float]], lses: list[float], **about: Any) -> Case:
    import torch

    return Case((torch.tensor(outs), torch.tensor(lses)), **about)


MERGE_SPLITS = Exercise(
    name="ps04.merge_splits",
    oracle=merge_splits,
    judge=judge_merge,
    show=show_pair,
    hint="lse = log of the sum of exp(lse_i); each output enters with the weight exp(lse_i - lse)",
    cases=LazyCases(
        lambda: (
            merge_case([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0], hint="two splits of equal weight: the mean; lse = log 2"),
            merge_case([[1.0, 0.0], [0.0, 1.0]], [2.0, 0.0], hint="the first split weighs e^2 / (e^2 + 1) = 0.8808"),
            merge_case([[3.0, -1.0]], [0.7], hint="a single split: nothing changes"),
            merge_case([[1.0, 2.0], [5.0, 4.0], [-1.0, 0.5]], [0.3, 1.7, -2.0], hint="three splits"),
            merge_case(
                [[1.0, 2.0], [NAN, NAN]],
                [0.5, -INF],
                hidden=True,
                hint="an empty split has lse = -inf, and its output was never written: it must not be read",
            ),
            merge_case(
                [[1.0, 0.0], [0.0, 1.0]],
                [200.0, 199.0],
                hidden=True,
                hint="exp(200) is too large for float32: subtract the maximum before exp",
            ),
            merge_case(
                [[NAN, 7.0], [NAN, NAN]],
                [-INF, -INF],
                hidden=True,
                hint="a row that no split has seen: zeros and -inf, not NaN",
            ),
            merge_case([[1.0, 0.0], [0.0, 1.0]], [-200.0, -201.0], hidden=True, hint="exp(-200) is 0 in float32"),
            merge_case([[NAN, NAN], [2.0, 3.0], [NAN, NAN]], [-INF, -150.0, -INF], hidden=True),
        )
    ),
)


def key_offsets(pages: "Tensor", offsets: "Tensor", page_stride: int, slot_stride: int) -> "Tensor":
    """The element of the cache at which each key begins: int64 [keys]; pages and offsets are int32 [keys]."""
    return pages.long() * page_stride + offsets.long() * slot_stride


def judge_offsets(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first key whose offset is wrong, and say when a 32-bit number is to blame."""
    import torch

    why = not_a_tensor(got) or wrong_shape(expected, got, "[keys]")
    if why:
        return why
    if got.is_floating_point():
        return f"the dtype is {got.dtype}; an address is a whole number, and floats skip some of the large ones"
    for i, (want, have) in enumerate(zip(expected.tolist(), got.tolist(), strict=True)):
        if want == have:
            continue
        page, offset = int(inputs["pages"][i]), int(inputs["offsets"][i])
        why = f"key {i} (page {page}, offset {offset}) begins at element {want}, got {have}"
        if (want - have) % 2**32 == 0:
            return f"{why}: {(want - have) // 2**32} x 2^32 too low, a 32-bit number has run over"
        return why
    if got.dtype != torch.int64:
        return f"the dtype is {got.dtype}; offsets beyond 2^31 - 1 need torch.int64"
    return None


def offsets_case(pages: list[int], offsets: list[int], page_stride: int, slot_stride: int, **about: Any) -> Case:
    import torch

    tensors = (torch.tensor(pages, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32))
    return Case((*tensors, page_stride, slot_stride), **about)


KEY_OFFSETS = Exercise(
    name="ps04.key_offsets",
    oracle=key_offsets,
    judge=judge_offsets,
    show=lambda offsets: repr(offsets.tolist()),
    hint="make the page number 64 bits wide before it is multiplied; afterwards is too late",
    cases=LazyCases(
        lambda: (
            offsets_case(
                [131_071, 131_072], [15, 0], 16_384, 1024, hint="131,072 x 16,384 = 2^31, one past the int32's"
            ),
            offsets_case([5, 2], [3, 0], 128, 32, hint="a small cache: the same formula"),
            offsets_case(
                [140_000, 7], [4, 9], 16_384, 1024, hint="the order of pages says nothing: look at each product"
            ),
            offsets_case(
                [300_000],
                [1],
                16_384,
                1024,
                hidden=True,
                hint="beyond 2^32 an unsigned 32-bit number runs over, too",
            ),
            offsets_case(
                [1],
                [200],
                2**20,
                2**25,
                hidden=True,
                hint="the stride of a slot may be large as well: 200 x 2^25 is beyond int32",
            ),
            offsets_case([600_001], [3], 16_385, 1025, hidden=True, hint="an odd number that float32 cannot hold"),
            offsets_case([], [], 16_384, 1024, hidden=True, hint="no keys, no offsets"),
        )
    ),
)

EXERCISES = (LOAD_TILE, PACK_QUERIES, MERGE_SPLITS, KEY_OFFSETS)
