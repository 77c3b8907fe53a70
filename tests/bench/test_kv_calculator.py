"""The calculator gives the numbers that are published or can be worked by hand."""

import pytest

from minivllm.attention.store import latent_row_bytes
from minivllm.bench.kv_calculator import (
    FP8,
    H200,
    AttentionShape,
    Device,
    bytes_per_token,
    context_bytes,
    flash_prefill,
    mla_decode,
    paged_decode,
    row_bytes,
    storage_variants,
    tokens_that_fit,
)

LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096}
LLAMA_31_8B = LLAMA_2_7B | {"num_key_value_heads": 8}
GEMMA_2B = {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("config", "kind", "per_token"),
    [
        (LLAMA_2_7B, "MHA", 512 * 1024),
        (LLAMA_31_8B, "GQA", 128 * 1024),
        (GEMMA_2B, "MQA", 18 * 1024),
        (DEEPSEEK_V3, "MLA", 61 * 1152),
    ],
)
def test_a_config_becomes_a_kind_and_bytes_a_token(config, kind, per_token):
    shape = AttentionShape.from_config(config)
    assert shape.kind == kind
    assert bytes_per_token(shape) == per_token


def test_heads_that_are_not_named_are_all_stored():
    config = {key: value for key, value in LLAMA_2_7B.items() if key != "num_key_value_heads"}
    assert AttentionShape.from_config(config) == AttentionShape.from_config(LLAMA_2_7B)
    assert AttentionShape.from_config(config | {"num_key_value_heads": None}).kind == "MHA"


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (LLAMA_2_7B, "num_hidden_layers"),
        (LLAMA_2_7B, "num_attention_heads"),
        (LLAMA_2_7B, "hidden_size"),
        (DEEPSEEK_V3, "qk_rope_head_dim"),
        (DEEPSEEK_V3, "qk_nope_head_dim"),
        (DEEPSEEK_V3, "v_head_dim"),
    ],
)
def test_a_config_that_lacks_something_is_told_what(config, missing):
    with pytest.raises(ValueError, match=f"no {missing}"):
        AttentionShape.from_config({key: value for key, value in config.items() if key != missing})


def test_an_fp8_cache_is_laid_out_as_the_kernels_store_it():
    latent = AttentionShape.from_config(DEEPSEEK_V3)
    assert row_bytes(latent, FP8) == latent_row_bytes(512, 64) == 656
    assert row_bytes(AttentionShape.from_config(LLAMA_31_8B), FP8) == 2 * 8 * 128


def test_an_unknown_cache_is_refused():
    with pytest.raises(ValueError, match="bfloat16, fp8"):
        row_bytes(AttentionShape.from_config(LLAMA_2_7B), "int4")


def test_contexts_are_counted_in_whole_blocks():
    shape = AttentionShape.from_config(LLAMA_31_8B)
    assert context_bytes(shape, 17) == 32 * 128 * 1024
    assert context_bytes(shape, 16) == context_bytes(shape, 1) == 16 * 128 * 1024
    assert context_bytes(shape, 0) == 0
    assert tokens_that_fit(shape, 32 * 128 * 1024 - 1) == 16
    assert context_bytes(shape, tokens_that_fit(shape, 10**9)) <= 10**9


def test_a_latent_costs_less_than_two_stored_heads():
    variants = storage_variants(AttentionShape.from_config(DEEPSEEK_V3))
    assert list(variants) == ["MHA", "GQA-8", "MQA", "MLA", "MLA-FP8"]
    assert variants == {"MHA": 4_997_120, "GQA-8": 312_320, "MQA": 39_040, "MLA": 70_272, "MLA-FP8": 40_016}
    with pytest.raises(ValueError, match="not of GQA"):
        storage_variants(AttentionShape.from_config(LLAMA_31_8B))


def test_a_decode_has_one_flop_a_byte_for_each_query_that_shares_a_key():
    for config, group in ((LLAMA_2_7B, 1), (LLAMA_31_8B, 4), (GEMMA_2B, 8)):
        shape = AttentionShape.from_config(config)
        assert paged_decode(shape, 8192).intensity == group
        assert paged_decode(shape, 8192, queries=3).intensity == 3 * group
        assert paged_decode(shape, 8192, cache=FP8).intensity == 2 * group


def test_the_work_of_a_latent_decode():
    shape = AttentionShape.from_config(DEEPSEEK_V3)
    work = mla_decode(shape, 1000)
    assert (work.flops, work.num_bytes) == (1000 * 278_528, 1000 * 1152)
    assert mla_decode(shape, 1000, heads=16).num_bytes == work.num_bytes, "every GPU reads the whole row"
    assert mla_decode(shape, 1000, heads=16).flops * 8 == work.flops
    assert mla_decode(shape, 1000, queries=2).intensity == 2 * work.intensity


def test_the_intensity_of_a_prompt_grows_with_its_length():
    shape = AttentionShape.from_config(LLAMA_31_8B)
    assert flash_prefill(shape, 4096).flops == 32 * 4096**2 * 256
    assert flash_prefill(shape, 4096).num_bytes == 4096 * 2 * (32 + 8 + 8 + 32) * 128
    assert flash_prefill(shape, 8192).intensity == 2 * flash_prefill(shape, 4096).intensity


def test_the_roof_is_flat_behind_the_balance():
    device = Device("toy", 100.0, 10.0)
    assert device.balance == 10
    assert [device.attainable(x) for x in (1, 10, 1000)] == [10, 100, 100]
    assert 200 < H200.balance < 210
