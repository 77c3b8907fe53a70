"""Models in 8 bits divided between ranks: bytes and scales of the parts, and how far their logits move."""

import json

import pytest
import torch
from cached_forward import logits_in_steps
from rank_models import ids_below, load_ranks, logits_of
from safetensors.torch import load_file, save_file
from tiny_deepseek import save_deepseek

from minivllm.gemm.quantize import FP8, quantize_128x128
from minivllm.layers.linear import Linear
from minivllm.models.registry import load_model
from minivllm.worker.tensor_parallel import run_ranks

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}


def as_fp8(path):
    """Turns the checkpoint's projections into DeepSeek-V3's fp8."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and "_proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_128x128(tensor.float())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (path / "config.json").write_text(json.dumps(config))


def error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block", "int8"])
def test_a_quantized_model_in_parts_is_no_further_from_the_plain_one(tmp_path, quantization):
    """Not equal to the whole one: each rank rounds its own inputs, and noise sends some tokens to other experts."""
    save_deepseek(tmp_path, std=0.08, **WIDE)
    ids = ids_below(160)
    plain, whole = (
        logits_in_steps(load_model(tmp_path, dtype="float32", quantization=name)[0], ids)
        for name in (None, quantization)
    )
    models, groups = load_ranks(tmp_path, 2, quantization=quantization)
    results = run_ranks(logits_of, groups, models, [ids] * 2)
    assert torch.equal(*results) and 0 < error(results[0], plain) < 1.25 * error(whole, plain)


def test_blocks_of_128_are_those_of_the_whole_weight(tmp_path):
    """In fp8_block a rank's bytes and scales are columns of the whole layer's, and inputs too are rounded alike."""
    save_deepseek(tmp_path, std=0.08, first_k_dense_replace=3, **WIDE)
    as_fp8(tmp_path)
    whole, _ = load_model(tmp_path, dtype="float32")
    models, groups = load_ranks(tmp_path, 2)
    layers = [model.layers[1].mlp.down_proj.scaled for model in (whole, *models)]
    assert layers[0].weight.dtype == FP8 and layers[0].weight.shape == (128, 512)
    assert torch.equal(torch.cat([layer.weight.float() for layer in layers[1:]], 1), layers[0].weight.float())
    assert torch.equal(torch.cat([layer.scale for layer in layers[1:]], 1), layers[0].scale)
    x = torch.randn(5, 512)
    projections = [model.layers[1].mlp.down_proj for model in models]
    parts = run_ranks(lambda _, layer, part: layer(part), groups, projections, x.chunk(2, 1))
    assert error(parts[0], whole.layers[1].mlp.down_proj(x)) < 1e-6


def test_a_part_of_an_fp8_tensor_that_begins_inside_of_a_block_is_read_with_its_scales(tmp_path):
    """Heads of 48 numbers: rank 1's rows begin at 96, within the first 128."""
    save_deepseek(tmp_path, qk_nope_head_dim=32, v_head_dim=16, q_lora_rank=None)
    as_fp8(tmp_path)
    whole, _ = load_model(tmp_path, dtype="float32", gemm_backend="reference")
    models, _ = load_ranks(tmp_path, 2, gemm_backend="reference")
    parts = [model.layers[0].self_attn.qkv_a_proj.weight[:96] for model in models]
    assert torch.equal(torch.cat(parts), whole.layers[0].self_attn.qkv_a_proj.weight[:192])
    linear = [module for module in whole.modules() if isinstance(module, Linear)]
    assert any(module.scaled is None for module in linear)


def test_fp8_blocks_that_ranks_would_cut_are_refused_by_name(tmp_path):
    save_deepseek(tmp_path, std=0.08, **WIDE)
    with pytest.raises(ValueError, match=r"leaves 64 of the 256 inputs of layers\.0\.self_attn\.o_proj to a rank"):
        load_ranks(tmp_path, 4, quantization="fp8_block")
