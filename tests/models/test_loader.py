"""What a checkpoint may look like, and what is said about one that does not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config

from minivllm.checkpoints import CheckpointError
from minivllm.models.loader import load_weights, weight_files
from minivllm.models.registry import load_config, load_model, resolve_dtype


def edit_tensors(directory, edit) -> None:
    """Rewrites model.safetensors after `edit(tensors)`."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(directory, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.usefixtures("plain_attention")
def test_a_sharded_checkpoint_is_the_same_model(save_checkpoint):
    directory, reference = save_checkpoint(Qwen2Config, max_shard_size="60KB")
    assert len(weight_files(directory)) > 2
    model, _ = load_model(directory)
    ids = torch.arange(30)
    with torch.inference_mode():
        logits = model.compute_logits(model(ids, ids))
        assert (logits - reference(ids[None]).logits[0]).abs().max() < 1e-4


def test_every_slot_is_filled_with_the_tensor_of_its_name(save_checkpoint):
    directory, _ = save_checkpoint(Qwen2Config)
    stored = load_file(directory / "model.safetensors")
    slots = {name: torch.full(tensor.shape, torch.nan) for name, tensor in stored.items()}
    load_weights(slots.items(), directory)
    assert all(torch.equal(slots[name], stored[name]) for name in stored)


def test_tied_models_load_with_and_without_a_stored_head(save_checkpoint):
    directory, _ = save_checkpoint(tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    load_model(directory)
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_model(directory)


def test_stored_rotary_tables_are_ignored(save_checkpoint):
    directory, _ = save_checkpoint()
    edit_tensors(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load_model(directory)


def test_all_misfits_are_listed_by_name_in_one_error(save_checkpoint):
    directory, _ = save_checkpoint()

    def spoil(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(65)

    edit_tensors(directory, spoil)
    with pytest.raises(CheckpointError) as error:
        load_model(directory)
    for part in (
        "missing: model.layers.1.self_attn.k_proj.weight.",
        "unexpected: model.layers.9.mlp.up_proj.weight.",
        "wrong shape: model.norm.weight is (65,), should be (64,)",
    ):
        assert part in str(error.value)


def test_a_bias_that_the_architecture_lacks_is_unexpected(save_checkpoint):
    directory, _ = save_checkpoint()
    edit_tensors(directory, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(directory)


def test_a_long_list_of_misfits_is_cut_with_a_count(save_checkpoint):
    directory, _ = save_checkpoint()
    edit_tensors(directory, lambda t: t.update({f"extra.{i}": torch.zeros(1) for i in range(25)}))
    with pytest.raises(CheckpointError, match="and 15 more"):
        load_model(directory)


@pytest.mark.parametrize("keep", [4, 100, 20_000])
def test_a_truncated_file_is_named(save_checkpoint, keep):
    directory, _ = save_checkpoint()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable .* download it again"):
        load_model(directory)


def test_a_missing_shard_is_named(save_checkpoint):
    directory, _ = save_checkpoint(max_shard_size="60KB")
    gone = weight_files(directory)[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        load_model(directory)


@pytest.mark.parametrize("content", ["not json", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_named(save_checkpoint, content):
    directory, _ = save_checkpoint(max_shard_size="60KB")
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json is not a safetensors index"):
        load_model(directory)


def test_a_directory_without_weights_points_to_dummy(save_checkpoint):
    directory, _ = save_checkpoint()
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match='load_format="dummy"'):
        load_model(directory)


def test_a_directory_without_config_says_what_a_model_is(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json is not a JSON object"):
        load_config(tmp_path)


def test_an_unknown_architecture_is_named_and_the_known_ones_are_listed(save_checkpoint):
    directory, _ = save_checkpoint()
    edit_config(directory, architectures=["BertModel"])
    with pytest.raises(CheckpointError, match="'BertModel'; known architectures: LlamaForCausalLM, Qwen2"):
        load_config(directory)


def test_a_quantized_checkpoint_is_refused(save_checkpoint):
    directory, _ = save_checkpoint()
    edit_config(directory, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="quantized checkpoint"):
        load_config(directory)


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dummy_weights_need_a_config_only_and_give_finite_logits(save_checkpoint, dtype):
    directory, _ = save_checkpoint(num_hidden_layers=8)
    (directory / "model.safetensors").unlink()
    model, _ = load_model(directory, dtype=dtype, load_format="dummy")
    ids = torch.arange(20)
    with torch.inference_mode():
        logits = model.compute_logits(model(ids, ids))
    assert torch.isfinite(logits).all() and logits.std() > 0


def test_dummy_weights_depend_on_the_seed_alone(save_checkpoint):
    directory, _ = save_checkpoint()
    first, again, other = (
        load_model(directory, load_format="dummy", seed=seed)[0].embed_tokens.weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_loading_converts_to_the_dtype_asked_for(save_checkpoint):
    directory, reference = save_checkpoint()
    model, _ = load_model(directory, dtype="bfloat16")
    expected = reference.model.embed_tokens.weight.to(torch.bfloat16)
    assert torch.equal(model.embed_tokens.weight, expected)
    assert torch.get_default_dtype() == torch.float32


def test_auto_dtype_is_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu():
    config = LlamaConfig(dtype="bfloat16")
    assert resolve_dtype("auto", torch.device("cpu"), config) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda"), config) == torch.bfloat16
    assert resolve_dtype("auto", torch.device("cuda"), LlamaConfig()) == torch.float32


@pytest.mark.parametrize("dtype", ["int8", torch.int64])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="known: auto, float32, bfloat16, float16"):
        resolve_dtype(dtype, torch.device("cpu"), LlamaConfig())


def test_an_unknown_load_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'gguf'; known: auto, dummy"):
        load_model(tmp_path, load_format="gguf")


def test_no_parameter_requires_grad(save_checkpoint):
    model, _ = load_model(save_checkpoint()[0])
    assert not any(parameter.requires_grad for parameter in model.parameters())
