"""Fused linear layers and their packed CPU form."""

import pytest
import torch
import torch.nn.functional as F

from minivllm.layers.embedding import LMHead, VocabEmbedding
from minivllm.layers.linear import Linear, MergedLinear, QKVLinear, pack_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_packing = pytest.mark.skipif(
    pack_weight(torch.zeros(16, 16)) is None, reason="this build of PyTorch has no oneDNN to pack weights with"
)


def filled(layer: Linear, dtype: torch.dtype = torch.float32) -> Linear:
    torch.manual_seed(0)
    layer = layer.to(dtype)
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


def assert_close_to_float64(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """At most twice the error that F.linear makes in the same dtype, and a little for luck."""
    exact = F.linear(x.double(), weight.double(), bias.double())
    plain = (F.linear(x, weight, bias) - exact).norm() / exact.norm()
    assert (got - exact).norm() / exact.norm() <= 2 * plain + 1e-7


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 33, 513])
@pytest.mark.parametrize("dtype", DTYPES)
def test_finalize_does_not_change_the_result(dtype, rows):
    layer = filled(Linear(192, 80, bias=True), dtype)
    weight, bias = layer.weight.clone(), layer.bias.clone()
    x = torch.randn(rows, 192).to(dtype)
    layer.finalize()
    got = layer(x)
    assert got.shape == (rows, 80) and got.dtype == dtype
    if rows:
        assert_close_to_float64(got, x, weight, bias)


@needs_packing
def test_finalize_lets_go_of_the_plain_weight_once_it_is_packed():
    layer = filled(Linear(64, 32))
    layer.finalize()
    assert layer.weight is None and not list(layer.parameters())


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_without_the_packing_kernel_the_plain_weight_is_used(monkeypatch, error):
    class Missing:
        def __getattr__(self, name):
            raise error(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Missing())
    layer, x = filled(Linear(64, 32, bias=True)), torch.randn(3, 64)
    layer.finalize()
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_without_onednn_the_plain_weight_is_used(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack_weight(torch.zeros(16, 16)) is None


@needs_packing
@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="oneDNN promises nothing; seen on AVX-512"
)
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (2048, 2048)])
def test_a_float32_row_is_the_same_alone_and_in_a_batch(shape):
    layer = filled(Linear(shape[1], shape[0]), torch.float32)
    layer.finalize()
    x = torch.randn(64, shape[1])
    whole = layer(x)
    assert all(torch.equal(layer(x[:rows]), whole[:rows]) for rows in (1, 2, 3, 7, 16, 33))


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 33])
def test_a_bfloat16_row_differs_in_its_last_bits_at_most(rows):
    """With AMX the sum is formed in an order that depends on the number of rows; without, nothing differs."""
    layer = filled(Linear(576, 960), torch.bfloat16)
    layer.finalize()
    x = torch.randn(64, 576).bfloat16()
    torch.testing.assert_close(layer(x[:rows]), layer(x)[:rows], rtol=2**-7, atol=2**-7)


def test_merged_slots_are_the_rows_of_one_weight():
    layer = MergedLinear(8, {"gate_proj": 3, "up_proj": 5}, bias=True)
    slots = dict(layer.slots("mlp"))
    assert [(name, tuple(slot.shape)) for name, slot in slots.items()] == [
        ("mlp.gate_proj.weight", (3, 8)),
        ("mlp.up_proj.weight", (5, 8)),
        ("mlp.gate_proj.bias", (3,)),
        ("mlp.up_proj.bias", (5,)),
    ]
    slots["mlp.up_proj.weight"].fill_(7.0)
    assert (layer.weight[3:] == 7.0).all()


def test_merged_output_is_the_outputs_of_the_parts_side_by_side():
    layer, x = filled(MergedLinear(16, {"gate_proj": 4, "up_proj": 4}, bias=True)), torch.randn(3, 16)
    parts = dict(layer.slots("mlp"))
    expected = [F.linear(x, parts[f"mlp.{p}.weight"], parts[f"mlp.{p}.bias"]) for p in layer.parts]
    layer.finalize()
    torch.testing.assert_close(layer(x), torch.cat(expected, dim=-1), rtol=1e-5, atol=1e-5)


def test_qkv_gives_query_key_and_value_heads_side_by_side():
    layer, x = filled(QKVLinear(32, num_heads=4, num_kv_heads=2, head_dim=8, bias=False)), torch.randn(5, 32)
    parts = dict(layer.slots("attn"))
    assert [tuple(slot.shape) for slot in parts.values()] == [(32, 32), (16, 32), (16, 32)]
    heads = layer(x)
    assert heads.shape == (5, 8, 8)
    key, value = (F.linear(x, parts[f"attn.{name}.weight"]).view(5, 2, 8) for name in ("k_proj", "v_proj"))
    torch.testing.assert_close(heads[:, 4:6], key, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(heads[:, 6:], value, rtol=1e-5, atol=1e-5)


def test_parameters_never_require_grad():
    layers = [QKVLinear(8, 2, 1, 4, True), VocabEmbedding(10, 8), LMHead(10, 8)]
    assert not any(parameter.requires_grad for layer in layers for parameter in layer.parameters())


def test_a_tied_head_shares_the_embedding_and_wants_no_tensor_of_its_own():
    embedding, head = filled(VocabEmbedding(20, 8)), LMHead(20, 8)
    assert [name for name, _ in head.slots("lm_head")] == ["lm_head.weight"]
    head.tie(embedding)
    assert head.weight is embedding.weight and not list(head.slots("lm_head"))


def test_a_packed_tied_head_leaves_the_embedding_usable():
    embedding, head = filled(VocabEmbedding(20, 8)), LMHead(20, 8)
    head.tie(embedding)
    table = embedding.weight.clone()
    head.finalize()
    ids = torch.tensor([3, 19, 0])
    assert torch.equal(embedding(ids), table[ids])
    torch.testing.assert_close(head(table[ids]), table[ids] @ table.T, rtol=1e-5, atol=1e-5)
