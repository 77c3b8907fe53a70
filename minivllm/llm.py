"""The front door: text in, text out.

    LLM.generate -> tokenizer -> Request -> EngineCore.step, again and again -> detokenizer -> RequestOutput

Everything runs in the caller's thread: a step is taken whenever somebody waits for a result, and each step serves all
requests in the engine, so a stream and a `generate` can be under way at the same time.
"""

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from minivllm.checkpoints import resolve
from minivllm.config import EngineConfig
from minivllm.engine.batch_queue import PipelineCore
from minivllm.engine.request import Request
from minivllm.models.registry import load_config
from minivllm.output_processor import CompletionTracker, RequestTracker
from minivllm.outputs import RequestOutput
from minivllm.prompts import (
    Conversation,
    Prompt,
    PromptReader,
    as_prompt_list,
    check_cache_salt,
    check_priority,
    find_eos_token_ids,
    one_for_each,
)
from minivllm.sampling_params import SamplingParams
from minivllm.stream import Stream
from minivllm.tokenizer import load_tokenizer
from minivllm.triton_mode import settle_triton_mode
from minivllm.worker.executor import make_engine


class LLM:
    """An engine with one model.

    Args:
        model: a name from `python -m minivllm models`, a directory in Hugging Face format, or a Hub id.
        **engine_args: fields of `EngineConfig`.

    Raises:
        ValueError: a setting that cannot work, an unknown model, a checkpoint that does not fit; the message names
            the culprit and the remedy.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        unknown = set(engine_args) - set(EngineConfig.__dataclass_fields__)
        if unknown:
            known = ", ".join(name for name, f in EngineConfig.__dataclass_fields__.items() if f.init)
            raise ValueError(f"unknown engine argument {', '.join(sorted(unknown))}; known are: {known}")
        self.config = EngineConfig(model=model, **engine_args)
        settle_triton_mode()  # transformers may import Triton on its own account
        path = resolve(model)
        load_config(path)  # a directory that is no model is told so before anything else is missed in it
        self.tokenizer = None if self.config.skip_tokenizer_init else load_tokenizer(path)
        self.engine = make_engine(self.config, str(path))
        runner = self.model_runner = self.engine.worker
        self.max_model_len = runner.max_model_len
        self._prompt_reader = PromptReader(
            self.tokenizer, runner.vocab_size, self.max_model_len, runner.num_blocks * runner.block_size
        )
        self.eos_token_ids = find_eos_token_ids(path, runner.hf_config, self.tokenizer)
        self._seeds = random.Random(self.config.seed)
        self._request_numbers = itertools.count()
        self._trackers: dict[str, RequestTracker] = {}
        self._completions: dict[str, CompletionTracker] = {}
        self._num_ended = 0  # completions, so that a waiting call looks at its own only when some have ended
        self._lock = threading.RLock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results come in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of those.
            sampling_params: one for all prompts or one for each; None is `SamplingParams()`.
            use_tqdm: show progress and tokens per second on stderr.
            priority: the lower, the sooner served; for `scheduling_policy="priority"`. One for all or one for each.
            cache_salt: prompts share cached beginnings only with prompts of the same salt. One for all or one each.

        Raises:
            ValueError: every prompt was refused. Where only some are, the others are completed and the refused ones
                carry the reason in `RequestOutput.error`.
        """
        return self._generate(as_prompt_list(prompts), sampling_params, use_tqdm, priority, cache_salt)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (or several), put into words by the model's own chat template.

        Args:
            messages: dicts with "role" (system, user, assistant) and "content". The rest is as in `generate`.
        """
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations = [messages] if is_one else list(messages)
        return self._generate(conversations, sampling_params, use_tqdm, priority, cache_salt)

    def _generate(
        self,
        prompt_list: list[Prompt | Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int | Sequence[int],
        cache_salt: str | Sequence[str | None] | None,
    ) -> list[RequestOutput]:
        num_prompts = len(prompt_list)
        each = zip(
            prompt_list,
            one_for_each(
                "sampling_params", SamplingParams() if sampling_params is None else sampling_params, num_prompts
            ),
            one_for_each("priority values", priority, num_prompts),
            one_for_each("cache_salt values", cache_salt, num_prompts),
            strict=True,
        )
        trackers: list[RequestTracker | RequestOutput] = []
        for prompt, *arguments in each:
            try:
                trackers.append(self._add_request(prompt, *arguments))
            except ValueError as error:
                text = prompt if isinstance(prompt, str) else None
                trackers.append(RequestOutput(self._next_id(), text, [], finished=True, error=str(error)))
        refused = [output for output in trackers if isinstance(output, RequestOutput)]
        if refused and len(refused) == len(trackers):
            raise ValueError("; ".join(dict.fromkeys(output.error for output in refused)))
        accepted = [tracker for tracker in trackers if isinstance(tracker, RequestTracker)]
        try:
            self._run(accepted, use_tqdm)
        finally:
            for tracker in accepted:
                self.abort(tracker.request_id)
                del self._trackers[tracker.request_id]
        return [item if isinstance(item, RequestOutput) else item.output() for item in trackers]

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Stream:
        """Complete one prompt, or answer one conversation, piece by piece; see `Stream`."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"a stream shows one completion, not n={params.n}: use generate")
        return Stream(self, self._add_request(prompt, params, priority, cache_salt))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached beginnings; refused (False) while requests are running, and then nothing changes."""
        with self._lock:
            return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """End the processes of a pipeline's stages. Nothing to do where there are none; done at exit in any case."""
        if isinstance(self.engine, PipelineCore):
            self.engine.worker.close()

    def abort(self, request_id: str) -> None:
        """End a request at once; what it has produced so far stays. Unknown and finished ids are ignored."""
        with self._lock:
            tracker = self._trackers.get(request_id)
            if tracker is not None:
                req_ids = tracker.unfinished_req_ids()
                self.engine.abort_requests(req_ids)
                for req_id in req_ids:
                    self._completions.pop(req_id).abort()
                self._num_ended += len(req_ids)

    def step(self) -> None:
        """Take one step of the engine and hand the new tokens to the requests they belong to.

        A step that is cut short (Ctrl-C, out of memory) aborts every request: the engine starts afresh.
        """
        with self._lock:
            try:
                core_outputs = self.engine.step()
            except BaseException:
                for completion in self._completions.values():
                    completion.abort()
                self._num_ended += len(self._completions)
                self._completions.clear()
                raise
            now = time.monotonic()
            for core_output in core_outputs:
                completion = self._completions[core_output.req_id]
                if completion.update(core_output, now):
                    self.engine.abort_requests([core_output.req_id])
                if completion.is_finished:
                    del self._completions[core_output.req_id]
                    self._num_ended += 1

    def _run(self, trackers: list[RequestTracker], use_tqdm: bool) -> None:
        num_prompt_tokens = sum(len(tracker.prompt_token_ids) for tracker in trackers)
        start = time.perf_counter()
        pending, num_ended = trackers, -1
        with tqdm(total=len(trackers), desc="Requests", unit="req", disable=not use_tqdm) as bar:
            while pending:
                self.step()
                if self._num_ended == num_ended:
                    continue
                num_ended = self._num_ended
                still_pending = [tracker for tracker in pending if not tracker.is_finished]
                elapsed = time.perf_counter() - start
                num_outputs = sum(tracker.num_output_tokens for tracker in trackers)
                bar.set_postfix_str(
                    f"{num_prompt_tokens / elapsed:.0f} tok/s in, {num_outputs / elapsed:.0f} tok/s out",
                    refresh=False,
                )
                bar.update(len(pending) - len(still_pending))
                pending = still_pending

    def _add_request(
        self, prompt: Prompt | Conversation, params: SamplingParams, priority: int, cache_salt: str | None
    ) -> RequestTracker:
        """Check a request, and queue one engine request for each of its completions."""
        text, token_ids = self._prompt_reader.read(prompt, params)
        check_priority(priority, self.config.scheduling_policy)
        check_cache_salt(cache_salt)
        request_id = self._next_id()
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        max_tokens = params.max_tokens or self.max_model_len - len(token_ids)
        completions, requests = [], []
        for index in range(params.n):
            own_params = dataclasses.replace(params, max_tokens=max_tokens, seed=_wrap_int64(seed + index))
            req_id = request_id if params.n == 1 else f"{request_id}-{index}"
            completions.append(CompletionTracker(req_id, index, token_ids, own_params, self.tokenizer))
            requests.append(
                Request(req_id, token_ids, own_params, self.eos_token_ids, priority, cache_salt, time.monotonic())
            )
        tracker = RequestTracker(request_id, text, token_ids, completions)
        with self._lock:
            for request, completion in zip(requests, completions, strict=True):
                self.engine.add_request(request)
                self._completions[request.request_id] = completion
            self._trackers[request_id] = tracker
        return tracker

    def _next_id(self) -> str:
        return str(next(self._request_numbers))


def _wrap_int64(value: int) -> int:
    """Seeds wrap around like the 64-bit numbers they are."""
    return (value + 2**63) % 2**64 - 2**63
