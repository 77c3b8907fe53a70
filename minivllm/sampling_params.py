"""How the next token of one request is chosen, and when the request ends; validated where it is made, no torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field


class SamplingError(ValueError):
    """A sampling parameter that cannot work; the message names it and says what would."""


@dataclass
class SamplingParams:
    """Settings of one request. Processors work in this order: penalties, min_tokens, temperature, min_p, top-k, top-p.

    Args:
        n: completions of one prompt. Completion i uses `seed + i`.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this.
        min_p: drop tokens less likely than this share of the most likely token's probability.
        seed: makes the request repeatable whatever runs beside it; None draws a seed from the engine's.
        repetition_penalty: divide (positive) or multiply (negative) the logits of tokens seen in prompt or output.
        presence_penalty: subtracted once from the logit of each token that the output contains.
        frequency_penalty: subtracted once for each time that the output contains the token.
        max_tokens: most tokens to generate; None means up to max_model_len.
        min_tokens: no stop by EOS, stop token or stop string before so many tokens.
        stop: strings that end the text; the text ends before the string that is completed first.
        stop_token_ids: token ids that end the output; the id is kept in token_ids, not in the text.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: log-probabilities of this many most likely tokens (and of the sampled one) for each output token.
        prompt_logprobs: the same for each prompt token but the first.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.stop = _as_list(self.stop)
        self.stop_token_ids = _as_list(self.stop_token_ids)
        if self.top_k == -1:
            self.top_k = 0
        self._check_numbers()
        self._check_stops()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _check_numbers(self) -> None:
        _check_whole("n", self.n, 1, "1 or more completions")
        _check_real("temperature", self.temperature, lambda t: t >= 0, "0 (greedy) or positive")
        _check_whole("top_k", self.top_k, 0, "0 or -1 (no limit) or positive")
        _check_real("top_p", self.top_p, lambda p: 0 < p <= 1, "in (0, 1]")
        _check_real("min_p", self.min_p, lambda p: 0 <= p <= 1, "in [0, 1]")
        _check_real("repetition_penalty", self.repetition_penalty, lambda r: r > 0, "positive")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_real(name, getattr(self, name), lambda p: -2 <= p <= 2, "in [-2, 2]")
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 1, "1 or more, or None for as many as fit")
        _check_whole("min_tokens", self.min_tokens, 0, "0 or positive")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}): lower it or "
                "raise max_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 0, "None, 0 (the token itself) or a count of alternatives")
        if self.seed is not None:
            _check_whole("seed", self.seed, -(2**63), "a 64-bit whole number")
            if self.seed >= 2**63:
                raise SamplingError(f"seed must be a 64-bit whole number, not {self.seed}")

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str):
                raise SamplingError(f"stop must be a string or a list of strings, not {text!r}")
            if not text:
                raise SamplingError(
                    "stop must not hold an empty string: it would match before the first token; remove it"
                )
        for token_id in self.stop_token_ids:
            _check_whole("stop_token_ids", token_id, 0, "a list of token ids, each 0 or positive")


def _as_list(value: object) -> list:
    """A copy of a list, or a list of the one thing that is none."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def _check_whole(name: str, value: object, lowest: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise SamplingError(f"{name} must be {meaning}, not {value!r}")


def _check_real(name: str, value: object, is_valid: Callable[[float], bool], meaning: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not is_valid(value):
        raise SamplingError(f"{name} must be {meaning}, not {value!r}")
