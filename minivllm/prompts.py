"""What users hand in, read and checked before the engine sees it: prompts, conversations, parameters for each."""

import itertools
import numbers
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int]
Message = dict[str, str]
Conversation = Sequence[Message]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a text is one, and so is a list whose first entry is a token id."""
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a text, a list of token ids or a list of those, not {prompts!r}")
    prompt_list = [prompts] if isinstance(prompts, str) else list(prompts)
    is_one = bool(prompt_list) and isinstance(prompt_list[0], numbers.Integral)
    return [prompt_list] if is_one else prompt_list


def one_for_each(name: str, value: Any, num_prompts: int) -> list[Any]:
    """An argument that is given once for all prompts or as a list with one for each; `name` is for the error."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts but {len(value)} {name}: give one for all or one each")
    return list(value)


def check_priority(priority: Any, scheduling_policy: str) -> None:
    """Raises ValueError for what is no priority, and for one that would go unheard."""
    if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
        raise ValueError(f"priority must be a whole number (the lower, the sooner served), not {priority!r}")
    if priority and scheduling_policy != "priority":
        raise ValueError(
            f"priority={priority} needs scheduling_policy='priority': under {scheduling_policy!r} nobody would heed it"
        )


def check_cache_salt(cache_salt: Any) -> None:
    """Raises ValueError for what is neither None nor a text that keeps anybody apart."""
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise ValueError(f"cache_salt must be None or a text that is not empty, not {cache_salt!r}")


class PromptReader:
    """Turns a prompt into token ids and refuses what cannot run.

    Args:
        tokenizer: None if the user wants no texts.
        vocab_size: token ids go from 0 to vocab_size - 1.
        max_model_len: longest request, prompt and output together, in tokens.
        cache_tokens: tokens that the whole KV cache holds; named in errors, since it may be what limits the length.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        vocab_size: int,
        max_model_len: int,
        cache_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._cache_tokens = cache_tokens

    def read(self, prompt: Prompt | Conversation, params: SamplingParams) -> tuple[str | None, list[int]]:
        """The prompt's text, if it came as one, and its token ids.

        Raises:
            ValueError: the request cannot run; the message names the culprit and the remedy.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._tokenize(prompt)
        if not token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        self._check_ids("the prompt", token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: use stop_token_ids, or leave skip_tokenizer_init at False")
        if len(token_ids) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and leaves no room for an output: max_model_len is "
                f"{self._max_model_len} and the KV cache holds {self._cache_tokens} tokens; shorten the prompt to at "
                f"most {self._max_model_len - 1} tokens"
            )
        return text, token_ids

    def _tokenize(self, prompt: Prompt | Conversation) -> list[int]:
        if not isinstance(prompt, Iterable):
            raise ValueError(f"a prompt must be a text or a list of token ids, not {prompt!r}")
        items = prompt if isinstance(prompt, str) else list(prompt)
        is_conversation = not isinstance(items, str) and bool(items) and isinstance(items[0], dict)
        if (isinstance(items, str) or is_conversation) and self._tokenizer is None:
            raise ValueError("text needs a tokenizer: give token ids, or leave skip_tokenizer_init at False")
        if is_conversation:
            return encode_chat(self._tokenizer, items)
        if isinstance(items, str):
            # An empty text would be a lone beginning-of-sequence token with some tokenizers and nothing with others.
            return self._tokenizer.encode(items) if items else []
        for token_id in items:
            if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
                raise ValueError(f"a prompt must be a text or a list of token ids, but holds {token_id!r}")
        return [int(token_id) for token_id in items]

    def _check_ids(self, name: str, token_ids: list[int]) -> None:
        culprit = next((token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size), None)
        if culprit is not None:
            raise ValueError(
                f"{name} holds token id {culprit}, which is outside the vocabulary: ids go from 0 to "
                f"{self._vocab_size - 1}"
            )


def find_eos_token_ids(model_path: Path, hf_config: Any, tokenizer: "PreTrainedTokenizerBase | None") -> frozenset[int]:
    """All ids that the model's config, its generation config or its tokenizer calls the end of a sequence."""
    from transformers import GenerationConfig

    found = [getattr(hf_config, "eos_token_id", None)]
    if (model_path / "generation_config.json").exists():
        found.append(GenerationConfig.from_pretrained(model_path).eos_token_id)
    if tokenizer is not None:
        found.append(tokenizer.eos_token_id)
    ids = itertools.chain.from_iterable(item if isinstance(item, list) else [item] for item in found)
    return frozenset(token_id for token_id in ids if token_id is not None and token_id < hf_config.vocab_size)
