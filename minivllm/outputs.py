"""What a user gets back; the shapes are vLLM's."""

from dataclasses import dataclass, field

from minivllm.engine.spec_stats import SpecDecodeStats


@dataclass
class Logprob:
    """One token at one position: the raw model's log-probability, its rank (1 = most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


LogprobsAtPosition = dict[int, Logprob]
"""Token id -> Logprob: the chosen token and the most likely ones."""


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' log-probabilities, where logprobs were asked for."""
    logprobs: list[LogprobsAtPosition] | None = None
    finish_reason: str | None = None
    """ "stop" (EOS, stop token, stop string), "length" or "abort"; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it, None for EOS and the other reasons."""


@dataclass
class RequestMetrics:
    """Seconds. With n > 1 the request is as early as its first completion and as late as its last."""

    queue_time: float = 0.0
    """From arrival to the first step that took the request."""
    time_to_first_token: float = 0.0
    """From arrival to the first token."""
    inter_token_latency: float = 0.0
    """Mean time between two tokens of a completion; 0 where there is but one."""
    end_to_end_latency: float = 0.0
    """From arrival to the last token."""


@dataclass
class RequestOutput:
    """A prompt with its completions.

    A request that was refused has no outputs, and `error` says why.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[LogprobsAtPosition | None] | None = None
    """One entry a prompt token; None for the first, which nothing predicts."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    spec_decode: SpecDecodeStats | None = None
    """What became of its drafts, all completions together; None where none was verified."""
    error: str | None = None
