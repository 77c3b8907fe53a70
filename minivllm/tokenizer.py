"""Text in, ids out, and back again one token at a time.

    load_tokenizer(directory)                    -> the tokenizer of a checkpoint
    encode_chat(tokenizer, messages)             -> prompt ids, through the model's own chat template
    IncrementalDetokenizer(tokenizer, prompt)    -> .append(id) gives the text that became certain

A token is a piece of UTF-8, not of text: an emoji may take four tokens, and none of the first three is
printable. Nor is text the sum of decoded tokens: some tokenizers drop the space in front of a text's first
word. Hence the detokenizer decodes a window that begins before the new token:

    ids     ... p p | a a a | b b
                    ^window   ^pending       emitted: everything up to `pending`
            new text = decode(a a a b b) minus decode(a a a), held back while it ends within a character
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What UTF-8 decoders put in place of bytes that are no character, or not yet.
_REPLACEMENT = "\ufffd"
# Tokens of the prompt in the first window: enough to hold a whole character and a word's beginning.
_CONTEXT = 8


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local checkpoint directory; nothing is downloaded. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{directory} has no usable tokenizer ({reason}): add tokenizer.json, or use skip_tokenizer_init=True "
            "and give token ids"
        ) from None


def encode_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer.

    Messages are {"role": "system" | "user" | "assistant", "content": text}. Raises ValueError if the
    tokenizer has no chat template or the template refuses the messages.
    """
    import jinja2

    if not tokenizer.chat_template:
        raise ValueError(
            "this model has no chat template, since it was not trained to chat: give it a text to continue (generate), "
            "or take a model that was, such as smollm2-135m"
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"the model's chat template refuses these messages ({error})") from None
    # The template has written the special tokens; the tokenizer must not add its own.
    return tokenizer.encode(text, add_special_tokens=False)


class IncrementalDetokenizer:
    """Text of one request's output as its tokens arrive.

    What `append` and `flush` return, joined, is what decoding prompt and output adds to decoding the prompt
    alone; with a byte-level tokenizer that is the decoded output itself. A prompt that ends within a
    character gives it back whole once an output token completes it. Each call decodes a few tokens, however
    long the output is.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        # The tokenizer's Rust core spares the overhead of the wrapper, and its clean-up of spaces before
        # punctuation, which would change text that is already out.
        self._decoder = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = list(prompt_ids[-_CONTEXT:])
        self._pending = len(self._window)

    def append(self, token_id: int) -> str:
        """The text that is certain now and was not before; empty within a character."""
        self._window.append(token_id)
        return self._emit(final=False)

    def flush(self) -> str:
        """The rest, after the last token: an unfinished character comes out as U+FFFD."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        before = self._decode(self._window[: self._pending])
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        if not text.startswith(before):
            # The prompt ended within a character, and the output has completed it.
            before = before.rstrip(_REPLACEMENT)
        if len(text) > len(before):
            # The window may start at any border between characters: the next one starts at what was pending.
            self._window = self._window[self._pending :]
            self._pending = len(self._window)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens)
