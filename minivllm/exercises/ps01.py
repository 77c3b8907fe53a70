"""Set 1, the KV cache: what a token costs, what a decode step does, and whose keys a head reads.

How many bytes does one token take, by a model's configuration (`kv_bytes_per_token`)? What does a decode step do with
the cache (`decode_step`)? Which stored head belongs to which query head (`expand_kv`)?

    query heads    0  1  2  3  4  5  6  7        H = 8
                   |--------|  |--------|
    stored heads       0           1             Hkv = 2, groups of H / Hkv = 4 neighbours
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from minivllm.exercises.checking import Case, Exercise, plural
from minivllm.exercises.tensors import LazyCases, first_difference, judge_parts, rounded, show_parts

if TYPE_CHECKING:
    from torch import Tensor


def kv_bytes_per_token(config: dict[str, int], bytes_per_number: int) -> int:
    """What one token takes in the cache over all layers, by the fields of a Hugging Face config.json."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        head_dim = config.get("head_dim", config["hidden_size"] // heads)
        numbers = 2 * config.get("num_key_value_heads", heads) * head_dim
    return layers * numbers * bytes_per_number


def judge_bytes(expected: int, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare two counts, and recognise what was forgotten."""
    if type(got) is not int:
        return f"the answer is a {type(got).__name__} ({got!r}); bytes are counted, so it must be an int"
    if got == expected:
        return None
    config, layers = inputs["config"], inputs["config"]["num_hidden_layers"]
    heads, is_mla = config["num_attention_heads"], "kv_lora_rank" in config
    stored = config.get("num_key_value_heads", heads)
    numbers = expected // layers // inputs["bytes_per_number"]
    if got * layers == expected:
        return f"that is one layer; the model has {layers}, each with a cache of its own"
    if is_mla:
        return (
            f"MLA stores {numbers} numbers for each token and layer, kv_lora_rank + qk_rope_head_dim, "
            f"once for all heads; your answer is {got / expected:g} times as much"
        )
    head_dim, usual = numbers // 2 // stored, config["hidden_size"] // heads
    if got * head_dim == expected * usual and head_dim != usual:
        return (
            f"that is right for heads of size hidden_size / heads = {usual}, but the config says head_dim = {head_dim}"
        )
    width = inputs["bytes_per_number"]
    if got * 2 == expected:
        return f"that is half of it: both K and V are stored, and each number takes {plural(width, 'byte')}"
    if got * stored == expected * heads:
        return f"that is one K and V for each of {heads} query heads, but only {stored} are stored"
    return (
        f"a token is {numbers} numbers in each of {layers} layers: K and V, {plural(stored, 'head')} of size "
        f"{head_dim}, {plural(width, 'byte')} a number"
    )


_LLAMA_3_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
_LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
_QWEN3_06B = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 1024,
    "head_dim": 128,
}
_DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
_FALCON_7B = {"num_hidden_layers": 32, "num_attention_heads": 71, "num_key_value_heads": 1, "hidden_size": 4544}

KV_BYTES_PER_TOKEN = Exercise(
    name="ps01.kv_bytes_per_token",
    oracle=kv_bytes_per_token,
    judge=judge_bytes,
    hint="layers, times the numbers that one layer stores for a token, times the bytes of a number",
    cases=(
        Case((_LLAMA_3_8B, 2), hint="K and V of 8 stored heads of size 4096 / 32 = 128, in 32 layers"),
        Case((_FALCON_7B, 2), hint="multi-query attention: one stored head for all 71"),
        Case((_DEEPSEEK_V3, 2), hint="with a kv_lora_rank, the latent and the rotary key are all that is stored"),
        Case((_LLAMA_3_8B, 1), hint="an FP8 cache: one byte a number"),
        Case((_LLAMA_2_7B, 2), hidden=True, hint="without num_key_value_heads every query head has its own"),
        Case((_QWEN3_06B, 2), hidden=True, hint="head_dim, where it is given, need not be hidden_size / heads"),
        Case(({**_QWEN3_06B, "num_key_value_heads": 16}, 4), hidden=True),
        Case(({**_DEEPSEEK_V3, "num_hidden_layers": 1, "kv_lora_rank": 128, "qk_rope_head_dim": 32}, 4), hidden=True),
        Case(
            ({"num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 80}, 2),
            hidden=True,
        ),
    ),
)  # fmt: skip


def decode_step(
    k_cache: "Tensor", v_cache: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor"
) -> tuple["Tensor", "Tensor", "Tensor"]:
    """One decode step of one head: the output [D] of the newest token, and both caches with that token appended.

    k_cache and v_cache [S, D] hold the tokens before it; q, k and v [D] are its own.
    """
    import torch

    k_cache, v_cache = torch.cat([k_cache, k[None]]), torch.cat([v_cache, v[None]])
    weights = torch.softmax(k_cache @ q * q.shape[0] ** -0.5, dim=0)
    return weights @ v_cache, k_cache, v_cache


def judge_decode(expected: Sequence["Tensor"], got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare the caches first, then the output, and recognise the usual other outputs."""
    names = ("out", "k_cache", "v_cache")
    k, v, q = inputs["k"], inputs["v"], inputs["q"]
    num_old, size = inputs["k_cache"].shape
    if isinstance(got, tuple) and len(got) == 3 and all(hasattr(part, "shape") for part in got[1:]):
        for name, part in zip(names[1:], got[1:], strict=True):
            if tuple(part.shape) == (num_old, size):
                return f"{name} still has {plural(num_old, 'row')}: the new token has to be appended for the next step"
    complaint = judge_parts(names, expected, got)
    if complaint is not None:
        return complaint
    for name, want, have in zip(names[1:], expected[1:], got[1:], strict=True):
        index = first_difference(want, have)
        if index is not None:
            whose = "the new token's" if index[0] == num_old else f"that of token {index[0]}"
            return f"row {index[0]} of {name} should be {whose}, {rounded(want[index[0]].tolist())}"
    if first_difference(expected[0], got[0]) is None:
        return None
    past_only = _attend(q, inputs["k_cache"], inputs["v_cache"], size**-0.5)
    others = {
        "the newest token does not see itself: append first, then attend": past_only,
        "the scores are not divided by the square root of D": _attend(q, expected[1], expected[2], 1.0),
        "the scores are divided by D, not by its square root": _attend(q, expected[1], expected[2], 1 / size),
        "the query is the new token's k, not its q": _attend(k, expected[1], expected[2], size**-0.5),
        "the new token's v is returned as it is, without looking back": v,
    }  # fmt: skip
    for why, other in others.items():
        if other is not None and first_difference(other, got[0]) is None:
            return why
    return f"out should be {rounded(expected[0].tolist())} and is {rounded(got[0].tolist())}"


def _attend(q: "Tensor", k: "Tensor", v: "Tensor", scale: float) -> "Tensor | None":
    return (k @ q * scale).softmax(0) @ v if len(k) else None


def _decode_cases() -> list[Case]:
    import math

    import torch
    from torch import tensor

    ln = math.log

    def case(k_cache: Any, v_cache: Any, q: Any, k: Any, v: Any, **options: Any) -> Case:
        return Case(tuple(tensor(x, dtype=torch.float32) for x in (k_cache, v_cache, q, k, v)), **options)

    cases = [
        case(
            [[0.0, 0.0, 0.0, 0.0]], [[4.0, 0.0, 8.0, 0.0]],
            [2.0, 0.0, 0.0, 0.0], [ln(3), 0.0, 0.0, 0.0], [8.0, 4.0, 0.0, 0.0],
            hint="scores 0 and 2 ln 3 / sqrt(4) = ln 3: weights 1/4 and 3/4",
        ),
        case(
            [[1.0], [2.0], [0.0]], [[1.0], [2.0], [3.0]], [1.0], [1.0], [5.0],
            hint="four tokens see each other now: three old ones and the new one",
        ),
        case(
            [[1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [3.0, 4.0]], [1.0, -1.0], [0.5, 0.5], [0.0, 1.0],
            hint="the new k and v become the last rows, in this order of arguments: q, k, v",
        ),
        Case(
            (torch.zeros(0, 2), torch.zeros(0, 2), tensor([1.0, 2.0]), tensor([3.0, 4.0]), tensor([5.0, 6.0])),
            hidden=True,
            hint="the first token of all: it sees itself, and its output is its own v",
        ),
        case(
            [[60.0, 0.0]], [[1.0, 0.0]], [3.0, 1.0], [62.0, 0.0], [0.0, 1.0], hidden=True,
            hint="scores above 88 overflow exp in float32: torch.softmax subtracts the maximum",
        ),
        case([[1.0]], [[2.0]], [0.0], [5.0], [4.0], hidden=True, hint="a query of zeros weighs all tokens alike"),
    ]  # fmt: skip
    g = torch.Generator().manual_seed(1)
    for tokens, size in product((1, 2, 7), (1, 3, 8)):
        k_cache, v_cache = torch.randn(2, tokens, size, generator=g)
        cases.append(Case((k_cache, v_cache, *torch.randn(3, size, generator=g)), hidden=True))
    return cases


DECODE_STEP = Exercise(
    name="ps01.decode_step",
    oracle=decode_step,
    judge=judge_decode,
    hint="append k and v, then softmax(k_cache q / sqrt(D)) v_cache; no mask: everything stored is in the past",
    cases=LazyCases(_decode_cases),
    show=show_parts(("out", "k_cache", "v_cache")),
)


def expand_kv(k: "Tensor", num_heads: int) -> "Tensor":
    """Stored heads [S, Hkv, D] -> for each query head the one that it reads, [S, num_heads, D]."""
    group = num_heads // k.shape[1]
    return k[:, [head // group for head in range(num_heads)]]


def judge_heads(expected: "Tensor", got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Compare head by head; the inputs' numbers say which stored head a wrong one is."""
    complaint = judge_parts(("k",), (expected,), (got,))
    if complaint is not None:
        return complaint
    k, num_heads = inputs["k"], inputs["num_heads"]
    group = num_heads // k.shape[1]
    for head in range(num_heads):
        if first_difference(expected[:, head], got[:, head]) is None:
            continue
        read = next((h for h in range(k.shape[1]) if first_difference(k[:, h], got[:, head]) is None), None)
        what = "something else" if read is None else f"stored head {read}"
        neighbours = f"{head // group * group} .. {head // group * group + group - 1}"
        return (
            f"query head {head} reads {what}; it belongs to the group {neighbours}, "
            f"whose keys are stored head {head // group}"
        )
    return None


def _show_heads(tensor: "Tensor") -> str:
    return f"{list(tensor.shape)}, token 0: {rounded(tensor[0].tolist())}"


def _head_cases() -> list[Case]:
    import torch

    def stored(tokens: int, heads: int, size: int = 1) -> torch.Tensor:
        """Numbers that tell where they come from: 100 token + 10 head + column."""
        t, h, d = (torch.arange(n, dtype=torch.float32) for n in (tokens, heads, size))
        return 100 * t[:, None, None] + 10 * h[None, :, None] + d

    return [
        Case((stored(2, 3), 3), hint="MHA: as many stored heads as query heads, each reads its own"),
        Case((stored(2, 1), 4), hint="MQA: one stored head for all"),
        Case((stored(1, 2), 4), hint="GQA: query heads 0 and 1 read stored head 0, query heads 2 and 3 read 1"),
        Case((stored(3, 2, 2), 8), hidden=True, hint="groups of 8 / 2 = 4"),
        Case((stored(1, 3, 2), 9), hidden=True, hint="groups of 9 / 3 = 3, as in SmolLM2"),
        Case((stored(0, 2), 4), hidden=True, hint="no tokens: a tensor of shape [0, 4, D]"),
        *(
            Case((stored(tokens, heads, 2), heads * group), hidden=True)
            for tokens, heads, group in product((1, 2), (1, 2, 4), (1, 2, 3))
        ),
    ]


EXPAND_KV = Exercise(
    name="ps01.expand_kv",
    oracle=expand_kv,
    judge=judge_heads,
    hint="neighbours share: query head h reads stored head h // (num_heads // Hkv)",
    cases=LazyCases(_head_cases),
    show=_show_heads,
)

EXERCISES = (KV_BYTES_PER_TOKEN, DECODE_STEP, EXPAND_KV)
