"""A random two-layer Llama with a byte-level tokenizer: any byte may follow any other, so texts are full of broken
and repaired UTF-8, and a thousand tokens take a second."""

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['content'] is not defined %}{{ raise_exception('a message has no content') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}"
    "{% endfor %}<assistant>"
)
NUM_BYTES = 256
EOS = NUM_BYTES
VOCAB_SIZE = 258


def save_tiny_chat_model(directory: Path, seed: int = 0) -> Path:
    """Write config, float32 weights and tokenizer in Hugging Face format."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=None,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(directory)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<pad>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == len(fast)
    return directory
