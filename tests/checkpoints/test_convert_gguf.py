"""From GGUF to Hugging Face form: names, row order, numbers, and the tokenizer of a real model."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from minivllm.checkpoints import CheckpointError, fetch
from minivllm.checkpoints.convert_gguf import convert, rows_for_half_rotation

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh0123", "ab"]


def rows_for_interleaved_rotation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of GGUF, written as the definition says: row 2i of a head is i, row 2i + 1 is i + d /
    2."""
    rows = []
    for head in np.split(weight, num_heads):
        half = len(head) // 2
        rows += [head[i // 2 + half * (i % 2)] for i in range(len(head))]
    return np.stack(rows)


def llama_tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
                "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path, tensors, architecture="llama", pre="smollm", extra_tensor=None) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in tensors.items():
        stem = name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        if stem.endswith(("q_proj", "k_proj")):
            values = rows_for_interleaved_rotation(values, HEADS if "q_proj" in stem else KV_HEADS)
        name = f"{prefix}{GGUF_NAMES[stem]}.weight"
        if values.ndim == 2:
            packed = quantize(values, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return llama_tensors(np.random.default_rng(0))


def test_every_tensor_comes_back_under_its_name_in_its_row_order(tmp_path, tensors):
    write_gguf(tmp_path / "m.gguf", tensors)
    convert(tmp_path / "m.gguf", tmp_path)
    converted = load_file(tmp_path / "model.safetensors")
    assert converted.keys() == tensors.keys()
    for name, original in tensors.items():
        if original.ndim == 2:
            q8 = GGMLQuantizationType.Q8_0
            original = dequantize(quantize(original, q8), q8)
        assert torch.equal(converted[name], torch.tensor(original).to(torch.bfloat16)), name


def test_putting_rows_back_undoes_the_interleaving():
    weight = np.random.default_rng(0).standard_normal((6 * 10, 3))
    interleaved = rows_for_interleaved_rotation(weight, 6)
    assert not np.array_equal(interleaved, weight)
    assert np.array_equal(rows_for_half_rotation(interleaved, 6), weight)


def test_the_converted_directory_opens_in_transformers(tmp_path, tensors):
    write_gguf(tmp_path / "m.gguf", tensors)
    convert(tmp_path / "m.gguf", tmp_path)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = model.config
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5 and config.dtype == torch.bfloat16
    assert config.rope_parameters["rope_theta"] == 50_000.0 and config.head_dim == HIDDEN // HEADS
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'"),
        ({"pre": "qwen2"}, "gpt2/qwen2"),
        ({"extra_tensor": "blk.0.ffn_gate_inp.weight"}, r"'blk\.0\.ffn_gate_inp\.weight' has no place"),
    ],
)
def test_another_kind_of_gguf_is_refused_by_name(tmp_path, tensors, change, message):
    write_gguf(tmp_path / "m.gguf", tensors, **change)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "m.gguf", tmp_path)


@pytest.fixture(scope="module")
def smollm2():
    return fetch("smollm2-135m")


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2, local_files_only=True)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|im_start|>", [1]),
        ("<|im_end|>\n", [2, 198]),
        ("Hello world", [19556, 905]),
        (" 2024", [216, 34, 32, 34, 36]),
    ],
)
def test_smollm2_text_has_these_ids(smollm2_tokenizer, text, ids):
    assert smollm2_tokenizer.encode(text) == ids


@pytest.mark.parametrize(
    "text", ["  two  spaces\n\n\ttab", "don't 3.14 x=1", "日本語 🧑‍🚀 e\u0301", "<|im_start|>user\n"]
)
def test_smollm2_text_survives_encoding_and_decoding(smollm2_tokenizer, text):
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


def test_smollm2_special_tokens_have_their_roles(smollm2, smollm2_tokenizer):
    assert (smollm2_tokenizer.bos_token_id, smollm2_tokenizer.eos_token_id) == (1, 2)
    assert smollm2_tokenizer.decode([1, 19556, 2], skip_special_tokens=True) == "Hello"
    core = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert core.get_vocab_size() == json.loads((smollm2 / "config.json").read_text())["vocab_size"] == 49152


def test_smollm2_answers_a_question(smollm2, smollm2_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    answer = smollm2_tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
