"""Models in 8 bits: which layers are, how far logits move, and checkpoints that come in fp8."""

import json

import pytest
import torch
from cached_forward import logits_in_steps
from safetensors.torch import load_file, save_file
from tiny_deepseek import random_prompt, save_deepseek

from minivllm.checkpoints.errors import CheckpointError
from minivllm.config import GEMM_BACKENDS, QUANTIZATIONS, ConfigError, EngineConfig
from minivllm.gemm import dispatch
from minivllm.gemm.quantize import (
    FP8,
    dequantize,
    quantize_1x128,
    quantize_128x128,
    quantize_per_channel,
    quantize_per_token,
)
from minivllm.layers.linear import Linear
from minivllm.layers.quantization import FORMATS
from minivllm.models.registry import load_model
from minivllm.moe.layer import RoutedExperts

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
}
IDS = torch.tensor(random_prompt(40, seed=3))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide")
    save_deepseek(path, std=0.08, **WIDE)
    return path


def logits(path, **settings):
    model, _ = load_model(path, dtype="float32", **settings)
    return logits_in_steps(model, IDS), model


def error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


def test_choices_are_the_same_everywhere():
    assert (None, *FORMATS) == QUANTIZATIONS
    assert ("auto", *dispatch.BACKENDS) == GEMM_BACKENDS
    for name in ("quantization", "gemm_backend"):
        with pytest.raises(ConfigError, match=f"{name} must be one of"):
            EngineConfig("m", **{name: "int4"})


@pytest.mark.parametrize(("quantization", "most"), [("fp8", 0.45), ("fp8_block", 0.45), ("int8", 0.1)])
def test_quantised_models_stay_close_to_the_plain_one(wide, quantization, most):
    """Bounds are wide: in a random model a little noise sends some tokens to other experts. int8 has most bits."""
    plain, _ = logits(wide)
    got, model = logits(wide, quantization=quantization)
    assert 1e-4 < error(got, plain) < most
    linear = [m for m in model.modules() if isinstance(m, Linear) and m is not model.lm_head]
    assert linear and all(layer.scaled is not None and layer.weight is None for layer in linear)
    assert model.lm_head.scaled is None
    experts = [m for m in model.modules() if isinstance(m, RoutedExperts)]
    assert all((layer.gate_up.dtype == FP8) == (quantization == "fp8_block") for layer in experts)
    assert len(model.not_quantized) == (0 if quantization == "fp8_block" else len(experts))


@pytest.mark.parametrize(
    ("quantization", "activations", "weights", "most"),
    [
        ("fp8", quantize_per_token, quantize_per_channel, 0.05),
        ("fp8_block", quantize_1x128, quantize_128x128, 0.05),
        ("int8", quantize_per_token, quantize_per_channel, 0.015),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_quantised_layer_is_the_product_of_what_was_rounded(quantization, activations, weights, most, bias):
    generator = torch.Generator().manual_seed(0)
    layer, x = Linear(256, 130, bias), torch.randn(7, 256, generator=generator)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    plain, dtype = layer(x), torch.int8 if quantization == "int8" else FP8
    rounded = dequantize(*activations(x, dtype)) @ dequantize(*weights(layer.weight, dtype)).T
    offset = layer.bias if bias else 0
    layer.plan(quantization, "auto")
    layer.finalize()
    torch.testing.assert_close(layer(x), rounded + offset, rtol=1e-5, atol=1e-4)
    assert error(layer(x), plain) < most
    compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_layers_that_blocks_do_not_fit_stay_as_they_are_and_are_listed(tmp_path, caplog):
    save_deepseek(tmp_path, **{**WIDE, "hidden_size": 64, "num_hidden_layers": 2})
    got, model = logits(tmp_path, quantization="fp8_block")
    kept = " ".join(model.not_quantized)
    assert "layers.0.self_attn.qkv_a_proj (64 inputs)" in kept and "layers.1.mlp.experts (64 and 128 inputs)" in kept
    assert "layers.0.mlp.down_proj" not in kept and "layers.0.mlp.gate_up_proj (64 inputs)" in caplog.text
    assert error(got, logits(tmp_path)[0]) < 0.45


def test_an_unknown_scheme_is_refused(wide):
    with pytest.raises(ValueError, match="quantization should be one of fp8, fp8_block, int8 or None, not 'int4'"):
        load_model(wide, quantization="int4")


def test_a_preferred_backend_serves_the_layers(wide, monkeypatch):
    plain, _ = logits(wide)
    called = []
    function = dispatch._function

    def spy(name):
        called.append(name)
        return function(name)

    monkeypatch.setattr(dispatch, "_function", spy)
    got, _ = logits(wide, gemm_backend="reference")
    assert set(called) == {"reference"} and error(got, plain) < 1e-4
    called.clear()
    monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "reference")
    logits(wide)
    assert set(called) == {"reference"}


def as_fp8(path, names=lambda name: name.endswith("_proj.weight"), **settings):
    """Rewrites a checkpoint as DeepSeek-V3 stores it; returns what its tensors stand for."""
    tensors, exact = load_file(path / "model.safetensors"), {}
    for name in [name for name in tensors if names(name)]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_128x128(tensors[name])
        exact[name] = dequantize(tensors[name], tensors[f"{name}_scale_inv"])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    plain = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    config["quantization_config"] = plain | settings
    (path / "config.json").write_text(json.dumps(config))
    return tensors, exact


def test_a_checkpoint_in_fp8_is_served_in_block_fp8(tmp_path):
    save_deepseek(tmp_path, std=0.08, **WIDE)
    plain, _ = logits(tmp_path)
    stored, exact = as_fp8(tmp_path)
    got, model = logits(tmp_path)
    assert error(got, plain) < 0.45 and not model.not_quantized
    name = "model.layers.0.mlp.down_proj.weight"
    scaled = model.layers[0].mlp.down_proj.scaled
    assert torch.equal(scaled.weight.view(torch.uint8), stored[name].view(torch.uint8))
    torch.testing.assert_close(dequantize(scaled.weight, scaled.scale), exact[name])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scale_inv"), "is in fp8, and has no .*_scale_inv of shape"),
        (lambda t, name: t.update({f"{name}_scale_inv": torch.ones(3, 1)}), r"_scale_inv is \(3, 1\), should be"),
        (lambda t, name: t.update({"stray_scale_inv": torch.ones(1, 1)}), "unexpected: stray_scale_inv"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path, break_it, message):
    save_deepseek(tmp_path, **WIDE)
    tensors, _ = as_fp8(tmp_path)
    break_it(tensors, "model.layers.0.mlp.down_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("settings", [{"weight_block_size": [64, 64]}, {"quant_method": "awq"}, {"fmt": "e5m2"}])
def test_other_kinds_of_quantised_checkpoints_are_refused(tmp_path, settings):
    save_deepseek(tmp_path, **WIDE)
    as_fp8(tmp_path, **settings)
    with pytest.raises(CheckpointError, match="quantized checkpoint of a kind that is not supported"):
        load_model(tmp_path)
