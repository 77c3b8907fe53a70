"""All that crosses between the scheduler and its workers, and between the engine and the front door.

`SchedulerOutput` goes to the workers, `ModelRunnerOutput` comes back. If a worker needs to know something, it is a
field here; nothing else is shared. A request is sent whole once; after that only what changed travels (new block
ids, counts), so that the cost of a message grows with the work of the step and not with batch x length.

Everything is plain Python: a message can be printed in a notebook, compared in a test and sent to another process.
"""

from dataclasses import dataclass, field

from minivllm.engine.request import Request
from minivllm.engine.spec_stats import SpecDecodeStats
from minivllm.sampling_params import SamplingParams


@dataclass
class NewRequestData:
    """A request that the workers see for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    """All ids that may end this request (EOS included): masked while fewer than min_tokens are out."""
    block_ids: list[int]
    """Its block table: entry i holds tokens i * block_size .. (i + 1) * block_size - 1."""
    num_computed_tokens: int
    """Tokens whose K and V are in the cache already (a prefix hit)."""

    @classmethod
    def of(cls, request: Request, block_ids: list[int]) -> "NewRequestData":
        """What the workers must know of a request that has just been given these blocks."""
        params = request.sampling_params
        eos_token_ids = frozenset() if params.ignore_eos else request.eos_token_ids
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=params,
            stop_token_ids=eos_token_ids | frozenset(params.stop_token_ids),
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
        )


@dataclass
class CachedRequestData:
    """Requests that the workers know: parallel lists, one entry a request, of what changed since last time."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    """Blocks to append to the request's table; for a resumed request, its whole new table."""
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    """Of these, the ones that come back after a preemption: their old block table is void."""
    new_token_ids: list[list[int]] = field(default_factory=list)
    """With several stages, accepted tokens that those who do not sample lack (stage_states.py); else empty."""

    def append(self, request: Request, new_block_ids: list[int]) -> None:
        self.req_ids.append(request.request_id)
        self.new_block_ids.append(new_block_ids)
        self.num_computed_tokens.append(request.num_computed_tokens)

    def remove(self, req_id: str) -> None:
        index = self.req_ids.index(req_id)
        for entries in (self.req_ids, self.new_block_ids, self.num_computed_tokens):
            del entries[index]


@dataclass
class SchedulerOutput:
    """One step: who runs, with how many tokens, in which blocks."""

    step: int = 0
    """Number of the step: several may be on their way, and each one's results are booked under its own."""
    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """For each scheduled request, how many tokens from num_computed_tokens on are computed in this step."""
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    """Drafts among those tokens, for the requests that have any; -1 for a draft that only the worker knows yet."""
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that ended or were aborted since the last step: workers forget them."""
    preempted_req_ids: set[str] = field(default_factory=set)
    """Requests that lost their blocks since the last step: workers keep their tokens, not their tables."""
    num_steps_booked: int = 0
    """With `pp_token_feedback="broadcast"`, steps with tokens whose results were booked before this message was made:
    a stage must have read the last stage's broadcasts of all of these before it applies the message."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def withdraw(self, req_id: str) -> int:
        """Take back what the step was to do for a running request; returns its tokens, for the budget."""
        self.scheduled_cached_reqs.remove(req_id)
        self.scheduled_spec_decode_tokens.pop(req_id, None)
        return self.num_scheduled_tokens.pop(req_id)


@dataclass
class TokenLogprobs:
    """Log-probabilities at one position: the token itself first, then the most likely ones, best first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """1 + the number of tokens more likely than the token itself."""


@dataclass
class ModelRunnerOutput:
    """What a step brought: for each scheduled request the tokens it emitted (none for a prefill chunk)."""

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """One entry for each emitted token, of the requests that asked."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Entries for the prompt tokens 1, 2, … in order, as far as this step computed them."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Proposals for the next step: unverified, never part of the output."""


@dataclass(slots=True)
class EngineCoreOutput:
    """What the front door learns about one request after a step."""

    req_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    new_prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    """None while the request runs; then "stop", "length" or "abort"."""
    stop_reason: int | str | None = None
    """The stop token id that ended the request, if one did."""
    num_cached_tokens: int = 0
    queue_time: float = 0.0
    """Seconds between arrival and the first step that took the request."""
    spec_decode: SpecDecodeStats | None = None
    """What became of its drafts so far; the request's own books, which go on."""

    @classmethod
    def of(cls, request: Request, num_new: int, model_output: ModelRunnerOutput) -> "EngineCoreOutput":
        """What a step brought for a request that kept `num_new` of its tokens."""
        req_id = request.request_id
        return cls(
            req_id,
            model_output.sampled_token_ids.get(req_id, [])[:num_new],
            model_output.logprobs.get(req_id, [])[:num_new],
            model_output.prompt_logprobs.get(req_id, []),
            request.status.value if request.status.is_finished else None,
            request.stop_reason,
            request.num_cached_tokens or 0,
            request.first_scheduled_time - request.arrival_time,
            request.spec_decode,
        )
