"""A Llama in GGUF form (llama.cpp's file format) into a directory in Hugging Face format.

    metadata  -> config.json, generation_config.json
    tensors   -> model.safetensors, bfloat16, dequantized
    tokens    -> tokenizer.json, tokenizer_config.json (gguf_tokenizer)

Two things differ beyond names. Quantized blocks are expanded once, so what is lost to 4 bits stays lost. And
GGUF stores the rows of q and k in the order for rotating neighbouring dimensions, while Hugging Face's Llama
rotates dimension i with i + head_dim / 2; the rows are put back:

    GGUF, one head:   0  d/2  1  d/2+1  2  ...        Hugging Face:   0  1  2  ...  d/2  d/2+1  ...
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save
from tqdm import tqdm

from minivllm.checkpoints.errors import CheckpointError
from minivllm.checkpoints.gguf_tokenizer import write_tokenizer

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert(source: Path, directory: Path) -> None:
    """Writes the five files into an existing directory. Raises CheckpointError unless it is a Llama."""
    reader = GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise CheckpointError(
            f"{source} is a GGUF of architecture {metadata['general.architecture']!r}; only 'llama' can be converted"
        )
    tensors = {}
    for tensor in tqdm(reader.tensors, desc="converting", unit="tensor", mininterval=0.5):
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            values = rows_for_half_rotation(values, metadata["llama.attention.head_count"])
        elif tensor.name.endswith("attn_k.weight"):
            values = rows_for_half_rotation(values, metadata["llama.attention.head_count_kv"])
        tensors[huggingface_name(tensor.name)] = torch.tensor(values, dtype=torch.bfloat16)
    # Not save_file: it leaves a file that only its owner can read, and a cache may be shared by a class.
    (directory / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    special = {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }
    tied = "lm_head.weight" not in tensors
    _write_json(directory / "config.json", llama_config(metadata) | special | {"tie_word_embeddings": tied})
    _write_json(directory / "generation_config.json", special)
    write_tokenizer(metadata, directory)


def rows_for_half_rotation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """weight [num_heads * head_dim, hidden_size]: from interleaved pairs of rows to halves of each head."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def huggingface_name(name: str) -> str:
    """The tensor's name in a Hugging Face Llama. Raises CheckpointError if it has no such tensor."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise CheckpointError(f"the GGUF tensor {name!r} has no place in a Llama")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.weight"


def llama_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """config.json in the layout that every version of transformers reads."""
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # GGUF keeps it in float32; rounding gives back the decimal number that was meant.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
