"""What a token costs in a cache of latents, counted by the engine itself."""

import pytest
import torch
from tiny_deepseek import TinyDeepseek

from minivllm.bench.kv_calculator import AttentionShape, row_bytes
from minivllm.config import EngineConfig
from minivllm.worker.kv_memory import KVCacheSpec, LatentCacheSpec
from minivllm.worker.model_runner import ModelRunner

# DeepSeek-V3's attention; all else is as small as can be, since weights do not count here.
V3_ATTENTION = {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_size": 128,
    "q_lora_rank": 16,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def v3_shape(tmp_path_factory):
    return TinyDeepseek.save(tmp_path_factory.mktemp("v3-shape"), **V3_ATTENTION)


def runner(model, **settings) -> ModelRunner:
    config = EngineConfig(
        str(model.path), load_format="dummy", device="cpu", dtype="bfloat16", num_gpu_blocks_override=4, **settings
    )
    return ModelRunner(config, str(model.path))


def test_v3_keeps_576_numbers_a_token_and_layer_where_its_heads_would_keep_32768(v3_shape):
    worker = runner(v3_shape)
    per_layer = worker.kv_cache_spec.bytes_per_token / 2
    assert per_layer == 576 * 2 == 1152
    mha = KVCacheSpec(num_layers=2, block_size=16, num_kv_heads=128, head_dim=128, bytes_per_element=2)
    assert mha.bytes_per_token / 2 == 2 * 128 * 128 * 2 == 65536
    assert mha.bytes_per_token / worker.kv_cache_spec.bytes_per_token == pytest.approx(56.9, abs=0.1)


def test_what_is_allocated_is_what_is_counted(v3_shape):
    worker = runner(v3_shape)
    assert {tuple(cache.shape) for cache in worker.kv_caches.values()} == {(4, 64, 1, 576)}
    allocated = sum(cache.nbytes for cache in worker.kv_caches.values())
    assert allocated == 4 * worker.kv_cache_spec.bytes_per_block == 4 * 64 * 2 * 1152


def test_an_fp8_cache_takes_656_bytes_a_token_and_layer(v3_shape):
    worker = runner(v3_shape, attention_backend="triton", kv_cache_dtype="fp8")
    assert worker.kv_cache_spec.bytes_per_token / 2 == 656


@pytest.mark.parametrize(("kv_cache_dtype", "column"), [("auto", "bfloat16"), ("fp8", "fp8")])
def test_the_calculator_counts_the_same(v3_shape, kv_cache_dtype, column):
    worker = runner(v3_shape, attention_backend="triton", kv_cache_dtype=kv_cache_dtype)
    shape = AttentionShape.from_config(worker.hf_config.to_dict())
    assert worker.kv_cache_spec.bytes_per_token == 2 * row_bytes(shape, column)


def test_blocks_of_latents_hold_64_tokens_unless_told_otherwise(v3_shape):
    assert runner(v3_shape).block_size == 64
    assert runner(v3_shape, block_size=256).block_size == 256


def test_a_spec_is_a_shape_and_its_bytes():
    spec = LatentCacheSpec(num_layers=3, block_size=64, row_size=576, bytes_per_element=2)
    assert spec.layer_shape(5) == (5, 64, 1, 576)
    assert spec.bytes_per_block == 64 * 3 * 1152
    assert torch.Size(spec.layer_shape(5)).numel() * 2 * 3 == 5 * spec.bytes_per_block
