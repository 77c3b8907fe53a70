"""Recipes of a few thousand parameters, and a text that even these can learn."""

import random
from pathlib import Path

import torch

from minivllm.checkpoints.training.data import encode
from minivllm.checkpoints.training.driver import Corpus
from minivllm.checkpoints.training.recipes import Recipe
from minivllm.checkpoints.training.tokenizer import train_tokenizer

VOCAB = 300
MLA = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
SMALL = {"steps": 12, "batch_size": 4, "sequence_length": 32, "warmup_steps": 2, "eval_every": 4, "learning_rate": 1e-2}


def deepseek(**changes) -> Recipe:
    architecture = MLA | changes.pop("architecture", {})
    return Recipe(
        **({"name": "nano", "description": "a test", "architecture": architecture, "mtp_passes": 3} | SMALL | changes)
    )


def qwen3(**changes) -> Recipe:
    return Recipe(**({"name": "nano-qwen3", "description": "a test", "architecture": QWEN3} | SMALL | changes))


def tale(lines: int = 220) -> str:
    """Lines of one pattern with random words: much can be learned, not all."""
    draw = random.Random(0)
    who, what, where = ("king", "fox", "girl", "wolf"), ("saw", "met", "fed", "lost"), ("wood", "mill", "town", "sea")
    return "".join(
        f"Once a {draw.choice(who)} {draw.choice(what)} a {draw.choice(who)} in the {draw.choice(where)}.\n"
        for _ in range(lines)
    )


def write_tale(directory: Path) -> Path:
    path = directory / "tale.txt"
    path.write_text(tale(), encoding="utf-8")
    return path


def corpus() -> Corpus:
    text = tale().splitlines(keepends=True)
    tokenizer = train_tokenizer(text, VOCAB)
    train, held_out = "".join(text[:180]), "".join(text[180:])
    device = torch.device("cpu")
    return Corpus(encode([train], tokenizer, device), encode([held_out], tokenizer, device), tokenizer)
