"""Bytes of weights by kind, counted by hand."""

import pytest
from tiny_chat_model import save_tiny_chat_model
from tiny_deepseek import save_deepseek

from minivllm.bench.weights import ABSORBED, ENDS, EXPERTS, LINEAR, REST, weight_bytes
from minivllm.models.registry import load_model

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 258, 2
QKV = (HIDDEN + 2 * 32) * HIDDEN
PER_LAYER = QKV + HIDDEN * HIDDEN + 3 * HIDDEN * INNER
ROWS = (HIDDEN + 2 * 32) + HIDDEN + 2 * INNER + HIDDEN
"""Outputs of the linear layers of one layer: so many scales."""


@pytest.mark.parametrize(
    ("dtype", "quantization", "linear"),
    [
        ("float32", None, 4 * PER_LAYER),
        ("bfloat16", None, 2 * PER_LAYER),
        ("bfloat16", "int8", PER_LAYER + 4 * ROWS),
        ("bfloat16", "fp8", PER_LAYER + 4 * ROWS),
        ("bfloat16", "fp8_block", 2 * PER_LAYER),
    ],
)
def test_a_llama_by_hand(tmp_path, dtype, quantization, linear):
    model, _ = load_model(save_tiny_chat_model(tmp_path), dtype=dtype, quantization=quantization)
    size = 4 if dtype == "float32" else 2
    norms = (2 * LAYERS + 1) * HIDDEN * size
    assert weight_bytes(model) == {LINEAR: LAYERS * linear, ENDS: 2 * VOCAB * HIDDEN * size, REST: norms}


def test_experts_shrink_in_blocks_only_and_absorption_keeps_a_plain_copy(tmp_path):
    wide = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    save_deepseek(tmp_path, **wide, q_lora_rank=128, kv_lora_rank=128)
    plain, fp8, block = (
        weight_bytes(load_model(tmp_path, dtype="bfloat16", quantization=q)[0]) for q in (None, "fp8", "fp8_block")
    )
    assert fp8[EXPERTS] == plain[EXPERTS]
    assert block[EXPERTS] == pytest.approx(plain[EXPERTS] / 2, rel=0.001)
    assert 0.5 < fp8[LINEAR] / plain[LINEAR] < 0.54 and 0.5 < block[LINEAR] / plain[LINEAR] < 0.51
    assert fp8[ENDS] == block[ENDS] == plain[ENDS] and fp8[REST] == plain[REST]
    layers, heads, d_nope, d_v, d_c = 3, 4, 32, 32, 128
    assert ABSORBED not in plain
    assert fp8[ABSORBED] == block[ABSORBED] == layers * heads * (d_nope + d_v) * d_c * 2
