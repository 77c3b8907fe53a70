"""Settings that cannot work are refused where they are given, by name, with what would work."""

import pytest

from minivllm.config import ConfigError, EngineConfig


def test_every_setting_has_a_default_that_works():
    config = EngineConfig("some-model")
    assert config.resolved_block_size() == 16
    assert config.max_num_seqs == 256 and config.max_num_batched_tokens == 8192


def test_block_size_is_kept_when_given():
    assert EngineConfig("m", block_size=64).resolved_block_size() == 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ""}, "model must be .*not empty"),
        ({"model": None}, "model must be a model's name or the path of its directory"),
        ({"load_format": "gguf"}, "load_format must be one of auto, dummy, not 'gguf'"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, float16, bfloat16, not 'int8'"),
        ({"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
        ({"device": None}, "device must be auto, cpu, cuda or cuda:N, not None"),
        ({"scheduling_policy": "random"}, "scheduling_policy must be one of fcfs, priority"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of auto, fp8"),
        ({"pp_token_feedback": "pigeon"}, "pp_token_feedback must be one of scheduler, broadcast"),
        ({"attention_backend": "magic"}, "attention_backend must be one of .*torch.*, not 'magic'"),
        ({"block_size": 0}, "block_size must be a positive whole number, not 0"),
        ({"block_size": 16.0}, "block_size must be a positive whole number, not 16.0"),
        ({"block_size": True}, "block_size must be a positive whole number, not True"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be a positive whole number, not 0"),
        ({"max_model_len": -1}, "max_model_len must be a positive whole number, not -1"),
        ({"max_model_len": 1}, "max_model_len must be at least 2: one token of prompt and one of output"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive whole number, not 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be a positive whole number, not 0"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be a positive whole number"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a positive whole number"),
        ({"pp_token_feedback": "broadcast"}, "needs several stages, and pipeline_parallel_size is 1"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend must be one of auto, mp, torchrun"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "in_process"},
            "not tensor-parallel ranks: use 'mp' or 'torchrun' with tensor_parallel_size=2",
        ),
        ({"pipeline_parallel_size": 2, "device": "cuda:1"}, "device='cuda:1' names one GPU, but each of the 2 ranks"),
        ({"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization must be in \(0, 1\], not 0.0"),
        ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization must be in \(0, 1\], not 1.1"),
        ({"gpu_memory_utilization": float("nan")}, r"gpu_memory_utilization must be in \(0, 1\], not nan"),
        ({"long_prefill_token_threshold": -1}, r"long_prefill_token_threshold must be 0 \(no limit\) or positive"),
        ({"long_prefill_token_threshold": 1.5}, "long_prefill_token_threshold must be .* not 1.5"),
        ({"seed": "tomorrow"}, "seed must be a 64-bit whole number, not 'tomorrow'"),
        ({"seed": 2**63}, "seed must be a 64-bit whole number"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"model": "m", **settings})


def test_a_budget_smaller_than_max_num_seqs_is_refused_with_both_ways_out():
    message = r"max_num_batched_tokens \(7\) .* raise it to 8,? or lower max_num_seqs to 7"
    with pytest.raises(ConfigError, match=message):
        EngineConfig("m", max_num_seqs=8, max_num_batched_tokens=7)
    assert EngineConfig("m", max_num_seqs=8, max_num_batched_tokens=8).max_num_batched_tokens == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("async_scheduling", True),
        ("attention_backend", "hopper"),
    ],
)
def test_an_option_that_is_not_built_yet_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}=.* is not built yet: "):
        EngineConfig("m", **{name: value})


def test_a_chunk_limit_without_chunked_prefill_is_refused():
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold .*enable_chunked_prefill"):
        EngineConfig("m", enable_chunked_prefill=False, long_prefill_token_threshold=4)


def test_max_model_len_is_the_models_own_unless_a_shorter_one_is_asked_for():
    assert EngineConfig("m").resolve_max_model_len(2048) == 2048
    assert EngineConfig("m", max_model_len=2048).resolve_max_model_len(2048) == 2048
    assert EngineConfig("m", max_model_len=100).resolve_max_model_len(2048) == 100
    with pytest.raises(ConfigError, match=r"max_model_len \(4096\) is longer .* \(2048\): lower it to at most 2048"):
        EngineConfig("m", max_model_len=4096).resolve_max_model_len(2048)


def test_a_config_error_is_a_value_error():
    with pytest.raises(ValueError):
        EngineConfig("m", block_size=0)


def test_blocks_of_latents_are_larger_unless_told_otherwise():
    assert EngineConfig("m").resolved_block_size(is_mla=True) == 64
    assert EngineConfig("m", block_size=32).resolved_block_size(is_mla=True) == 32
