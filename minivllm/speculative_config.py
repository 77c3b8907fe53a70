"""How to speculate: which proposer, how many drafts; validated where it is made, no torch.

    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    {"method": "draft_model", "num_speculative_tokens": 4, "model": "a smaller model with the same vocabulary"}
    {"method": "mtp", "num_speculative_tokens": 2}

Names are vLLM's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHODS = ("ngram", "draft_model", "mtp")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")


class SpeculativeConfigError(ValueError):
    """A setting of speculation that cannot work; the message names it and says what would."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """The settings of `EngineConfig.speculative_config`, checked.

    Args:
        method: "ngram": copy what followed the same tokens earlier; "draft_model": a smaller model; "mtp": the layers
            for multi-token prediction that DeepSeek checkpoints carry.
        num_speculative_tokens: k, drafts for each request and step; 0 means no speculation.
        model: for "draft_model": name or directory of the draft model.
        prompt_lookup_min, prompt_lookup_max: for "ngram": shortest and longest suffix looked up, in tokens.
        draft_sample_method: for "draft_model" and "mtp": "greedy" drafts the most likely token; "probabilistic" draws
            it, where a request samples, at the request's temperature.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    draft_sample_method: str = "greedy"

    @classmethod
    def of(cls, settings: Any) -> "SpeculativeConfig":
        """From a dict as users write it; raises SpeculativeConfigError."""
        if not isinstance(settings, Mapping):
            raise SpeculativeConfigError(f"speculative_config must be a dict or None, not {settings!r}")
        unknown = sorted(set(map(str, settings)) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise SpeculativeConfigError(f"speculative_config has no setting {', '.join(unknown)}; known are: {known}")
        for name in ("method", "num_speculative_tokens"):
            if name not in settings:
                raise SpeculativeConfigError(f"speculative_config needs {name!r}")
        return cls(**settings)

    def __post_init__(self) -> None:
        _check_in("method", self.method, METHODS)
        _check_in("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
        _check_whole("num_speculative_tokens", self.num_speculative_tokens, 0, "0 (no speculation) or positive")
        _check_whole("prompt_lookup_min", self.prompt_lookup_min, 1, "positive")
        _check_whole("prompt_lookup_max", self.prompt_lookup_max, 1, "positive")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise SpeculativeConfigError(
                f"speculative_config: prompt_lookup_min ({self.prompt_lookup_min}) must not exceed prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        if (self.method == "draft_model") != bool(self.model):
            raise SpeculativeConfigError(
                "speculative_config: 'model' must name the draft model"
                if self.method == "draft_model"
                else f"speculative_config: method {self.method!r} has no 'model' of its own: leave it out"
            )

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots beyond the scheduled tokens that a drafter with a cache needs for its own passes."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens


def _check_in(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpeculativeConfigError(f"speculative_config: {name} must be one of {', '.join(choices)}, not {value!r}")


def _check_whole(name: str, value: Any, lowest: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise SpeculativeConfigError(f"speculative_config: {name} must be {meaning}, not {value!r}")
