"""One byte-level BPE for all tiny models: any text is representable, and decoding gives the text back.

    ids 0, 1, 2      <|bos|> <|eos|> <|pad|>
    ids 3 .. 258     the 256 bytes
    ids 259 ..       merges, most frequent first

Encoding puts <|bos|> in front, as in training, where every row of a batch begins with it. Words are split as GPT-2
splits them, digits one by one. Method: byte-level BPE (Sennrich et al., 2016; GPT-2, 2019), by the tokenizers library.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from minivllm.checkpoints.errors import CheckpointError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL = [BOS, EOS, PAD]
BOS_ID, EOS_ID, PAD_ID = range(3)
FILES = ("tokenizer.json", "tokenizer_config.json")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE of exactly vocab_size entries. Raises ValueError if the text has too few pairs to merge."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives a vocabulary of {tokenizer.get_vocab_size()} entries, fewer than {vocab_size}: give more "
            "text or a smaller --vocab-size (at least 259: the bytes and three special tokens)"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as AutoTokenizer reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / FILES[0]), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (directory / FILES[1]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a directory. Raises CheckpointError unless it is one that train_tokenizer made."""
    path = directory / FILES[0]
    if not path.is_file():
        raise CheckpointError(f"{directory} has no tokenizer.json: give a directory that this program wrote")
    tokenizer = Tokenizer.from_file(str(path))
    found = [tokenizer.token_to_id(token) for token in SPECIAL]
    if found != [BOS_ID, EOS_ID, PAD_ID]:
        raise CheckpointError(f"{path} has ids {found} for {', '.join(SPECIAL)}, must be 0, 1, 2: another tokenizer")
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """How many bytes of text each id stands for; 0 for special tokens. Byte-level tokens have one character a byte."""
    return [
        0 if index < len(SPECIAL) else len(tokenizer.id_to_token(index)) for index in range(tokenizer.get_vocab_size())
    ]
