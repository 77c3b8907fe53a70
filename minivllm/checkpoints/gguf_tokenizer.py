"""The tokenizer in a GGUF file as tokenizer.json and tokenizer_config.json.

    text -> special tokens cut out -> digits one by one, words -> bytes as characters -> BPE merges -> ids

GGUF carries vocabulary, merges and the name of the pre-tokenizer ("smollm"), but not its rules: those of
SmolLM are digits one by one, then GPT-2's split into words with a leading space.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from minivllm.checkpoints.errors import CheckpointError

_CONTROL = 3  # llama.cpp's token type of tokens like <|im_start|>


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """Writes both files from GGUF metadata. Raises CheckpointError for another kind of tokenizer."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"the GGUF tokenizer {'/'.join(kind)} is not known; only gpt2/smollm is")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    build_tokenizer(
        tokens,
        [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        [
            token
            for token, type_ in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
            if type_ == _CONTROL
        ],
    ).save(str(directory / "tokenizer.json"))

    def special(role: str) -> str:
        return tokens[metadata[f"tokenizer.ggml.{role}_token_id"]]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special("bos"),
        "eos_token": special("eos"),
        "unk_token": special("unknown"),
        "pad_token": special("padding"),
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(tokens: list[str], merges: list[tuple[str, str]], special: list[str]) -> Tokenizer:
    """A byte-level BPE whose ids are the positions in `tokens`."""
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer
