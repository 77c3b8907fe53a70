"""Requests, a worker without a model, and a loop around the engine: shared by the tests of engine and worker."""

import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from minivllm.engine.request import Request, RequestStatus
from minivllm.engine.scheduler import Scheduler
from minivllm.sampling_params import SamplingParams


def make_request(
    request_id: str,
    prompt: int | list[int],
    eos: tuple[int, ...] = (),
    salt=None,
    arrival_time=0.0,
    priority=0,
    **params,
) -> Request:
    """A greedy request for 16 tokens unless told otherwise; a prompt given as a number n is [1, 2, .., n]."""
    prompt = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    params = {"temperature": 0.0, "max_tokens": 16, "seed": 0, **params}
    params = SamplingParams(**params)
    return Request(request_id, prompt, params, frozenset(eos), priority, salt, arrival_time)


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    enable_prefix_caching: bool = True,
    drop_last_hit_block: bool = False,
    **options,
) -> Scheduler:
    manager = KVCacheManager(num_blocks, block_size, max_model_len, enable_prefix_caching, drop_last_hit_block)
    return Scheduler(manager, max_model_len, max_num_seqs, max_num_batched_tokens, **options)


def run_step(
    scheduler: Scheduler, sampled: dict[str, list[int]], drafts: dict[str, list[int]] | None = None
) -> SchedulerOutput:
    """One step whose results the test dictates."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, ModelRunnerOutput(sampled, draft_token_ids=drafts or {}))
    scheduler.kv_cache_manager.check_invariants()
    return output


VOCAB_SIZE = 23


def next_token(tokens: list[int]) -> int:
    """What the fake worker says after these tokens."""
    return zlib.crc32(array("q", tokens)) % VOCAB_SIZE


def output_alone(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """What `next_token` gives a request that has the engine to itself, and how it ends; the stop rules once more."""
    params, output = request.sampling_params, []
    while True:
        token = next_token(request.prompt_token_ids + output)
        output.append(token)
        is_eos = token in request.eos_token_ids and not params.ignore_eos
        if len(output) >= params.min_tokens and (is_eos or token in params.stop_token_ids):
            return output, "stop"
        if len(output) == params.max_tokens or request.num_prompt_tokens + len(output) == max_model_len:
            return output, "length"


class FakeWorker:
    """A worker without a model, which knows what a real one does: messages, and whatever its cache holds.

    A slot of its cache holds the digest of all tokens up to its position, as K and V do. Before it names the next
    token it reads the request's whole context through the block table and checks that every slot holds what was
    meant: a wrong table, a block shared or reused too early, or a token that was never computed fails at once.

    Args:
        num_drafts: drafts proposed for each request after each token; `draft(tokens)` names the next one.
        runs_behind: messages are made before the results of the last ones are known. Drafts are then its own, and
            positions count every draft as accepted: it corrects them by what it knows itself.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_drafts: int = 0,
        draft: Callable[[list[int]], int] = next_token,
        runs_behind: bool = False,
    ) -> None:
        self.block_size = block_size
        self.num_drafts, self.draft, self.runs_behind = num_drafts, draft, runs_behind
        self.cache: list[int | None] = [None] * (num_blocks * block_size)
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.proposed: dict[str, list[int]] = {}
        self.messages: list[SchedulerOutput] = []

    def execute_model(self, message: SchedulerOutput) -> ModelRunnerOutput:
        self.messages.append(message)
        computed = self._update(message)
        rows = []
        for req_id, count in message.num_scheduled_tokens.items():
            drafts = message.scheduled_spec_decode_tokens.get(req_id, [])
            first, known = computed[req_id], self.tokens[req_id]
            if self.runs_behind:
                assert set(drafts) <= {-1}, "a draft that the host cannot know"
                first = min(first, len(known) - 1)
                drafts = self.proposed[req_id][: len(drafts)] if drafts else []
            assert -1 not in drafts, f"{req_id}: a placeholder reaches the model"
            tokens, end = known + drafts, first + count
            assert end <= len(tokens), f"{req_id} is to compute tokens that do not exist"
            digests, slots = _digests(tokens[:end]), self._slots(req_id, end)
            for position in range(first, end):
                self.cache[slots[position]] = digests[position]
            rows.append((req_id, tokens, end, digests, slots))
        output = ModelRunnerOutput()
        for req_id, tokens, end, digests, slots in rows:
            for position, (slot, digest) in enumerate(zip(slots, digests, strict=True)):
                assert self.cache[slot] == digest, f"{req_id}: slot of token {position} holds other K, V"
            self._emit(req_id, tokens, end, output)
        return output

    def reset(self) -> None:
        self.tokens, self.tables = {}, {}

    def _update(self, message: SchedulerOutput) -> dict[str, int]:
        for req_id in message.finished_req_ids:
            for mine in (self.tokens, self.tables, self.proposed):
                mine.pop(req_id, None)
        for req_id in message.preempted_req_ids:
            del self.tables[req_id]
        computed = {}
        for new in message.scheduled_new_reqs:
            assert new.req_id not in self.tokens, f"{new.req_id} is new but known"
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.tables[new.req_id] = list(new.block_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = message.scheduled_cached_reqs
        for req_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            assert (req_id in cached.resumed_req_ids) == (req_id not in self.tables)
            self.tables.setdefault(req_id, []).extend(block_ids)
            computed[req_id] = num_computed
        assert set(computed) == set(message.num_scheduled_tokens)
        return computed

    def _emit(self, req_id: str, tokens: list[int], end: int, output: ModelRunnerOutput) -> None:
        """Drafts are accepted up to the first mismatch; then comes the token that should have stood there."""
        known = self.tokens[req_id]
        if end < len(known):
            return
        emitted = [next_token(known)]
        while len(known) + len(emitted) <= end and tokens[len(known) + len(emitted) - 1] == emitted[-1]:
            emitted.append(next_token(known + emitted))
        known += emitted
        output.sampled_token_ids[req_id] = emitted
        drafts: list[int] = []
        for _ in range(self.num_drafts):
            drafts.append(self.draft(known + drafts))
        if self.num_drafts:
            self.proposed[req_id] = output.draft_token_ids[req_id] = drafts

    def _slots(self, req_id: str, count: int) -> list[int]:
        """Slots of a request's first `count` tokens."""
        size, table = self.block_size, self.tables[req_id]
        return [table[position // size] * size + position % size for position in range(count)]


def _digests(tokens: list[int]) -> list[int]:
    """For each position, a digest of all tokens up to it."""
    digests, digest = [], 0
    for token in tokens:
        digest = zlib.crc32(token.to_bytes(4, "little"), digest)
        digests.append(digest)
    return digests


@dataclass
class Finished:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0


def fake_engine(num_blocks: int, max_model_len: int, num_drafts: int = 0, draft=next_token, **settings) -> EngineCore:
    config = EngineConfig("fake", **{"max_num_seqs": 8, **settings})
    worker = FakeWorker(num_blocks, config.resolved_block_size(), num_drafts, draft)
    return EngineCore(config, worker, num_blocks, max_model_len)


def step_checked(core: EngineCore, results: dict[str, Finished]) -> None:
    """One step, its outputs booked in `results`, and what must hold after every step."""
    scheduler = core.scheduler
    for output in core.step():
        result = results.setdefault(output.req_id, Finished())
        assert result.finish_reason is None, f"{output.req_id} got something after its end"
        result.token_ids += output.new_token_ids
        result.logprobs += output.new_logprobs
        result.prompt_logprobs += output.new_prompt_logprobs
        result.finish_reason, result.stop_reason = output.finish_reason, output.stop_reason
        result.num_cached_tokens = output.num_cached_tokens
    scheduler.kv_cache_manager.check_invariants()
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
    assert all(request.status is RequestStatus.RUNNING for request in scheduler.running)
    assert all(not scheduler.kv_cache_manager.block_ids(request) for request in scheduler.waiting)


def run_to_end(core: EngineCore, requests: list[Request], after_step=lambda: None) -> dict[str, Finished]:
    """Add the requests, step until they are done, check that nothing is left behind."""
    results: dict[str, Finished] = {}
    for request in requests:
        core.add_request(request)
    while core.has_unfinished_requests():
        step_checked(core, results)
        after_step()
    assert core.scheduler.kv_cache_manager.usage == 0.0
    return results
