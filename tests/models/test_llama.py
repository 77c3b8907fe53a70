"""Hidden states and logits of every architecture in llama.py against transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from minivllm.models.registry import load_model

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "llama": (LlamaConfig, {}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama_all_biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_own_head_dim": (LlamaConfig, {"head_dim": 32}),
    "llama_mqa": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama_yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen3_bias": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
}


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_are_those_of_transformers(save_checkpoint, variant):
    config_class, settings = variant
    directory, reference = save_checkpoint(config_class, **settings)
    model, _ = load_model(directory)
    ids = torch.randint(0, 300, (60,))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        hidden = model(ids, torch.arange(60))
        logits = model.compute_logits(hidden)
    assert hidden.shape == (60, 64) and logits.shape == (60, 300)
    assert (logits - expected).abs().max() < 1e-4
    assert expected.std() > 0.1


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_stay_close_to_float32(save_checkpoint, dtype):
    directory, reference = save_checkpoint(Qwen3Config, head_dim=32)
    model, _ = load_model(directory, dtype=dtype)
    ids = torch.randint(0, 300, (40,))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        logits = model.compute_logits(model(ids, torch.arange(40)))
    assert logits.dtype == dtype
    assert (logits.float() - expected).norm() / expected.norm() < 16 * torch.finfo(dtype).eps


@pytest.mark.usefixtures("plain_attention")
def test_logits_of_some_rows_are_rows_of_all_logits(save_checkpoint):
    directory, _ = save_checkpoint()
    model, _ = load_model(directory)
    with torch.inference_mode():
        hidden = model(torch.randint(0, 300, (20,)), torch.arange(20))
        rows = torch.tensor([3, 19])
        torch.testing.assert_close(model.compute_logits(hidden[rows]), model.compute_logits(hidden)[rows])
        assert model.compute_logits(hidden[:0]).shape == (0, 300)


@pytest.mark.usefixtures("plain_attention")
def test_a_forward_pass_leaves_nothing_behind(save_checkpoint):
    directory, _ = save_checkpoint()
    model, _ = load_model(directory)
    ids, positions = torch.randint(0, 300, (20,)), torch.arange(20)
    with torch.inference_mode():
        first, second = model(ids, positions), model(ids, positions)
    assert torch.equal(first, second)


def test_attention_layers_come_in_order_with_a_name_each(save_checkpoint):
    model, _ = load_model(save_checkpoint(num_hidden_layers=3)[0])
    names = [layer.layer_name for layer in model.attention_layers()]
    assert names == [f"model.layers.{index}.self_attn" for index in range(3)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(save_checkpoint, settings, named):
    with pytest.raises(ValueError, match=named):
        load_model(save_checkpoint(**settings)[0])


def test_sliding_windows_are_refused(save_checkpoint):
    directory, _ = save_checkpoint(Qwen2Config, use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding-window"):
        load_model(directory)


@pytest.mark.usefixtures("plain_attention")
def test_smollm2_gives_the_logits_of_transformers(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    ids = torch.tensor(tokenizer.encode("The three primary colours are red, yellow and"))
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model, _ = load_model(smollm2, max_model_len=64)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        logits = model.compute_logits(model(ids, torch.arange(len(ids))))
    assert (logits - expected).abs().max() < 1e-3
    assert tokenizer.decode(logits[-1].argmax()) == " blue"
