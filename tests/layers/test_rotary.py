"""Rotary embedding against transformers, for every rope type and both layouts of the settings."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minivllm.layers.rotary import RotaryEmbedding, apply_rotary, inverse_frequencies, rope_parameters

HEAD_DIM, POSITIONS = 64, 512
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_given_attention_factor": YARN | {"attention_factor": 1.7},
    "yarn_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn_betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn_not_truncated": YARN | {"truncate": False},
}


def huggingface_config(scaling: dict | None, theta: float = 50_000.0) -> LlamaConfig:
    parameters = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": theta}
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters=copy.deepcopy(parameters),
    )


def old_config(scaling: dict | None, spelling: str = "type") -> SimpleNamespace:
    scaling = copy.deepcopy(scaling)
    if scaling and spelling == "type":
        scaling["type"] = scaling.pop("rope_type")
    return SimpleNamespace(rope_theta=50_000.0, rope_scaling=scaling, max_position_embeddings=POSITIONS)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_frequencies_and_attention_factor_are_those_of_transformers(scaling):
    config = huggingface_config(scaling)
    reference = LlamaRotaryEmbedding(copy.deepcopy(config))
    inv_freq, attention_factor = inverse_frequencies(config, HEAD_DIM)
    assert torch.equal(inv_freq, reference.inv_freq)
    assert attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", [None, YARN], ids=["default", "yarn"])
def test_rotated_heads_are_those_of_transformers(scaling, dtype):
    torch.manual_seed(0)
    config = huggingface_config(scaling)
    positions = torch.tensor([0, 1, 7, 300, 511, 2])
    x = torch.randn(len(positions), 3, HEAD_DIM, dtype=dtype)
    cos, sin = LlamaRotaryEmbedding(copy.deepcopy(config))(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    got = apply_rotary(x.clone(), *RotaryEmbedding(config, HEAD_DIM, POSITIONS)(positions, dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=tolerance, atol=tolerance)
    assert got.dtype == dtype


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_the_old_layout_means_the_same_as_the_new_one(scaling, spelling):
    new, old = huggingface_config(scaling), old_config(scaling, spelling)
    (inv_freq, factor), (old_inv_freq, old_factor) = (inverse_frequencies(c, HEAD_DIM) for c in (new, old))
    assert torch.equal(inv_freq, old_inv_freq) and factor == old_factor


def test_a_config_without_rope_settings_gets_theta_10000():
    parameters = rope_parameters(SimpleNamespace(max_position_embeddings=POSITIONS))
    assert (parameters["rope_type"], parameters["rope_theta"]) == ("default", 10_000.0)


def test_reading_the_settings_leaves_the_config_alone():
    config = old_config(YARN)
    before = copy.deepcopy(config)
    inverse_frequencies(config, HEAD_DIM)
    assert config == before


def test_an_unknown_rope_type_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(ValueError, match=r"'dynamic'; known types: default, linear, llama3, yarn"):
        inverse_frequencies(huggingface_config({"rope_type": "dynamic", "factor": 2.0}), HEAD_DIM)


def test_a_missing_setting_is_named():
    with pytest.raises(ValueError, match="'linear' needs the setting 'factor'"):
        inverse_frequencies(old_config({"rope_type": "linear"}), HEAD_DIM)


def test_rotating_part_of_a_head_is_refused():
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        inverse_frequencies(old_config({"rope_type": "default", "partial_rotary_factor": 0.5}), HEAD_DIM)


def test_neighbouring_positions_stay_apart_in_bfloat16_models():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = RotaryEmbedding(huggingface_config(None), HEAD_DIM, POSITIONS)
    finally:
        torch.set_default_dtype(before)
    assert rotary.table.dtype == torch.float32
    assert not torch.equal(rotary.table[510], rotary.table[511])


def test_scores_depend_on_the_distance_of_positions_alone():
    torch.manual_seed(0)
    rotary = RotaryEmbedding(huggingface_config(None), HEAD_DIM, POSITIONS)
    q, k = torch.randn(2, 1, 1, HEAD_DIM)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        rotated_q = apply_rotary(q.clone(), *rotary(torch.tensor([q_position]), torch.float32))
        rotated_k = apply_rotary(k.clone(), *rotary(torch.tensor([k_position]), torch.float32))
        return (rotated_q * rotated_k).sum()

    torch.testing.assert_close(score(5, 2), score(405, 402), rtol=1e-4, atol=1e-4)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-2
