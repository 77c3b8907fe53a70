"""What a DeepSeek checkpoint or config may not be, and what is said about it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_deepseek import save_deepseek

from minivllm.checkpoints import CheckpointError
from minivllm.models.registry import load_model


def edit_config(directory, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_checkpoint_stores_an_expert_in_three_tensors_and_the_bias_beside_the_gate(tmp_path):
    save_deepseek(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    slots = [name for name, _ in slots_of(tmp_path)]
    assert sorted(slots) == sorted(names)
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in names
    assert "model.layers.2.mlp.gate.e_score_correction_bias" in names


def slots_of(directory):
    from minivllm.models.deepseek import DeepseekV3ForCausalLM
    from minivllm.models.registry import load_config

    return DeepseekV3ForCausalLM(load_config(directory), 64).slots()


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_a_missing_expert_is_named(tmp_path, part):
    save_deepseek(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.2.mlp.experts.5.{part}.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"missing: model\.layers\.2\.mlp\.experts\.5\.{part}\.weight"):
        load_model(tmp_path)


def test_an_expert_too_many_is_named(tmp_path):
    save_deepseek(tmp_path)
    edit_config(tmp_path, n_routed_experts=6)
    with pytest.raises(
        CheckpointError, match=r"unexpected: model\.layers\.1\.mlp\.experts\.6\.down_proj.*n_routed_experts=6"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("setting", "value", "tensor"),
    [
        ("kv_lora_rank", 48, r"self_attn\.kv_a_proj_with_mqa\.weight is \(48, 64\), should be \(64, 64\)"),
        ("q_lora_rank", 32, r"self_attn\.q_a_proj\.weight is \(48, 64\), should be \(32, 64\)"),
        ("qk_rope_head_dim", 32, r"self_attn\.kv_a_proj_with_mqa\.weight is \(48, 64\), should be \(64, 64\)"),
        ("v_head_dim", 16, r"self_attn\.kv_b_proj\.weight is \(256, 32\), should be \(192, 32\)"),
        ("moe_intermediate_size", 16, r"mlp\.experts\.0\.gate_proj\.weight is \(32, 64\), should be \(16, 64\)"),
    ],
)
def test_a_wrong_size_is_named_with_the_tensor_and_the_setting(tmp_path, setting, value, tensor):
    save_deepseek(tmp_path)
    edit_config(tmp_path, **{setting: value})
    with pytest.raises(CheckpointError, match=rf"{tensor}.*Shapes follow from config\.json: .*{setting}={value}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("version", "changes", "said"),
    [
        (3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for deepseek_v3: it scores"),
        (3, {"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        (2, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported for deepseek_v2"),
        (3, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported for deepseek_v3; known: 'noaux_tc'"),
        (2, {"topk_method": "noaux_tc"}, "known: 'greedy', 'group_limited_greedy'"),
        (3, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        (3, {"num_experts_per_tok": 5}, "num_experts_per_tok must be between 1 and 4, the experts in reach of a token"),
        (2, {"num_experts_per_tok": 9, "topk_method": "greedy"}, "num_experts_per_tok must be between 1 and 8"),
        (3, {"attention_bias": True}, "attention_bias is not supported"),
        (2, {"mlp_bias": True}, "mlp_bias is not supported"),
        (3, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)  # fmt: skip
def test_a_config_that_asks_for_what_is_not_built_is_refused_by_name(tmp_path, version, changes, said):
    save_deepseek(tmp_path, version)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=said):
        load_model(tmp_path)


@pytest.mark.parametrize(("version", "scoring", "method"), [(3, "sigmoid", "noaux_tc"), (2, "softmax", "greedy")])
def test_settings_that_name_what_is_built_are_taken(tmp_path, version, scoring, method):
    save_deepseek(tmp_path, version)
    edit_config(tmp_path, scoring_func=scoring, topk_method=method, moe_layer_freq=1)
    model, _ = load_model(tmp_path)
    assert model.layers[1].mlp.experts.routing.method == method


def test_a_broken_file_is_named(tmp_path):
    save_deepseek(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        load_model(tmp_path)


def test_no_parameter_requires_grad(tmp_path):
    save_deepseek(tmp_path)
    assert not any(parameter.requires_grad for parameter in load_model(tmp_path)[0].parameters())


def test_weights_of_a_sharded_checkpoint_are_the_same(tmp_path):
    model = save_deepseek(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    whole, sharded = (load_model(tmp_path / name)[0] for name in ("whole", "shards"))
    for (name, one), (_, other) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(one, other), name
