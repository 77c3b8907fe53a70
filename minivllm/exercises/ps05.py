"""Set 5, MLA: what happens between a query and a latent that stands for all heads' keys and values.

How does a query get past the up-projection (`absorb_query`)? What does a kernel do with the rows (`latent_attention`)?
What lies where in a row of the FP8 cache (`unpack_row`)? How strongly does a query look (`absorbed_weights`)?

    row of a token   |-------- latent c, d_c numbers --------|-- rotary key, d_r --|
    the key          |------------------------- all of it -------------------------|
    the value        |---------------------------------------|
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.exercises.checking import Case, Exercise
from minivllm.exercises.tensors import LazyCases, first_difference, judge_tensor, numbers

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 128


def show_rows(tensor: "Tensor") -> str:
    """A tensor with its shape, one line a row."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return "\n".join([f"{list(tensor.shape)}", *map(numbers, rows)])


def random(seed: int, *shape: int) -> "Tensor":
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(seed: int, *shape: int) -> "Tensor":
    """Small whole numbers, so that a reader can work the sums out."""
    import torch

    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def absorb_query(q_nope: "Tensor", w_uk: "Tensor") -> "Tensor":
    """q_nope [H, d_nope] and w_uk [H, d_nope, d_c] -> the queries that meet latents: [H, d_c]."""
    import torch

    return torch.stack([w.T @ q for q, w in zip(q_nope, w_uk, strict=True)])


def judge_absorbed(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare head by head, and recognise the matrix of another head."""
    why = judge_tensor(expected, got, "[H, d_c]")
    if why:
        return why
    index = first_difference(expected, got)
    if index is None:
        return None
    head = index[0]
    why = f"head {head} should ask {numbers(expected[head])}, got {numbers(got[head])}"
    q, w_uk = inputs["q_nope"][head], inputs["w_uk"]
    for other in range(len(w_uk)):
        if other != head and first_difference(w_uk[other].T @ q, got[head]) is None:
            return f"{why}: that is its query through the matrix of head {other}"
    if w_uk.shape[1] == w_uk.shape[2] and first_difference(w_uk[head] @ q, got[head]) is None:
        return f"{why}: the matrix is applied the wrong way round, W q instead of W^T q"
    return why


ABSORB_QUERY = Exercise(
    name="ps05.absorb_query",
    oracle=absorb_query,
    judge=judge_absorbed,
    show=show_rows,
    hint="sum over d_nope, head by head: a query is multiplied by its own head's matrix, transposed",
    cases=LazyCases(
        lambda: (
            Case((whole(0, 2, 3), whole(1, 2, 3, 4)), hint="two heads, each with a matrix of its own"),
            Case((whole(2, 3, 2), whole(3, 3, 2, 5)), hint="the latent is wider than a head's key"),
            Case((whole(4, 2, 3), whole(5, 2, 3, 3)), hint="a square matrix: which of its dimensions is summed over?"),
            Case((whole(6, 1, 3), whole(7, 1, 3, 4)), hidden=True, hint="one head is still a row: [1, d_c]"),
            Case((whole(8, 3, 2), whole(9, 3, 2, 1)), hidden=True, hint="a latent of one number: [H, 1]"),
            Case((whole(10, 3, 1), whole(11, 3, 1, 2)), hidden=True, hint="keys of one number"),
            Case((whole(12, 4, 4), whole(13, 4, 4, 4)), hidden=True, hint="heads, keys and latent of the same size"),
        )
    ),
)


def latent_attention(q: "Tensor", rows: "Tensor", d_c: int, scale: float) -> "Tensor":
    """q [H, d_c + d_r] over rows [s_k, d_c + d_r] -> [H, d_c]; zeros where there are no rows."""
    import torch

    return torch.softmax(scale * (q @ rows.T), dim=-1) @ rows[:, :d_c]


def judge_attention(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare head by head, and recognise a key or a value that is the wrong part of the row."""
    import torch

    why = judge_tensor(expected, got, "[H, d_c]")
    if why:
        return why
    index = first_difference(expected, got)
    if index is None:
        return None
    head, (q, rows, d_c, scale) = index[0], inputs.values()
    why = f"head {head} should get {numbers(expected[head])}, got {numbers(got[head])}"
    if len(rows) == 0:
        return f"{why}: there is nothing to attend to"
    if got.isnan().any():
        return f"{why}; its largest score is {(scale * (q[head] @ rows.T)).max():.4g}"
    for keys, what in (
        (scale * (q[:, :d_c] @ rows[:, :d_c].T), "that is what comes out if the rotary part is left out of the key"),
        (q @ rows.T, "that is what comes out without the scale"),
    ):
        if first_difference(torch.softmax(keys, dim=-1) @ rows[:, :d_c], got) is None:
            return f"{why}: {what}"
    return why


LATENT_ATTENTION = Exercise(
    name="ps05.latent_attention",
    oracle=latent_attention,
    judge=judge_attention,
    show=show_rows,
    hint="the key is the whole row, the value its first d_c numbers; softmax over the rows",
    cases=LazyCases(
        lambda: (
            Case((whole(0, 1, 4), whole(1, 1, 4), 3, 0.5), hint="a single row gets all the weight"),
            Case((whole(2, 2, 4), whole(3, 3, 4), 2, 0.5), hint="two heads share the three rows"),
            Case((random(4, 4, 6), random(5, 5, 6), 4, 0.25), hint="four heads over five rows"),
            Case((random(6, 2, 6), random(7, 0, 6), 4, 0.25), hidden=True, hint="no rows: zeros, not NaN"),
            Case(
                (100 * random(8, 2, 6), random(9, 4, 6), 4, 1.0),
                hidden=True,
                hint="scores of some hundreds: subtract the maximum, or let torch.softmax do it",
            ),
            Case((random(10, 3, 5), random(11, 3, 5), 4, 0.25), hidden=True, hint="as many rows as heads"),
            Case((random(12, 1, 3), random(13, 6, 3), 1, 2.0), hidden=True, hint="a latent of one number"),
        )
    ),
)


def unpack_row(row: "Tensor", d_c: int, d_r: int) -> "Tensor":
    """One row of the FP8 cache, uint8 [d_c + 4 d_c / 128 + 2 d_r] -> its numbers, float32 [d_c + d_r]."""
    import torch

    num_scales = d_c // GROUP
    c, scales, rope = row.split([d_c, 4 * num_scales, 2 * d_r])
    c = c.view(torch.float8_e4m3fn).float().view(num_scales, GROUP) * scales.view(torch.float32)[:, None]
    return torch.cat([c.flatten(), rope.view(torch.bfloat16).float()])


def pack_row(c: "Tensor", scales: "Tensor", rope: "Tensor") -> "Tensor":
    """The row that holds these numbers: c as it is stored, one scale for each 128 of it, the rotary key."""
    import torch

    parts = (c.to(torch.float8_e4m3fn), scales.float(), rope.bfloat16())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def judge_row(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first wrong number, and where its bytes and its scale are."""
    why = judge_tensor(expected, got, "[d_c + d_r]")
    if why:
        return why
    index = first_difference(expected, got)
    if index is None:
        return None
    i, d_c = index[0], inputs["d_c"]
    want, have = expected[i].item(), got[i].item()
    rope_begins = d_c + 4 * d_c // GROUP
    if i >= d_c:
        at = rope_begins + 2 * (i - d_c)
        return (
            f"number {i} belongs to the rotary key (bfloat16, bytes {at} and {at + 1}): expected {want:g}, got {have:g}"
        )
    group = i // GROUP
    at = d_c + 4 * group
    return (
        f"number {i} belongs to group {group} (byte {i}, its scale in the bytes {at} to {at + 3}): "
        f"expected {want:g}, got {have:g}"
    )


def row_case(seed: int, d_c: int, d_r: int, scales: list[float], **about: Any) -> Case:
    import torch

    row = pack_row(whole(seed, d_c), torch.tensor(scales), whole(seed + 1, d_r) / 2)
    return Case((row, d_c, d_r), **about)


UNPACK_ROW = Exercise(
    name="ps05.unpack_row",
    oracle=unpack_row,
    judge=judge_row,
    show=lambda row: f"{list(row.shape)} [" + ", ".join(f"{x:g}" for x in row[:6].tolist()) + ", ...]",
    hint="split the row into its three fields, then view each as its dtype; a scale serves 128 numbers",
    cases=LazyCases(
        lambda: (
            row_case(
                0, 512, 64, [1.0, 1.0, 1.0, 1.0], hint="all scales are 1: only the fields and their dtypes matter"
            ),
            row_case(2, 512, 64, [0.5, 0.5, 0.5, 0.5], hint="all scales are the same"),
            row_case(4, 512, 64, [0.5, 2.0, 0.25, 3.0], hint="each 128 numbers have a scale of their own"),
            row_case(6, 128, 16, [0.5], hidden=True, hint="another model: d_c = 128, so there is one scale"),
            row_case(8, 256, 32, [0.5, 8.0], hidden=True, hint="another model: d_c = 256, d_r = 32"),
            row_case(10, 256, 64, [1e-6, 1e6], hidden=True, hint="scales of very different size are float32 numbers"),
        )
    ),
)


def absorbed_weights(q_nope: "Tensor", q_rope: "Tensor", w_uk: "Tensor", c: "Tensor", k_rope: "Tensor") -> "Tensor":
    """How much each head's query looks at each token: [H, s_k], rows sum to 1.

    q_nope [H, d_nope], q_rope [H, d_r], w_uk [H, d_nope, d_c], c [s_k, d_c], k_rope [s_k, d_r].
    """
    import torch

    scale = (q_nope.shape[1] + q_rope.shape[1]) ** -0.5
    scores = absorb_query(q_nope, w_uk) @ c.T + q_rope @ k_rope.T
    return torch.softmax(scale * scores, dim=-1)


def judge_weights(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare head by head, and recognise weights that only have another temperature."""
    why = judge_tensor(expected, got, "[H, s_k]")
    if why:
        return why
    index = first_difference(expected, got)
    if index is None:
        return None
    head = index[0]
    why = f"head {head} should look {numbers(expected[head])}, got {numbers(got[head])}"
    if got.isnan().any():
        return f"{why}: a score is too large for exp"
    want, have = (w[head].clamp(min=1e-30).log() for w in (expected, got))
    want, have = want - want.mean(), have - have.mean()
    ratio = (have @ want / (want @ want)).item()
    if first_difference(ratio * want, have) is None and ratio > 0:
        d = inputs["q_nope"].shape[1] + inputs["q_rope"].shape[1]
        return (
            f"{why}: all scores are {ratio:.3f} times what they should be, "
            f"as if the scale were 1 / sqrt({d / ratio**2:.4g})"
        )
    return why


def weights_case(
    seed: int, heads: int, d_nope: int, d_r: int, d_c: int, s_k: int, loud: float = 1.0, **about: Any
) -> Case:
    shapes = ((heads, d_nope), (heads, d_r), (heads, d_nope, d_c), (s_k, d_c), (s_k, d_r))
    q_nope, q_rope, w_uk, c, k_rope = (random(seed + i, *shape) for i, shape in enumerate(shapes))
    return Case((loud * q_nope, loud * q_rope, w_uk, c, k_rope), **about)


ABSORBED_WEIGHTS = Exercise(
    name="ps05.absorbed_weights",
    oracle=absorbed_weights,
    judge=judge_weights,
    show=show_rows,
    hint="the scale was fixed when the model was trained, with decompressed keys: what was their head size?",
    cases=LazyCases(
        lambda: (
            weights_case(0, 1, 2, 2, 6, 3, hint="keys of 2 + 2 numbers, a latent of 6: 1 / sqrt(4)"),
            weights_case(10, 2, 3, 1, 8, 4, hint="two heads; keys of 3 + 1 numbers"),
            weights_case(20, 2, 2, 2, 4, 1, hint="a single token gets all the weight, whatever the scale"),
            weights_case(30, 2, 4, 2, 4, 5, hidden=True, hint="the latent is as wide as the key without its position"),
            weights_case(40, 2, 6, 3, 2, 4, hidden=True, hint="a latent that is narrower than a key"),
            weights_case(50, 2, 4, 4, 8, 4, 60.0, hidden=True, hint="large scores: subtract the maximum before exp"),
            weights_case(60, 3, 2, 2, 6, 3, hidden=True, hint="as many heads as tokens"),
        )
    ),
)

EXERCISES = (ABSORB_QUERY, LATENT_ATTENTION, UNPACK_ROW, ABSORBED_WEIGHTS)
