"""What arrives at a simulated engine: when, how long, and what it shares with others.

A `SimulatedRequest` says how many tokens its prompt has and how many it will generate, which a real engine learns
only at the end. Prompts are made of numbers: token i of text t is t * 2^24 + i, so that two requests have a token in
common exactly if they are told to share a text, and the prefix cache finds what it should and nothing else.

Workloads are drawn from a seed with Python's own generator: the same call gives the same requests everywhere.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.engine.request import Request
from minivllm.sampling_params import SamplingParams

TEXT_STRIDE = 2**24
"""Longest text in tokens; token ids of different texts lie at least so far apart."""

Lengths = int | tuple[int, int] | Sequence[int]
"""Tokens of each request: one number for all, a pair (lowest, highest) to draw from evenly, or a list, one each."""


@dataclass(frozen=True)
class SimulatedRequest:
    """A request whose future is known. `arrival` is in seconds, the lengths are in tokens."""

    req_id: str
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0
    """The prompt begins with so many tokens of the shared text `prefix`."""
    prefix: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_shared_tokens <= self.num_prompt_tokens:
            raise ValueError(f"request {self.req_id!r}: num_shared_tokens must be 0 to num_prompt_tokens")
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ValueError(f"request {self.req_id!r}: a prompt and an output have at least one token each")
        if self.arrival < 0 or self.prefix < 0:
            raise ValueError(f"request {self.req_id!r}: arrival and prefix must not be negative")


def engine_request(simulated: SimulatedRequest, own_text: int) -> Request:
    """The request as the scheduler wants it; `own_text` numbers the text of its own, apart from every prefix."""
    shared = range(simulated.prefix * TEXT_STRIDE, simulated.prefix * TEXT_STRIDE + simulated.num_shared_tokens)
    num_own = simulated.num_prompt_tokens - simulated.num_shared_tokens
    own = range(own_text * TEXT_STRIDE, own_text * TEXT_STRIDE + num_own)
    params = SamplingParams(temperature=0.0, max_tokens=simulated.num_output_tokens, seed=0, ignore_eos=True)
    return Request(
        simulated.req_id, [*shared, *own], params, priority=simulated.priority, arrival_time=simulated.arrival
    )


def poisson_arrivals(num_requests: int, rate: float, seed: int = 0) -> list[float]:
    """Moments of arrival, in seconds: gaps are exponential with mean 1 / rate, so nobody knows of anybody.

    Args:
        rate: requests a second; infinity means all at once.
    """
    if not rate > 0:
        raise ValueError(f"rate must be positive requests a second, not {rate}")
    generator, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        now += 0.0 if rate == float("inf") else generator.expovariate(rate)
        arrivals.append(now)
    return arrivals


def make_workload(
    arrivals: Sequence[float],
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    num_shared_tokens: int = 0,
    num_prefixes: int = 1,
    seed: int = 0,
) -> list[SimulatedRequest]:
    """One request an arrival, named "0", "1", … in that order.

    Args:
        arrivals: seconds, given (a trace) or drawn (`poisson_arrivals`).
        prompt_lengths, output_lengths: tokens, the shared ones included.
        num_shared_tokens: tokens of a system prompt in front of each prompt.
        num_prefixes: different system prompts; each request draws one.
    """
    generator = random.Random(seed)
    prompts = _draw_lengths("prompt_lengths", prompt_lengths, len(arrivals), generator)
    outputs = _draw_lengths("output_lengths", output_lengths, len(arrivals), generator)
    prefixes = [generator.randrange(num_prefixes) for _ in arrivals]
    return [
        SimulatedRequest(str(number), arrival, num_prompt, num_output, num_shared_tokens, prefix)
        for number, (arrival, num_prompt, num_output, prefix) in enumerate(
            zip(arrivals, prompts, outputs, prefixes, strict=True)
        )
    ]


def _draw_lengths(name: str, lengths: Lengths, count: int, generator: random.Random) -> list[int]:
    if isinstance(lengths, int):
        return [lengths] * count
    if isinstance(lengths, tuple):
        lowest, highest = lengths
        if not 1 <= lowest <= highest:
            raise ValueError(f"{name} must be drawn between 1 or more and no less than that, not {lengths}")
        return [generator.randint(lowest, highest) for _ in range(count)]
    if len(lengths) != count:
        raise ValueError(f"{name} has {len(lengths)} entries for {count} requests")
    return list(lengths)
