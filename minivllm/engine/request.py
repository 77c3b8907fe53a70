"""A request: its tokens, its counters, its status.

There are no phases. At any moment a request is described by how many of its tokens have their K and V in the
cache, and how many tokens it has:

```
    0          computed      num_tokens      num_tokens_with_spec
    |--- in cache ---|-- to compute --|--- drafts to verify ---|
```

A fresh prompt has computed = 0; a decode has computed = num_tokens - 1; a preempted request has computed = 0 again
and recomputes prompt and outputs alike.

Where the scheduler runs ahead of the worker, *placeholders* stand for the tokens that steps on their way will bring, as
if every draft were accepted:

```
    0       num_tokens       + placeholders       + drafts
    |--- known ---|--- on their way ---|--- to verify ---|
    |------------ computed ----------|
```
"""

import enum
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.engine.spec_stats import SpecDecodeStats
from minivllm.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    def __init__(self, reason: str) -> None:
        self.is_finished = reason in ("stop", "length", "abort")


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine; compared by identity.

    `sampling_params.max_tokens` and `.seed` are settled before a request is made: the engine never sees None.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = 0.0

    status: RequestStatus = RequestStatus.WAITING
    all_token_ids: list[int] = field(init=False)
    """Prompt and accepted outputs. Drafts never enter it."""
    num_computed_tokens: int = 0
    spec_token_ids: list[int] = field(default_factory=list)
    """Drafts that wait for verification in the next step of this request."""
    spec_decode: SpecDecodeStats = field(default_factory=SpecDecodeStats, repr=False)
    """What became of its drafts so far."""
    num_output_placeholders: int = 0
    """Tokens that steps in flight may bring at most; 0 where the scheduler waits for every step's results."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache had when the request was first admitted; None before that."""
    num_preemptions: int = 0
    stop_reason: int | str | None = None
    first_scheduled_time: float | None = None
    arrival_index: int = 0
    """How many requests the scheduler had been given before this one."""

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)
        self._block_hashes: list[bytes] = []

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[len(self.prompt_token_ids) :]

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether only the newest token (known, or a placeholder for it) and drafts are left to compute."""
        return len(self.all_token_ids) + self.num_output_placeholders - self.num_computed_tokens == 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling_params.prompt_logprobs is not None

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Hash of the full block `index`, chained to the one before it.

        A block's K and V depend on every token before it, so its name is H(parent's hash, its own token ids), and
        the cache salt enters with the first block. Hashes are made once and kept: a request's tokens only grow.
        """
        hashes = self._block_hashes
        while len(hashes) <= index:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else f"salt:{self.cache_salt!r}".encode()
            token_ids = array("q", self.all_token_ids[start : start + block_size])
            hashes.append(hashlib.sha256(parent + token_ids.tobytes()).digest())
        return hashes[index]

    def block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` full blocks."""
        return [self.block_hash(index, block_size) for index in range(num_blocks)]

    def append_output_tokens(self, token_ids: Sequence[int], max_model_len: int) -> int:
        """Append accepted tokens one by one; what follows a stop is dropped. Returns how many were kept."""
        for count, token_id in enumerate(token_ids, start=1):
            if self.append_output_token(token_id, max_model_len):
                return count
        return len(token_ids)

    def append_output_token(self, token_id: int, max_model_len: int) -> bool:
        """Append an accepted token and settle whether the request ends with it; True if so."""
        self.all_token_ids.append(token_id)
        params, num_tokens = self.sampling_params, len(self.all_token_ids)
        num_output_tokens = num_tokens - len(self.prompt_token_ids)
        if num_output_tokens >= params.min_tokens:
            if token_id in params.stop_token_ids:
                self.status, self.stop_reason = RequestStatus.FINISHED_STOPPED, token_id
                return True
            if token_id in self.eos_token_ids and not params.ignore_eos:
                self.status = RequestStatus.FINISHED_STOPPED
                return True
        if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
            self.status = RequestStatus.FINISHED_LENGTH
            return True
        return False
