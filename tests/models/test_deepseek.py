"""Logits of DeepSeek-V2 and V3 against transformers: random small configs, prompts, chunks and decodes."""

import random

import pytest
import torch
from cached_forward import STEPS, logits_in_steps
from tiny_deepseek import YARN, random_prompt, save_deepseek

from minivllm.models.registry import load_model

TOLERANCE = 5e-5
DIMENSIONS = {
    "version": [2, 3],
    "q_lora_rank": [None, 48],
    "rope_parameters": [None, YARN, {**YARN, "mscale": None, "mscale_all_dim": None}, {**YARN, "mscale": 1.2}],
    "n_group": [1, 2, 4],
    "norm_topk_prob": [True, False],
    "first_k_dense_replace": [0, 1, 2],
    "n_shared_experts": [1, 2],
    "tie_word_embeddings": [True, False],
    "routed_scaling_factor": [1.0, 2.5],
    "v_head_dim": [16, 32, 48],
    "num_attention_heads": [2, 4],
    "topk_method": ["greedy", "group_limited_greedy"],
    "rope_interleave": [True, False],
    "mtp_layers": [0, 2],
}


def random_settings(seed: int) -> dict:
    generator = random.Random(seed)
    settings = {name: generator.choice(values) for name, values in DIMENSIONS.items()}
    settings["topk_group"] = {1: 1, 2: 1, 4: 2}[settings["n_group"]]
    settings["num_key_value_heads"] = settings["num_attention_heads"]
    if settings["rope_parameters"] is not None:
        given = settings["rope_parameters"].items()
        settings["rope_parameters"] = {name: value for name, value in given if value is not None}
    for name in ("topk_method",) if settings["version"] == 3 else ("rope_interleave", "mtp_layers"):
        del settings[name]
    return settings


CASES = {seed: random_settings(seed) for seed in range(36)}


def save(path, settings):
    settings = dict(settings)
    return save_deepseek(path, version=settings.pop("version"), **settings)


@pytest.mark.parametrize("seed", CASES)
def test_logits_are_those_of_transformers(tmp_path, seed):
    reference = save(tmp_path, CASES[seed])
    model, _ = load_model(tmp_path)
    ids = torch.tensor(random_prompt(sum(STEPS), seed))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    logits = logits_in_steps(model, ids)
    assert expected.std() > 0.3
    assert (logits - expected).abs().max() < TOLERANCE


def test_the_cases_above_meet_every_setting_in_both_versions():
    for version in (2, 3):
        cases = [settings for settings in CASES.values() if settings["version"] == version]
        for name, values in DIMENSIONS.items():
            met = {str(settings[name]) for settings in cases if name in settings and name != "rope_parameters"}
            assert not met or met == {str(value) for value in values if name != "version" or value == version}
        ropes = [settings["rope_parameters"] or {} for settings in cases]
        assert len({tuple(sorted(rope)) for rope in ropes}) == 3 and len({rope.get("mscale") for rope in ropes}) == 3


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("version", [2, 3])
def test_every_backend_gives_the_logits_of_transformers(tmp_path, backend, version):
    reference = save_deepseek(tmp_path, version, rope_parameters=YARN, v_head_dim=48)
    model, _ = load_model(tmp_path)
    ids = torch.tensor(random_prompt(sum(STEPS), 0))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert (logits_in_steps(model, ids, backend) - expected).abs().max() < TOLERANCE


def test_absorbed_and_decompressed_attention_are_the_same_function(tmp_path):
    """One token at a time is all absorbed, the whole prompt at once all decompressed."""
    save_deepseek(tmp_path)
    model, _ = load_model(tmp_path)
    ids = torch.tensor(random_prompt(24, 0))
    absorbed = logits_in_steps(model, ids, steps=[1] * 24)
    decompressed = logits_in_steps(model, ids, steps=[24])
    assert (absorbed - decompressed).abs().max() < TOLERANCE


def test_yarn_sharpens_attention_where_mscale_all_dim_says_so(tmp_path):
    models = []
    for name, mscale_all_dim in (("with", 1.2), ("without", None)):
        rope = {key: value for key, value in {**YARN, "mscale_all_dim": mscale_all_dim}.items() if value is not None}
        save_deepseek(tmp_path / name, rope_parameters=rope)
        models.append(load_model(tmp_path / name)[0])
    scales = [model.attention_layers()[0].scale for model in models]
    assert scales[1] == 48**-0.5
    assert scales[0] == pytest.approx(48**-0.5 * (0.1 * 1.2 * torch.tensor(4.0).log().item() + 1) ** 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("version", [2, 3])
def test_half_precision_stays_close_to_float32_and_routes_in_float32(tmp_path, dtype, version):
    reference = save_deepseek(tmp_path, version, std=0.1, num_experts_per_tok=8, topk_group=2)  # no choice, no steps
    model, _ = load_model(tmp_path, dtype=dtype)
    assert model.layers[1].mlp.gate.weight.dtype == torch.float32
    assert model.attention_layers()[0].w_uk.dtype == dtype
    ids = torch.tensor(random_prompt(30, 0))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    cached = logits_in_steps_in(dtype, model, ids)
    assert cached.dtype == dtype
    assert (cached.float() - expected).norm() / expected.norm() < 16 * torch.finfo(dtype).eps


def logits_in_steps_in(dtype, model, ids):
    from cached_forward import CachedForward

    cached = CachedForward(model.attention_layers())
    cached.caches = {name: cache.to(dtype) for name, cache in cached.caches.items()}
    first = cached.run(lambda positions: model(ids[:29], positions), 0, 29)
    second = cached.run(lambda positions: model(ids[29:], positions), 29, 1)
    return model.compute_logits(torch.cat((first, second)))


def test_attention_layers_come_in_order_with_a_name_each(tmp_path):
    save_deepseek(tmp_path)
    layers = load_model(tmp_path)[0].attention_layers()
    assert [layer.layer_name for layer in layers] == [f"model.layers.{index}.self_attn" for index in range(3)]
    assert {(layer.d_c, layer.d_rope, layer.d_nope, layer.d_v) for layer in layers} == {(32, 16, 32, 32)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights_need_a_config_only_and_give_finite_logits(tmp_path, dtype):
    save_deepseek(tmp_path, num_nextn_predict_layers=1)
    (tmp_path / "model.safetensors").unlink()
    model, _ = load_model(tmp_path, dtype=dtype, load_format="dummy")
    logits = logits_in_steps_in(model.embed_tokens.weight.dtype, model, torch.tensor(random_prompt(30, 0)))
    assert torch.isfinite(logits).all() and logits.std() > 0
