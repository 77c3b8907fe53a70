"""From the engine's token ids to what users read: text, log-probabilities, times.

Stop strings live here, since the engine knows no text: on a match the front door aborts the request in the engine
and drops what came after. The text ends before the match; token_ids and logprobs end with the token that completes
it.
"""

import time
from typing import TYPE_CHECKING

from minivllm.engine.messages import EngineCoreOutput, TokenLogprobs
from minivllm.engine.spec_stats import SpecDecodeStats
from minivllm.outputs import CompletionOutput, Logprob, LogprobsAtPosition, RequestMetrics, RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.stop_strings import StopStringChecker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CompletionTracker:
    """One completion as it grows."""

    def __init__(
        self,
        req_id: str,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: "PreTrainedTokenizerBase | None",
    ) -> None:
        self.req_id = req_id
        self.params = params
        self.output = CompletionOutput(index, "", [], logprobs=None if params.logprobs is None else [])
        if params.logprobs is not None:
            self.output.cumulative_logprob = 0.0
        self.prompt_logprobs: list[LogprobsAtPosition | None] = [None]
        self.num_cached_tokens = 0
        self.queue_time = 0.0
        self.spec_decode: SpecDecodeStats | None = None
        self.token_times: tuple[float, float] | None = None
        """When the first and the last token arrived."""
        self._tokenizer = tokenizer
        self._stop_strings = StopStringChecker(params.stop)
        self._detokenizer = None
        if tokenizer is not None:
            from minivllm.tokenizer import IncrementalDetokenizer

            self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    def update(self, core_output: EngineCoreOutput, now: float | None = None) -> bool:
        """Take in what a step brought; True if a stop string ended the text and the engine must be told.

        Args:
            now: when the step ended, on the monotonic clock; None asks the clock.
        """
        now = time.monotonic() if now is None else now
        self.num_cached_tokens = core_output.num_cached_tokens
        self.queue_time = core_output.queue_time
        self.spec_decode = core_output.spec_decode
        if core_output.new_prompt_logprobs:
            self.prompt_logprobs += [self._decode_logprobs(entry) for entry in core_output.new_prompt_logprobs]
        num_new = len(core_output.new_token_ids)
        if num_new:
            self.token_times = (self.token_times[0] if self.token_times else now, now)
        for position, token_id in enumerate(core_output.new_token_ids):
            self.output.token_ids.append(token_id)
            if core_output.new_logprobs:
                entry = core_output.new_logprobs[position]
                self.output.logprobs.append(self._decode_logprobs(entry))
                self.output.cumulative_logprob += entry.logprobs[0]
            if self._detokenizer is None:
                continue
            is_stop_token = core_output.finish_reason == "stop" and position == num_new - 1
            if not is_stop_token and self._append_text(self._detokenizer.append(token_id)):
                return True
        if core_output.finish_reason is not None:
            return self._finish(core_output)
        return False

    def abort(self) -> None:
        """The request was ended from outside; what it has so far stays."""
        if not self.is_finished:
            self.output.finish_reason = "abort"

    def visible_text(self) -> str:
        """What a stream may show: no suffix that could still turn out to begin a stop string."""
        text = self.output.text
        return text if self.is_finished else text[: len(text) - self._stop_strings.num_held_back(text)]

    def _append_text(self, new_text: str) -> bool:
        self.output.text += new_text
        if not new_text or len(self.output.token_ids) < self.params.min_tokens:
            return False
        match = self._stop_strings.find(self.output.text, len(new_text))
        if match is None:
            return False
        begin, self.output.stop_reason = match
        self.output.text = self.output.text[:begin]
        self.output.finish_reason = "stop"
        return True

    def _finish(self, core_output: EngineCoreOutput) -> bool:
        """The engine has ended the request itself; bytes of an unfinished character come out as U+FFFD."""
        if self._detokenizer is not None:
            self._append_text(self._detokenizer.flush())
        if not self.is_finished:
            self.output.finish_reason = core_output.finish_reason
            self.output.stop_reason = core_output.stop_reason
        return False

    def _decode_logprobs(self, entry: TokenLogprobs) -> LogprobsAtPosition:
        """Token id -> Logprob. The first entry is the token itself, the others rank 1, 2, …"""
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        result: LogprobsAtPosition = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
            if token_id not in result:
                text = None if self._tokenizer is None else self._tokenizer.decode([token_id])
                result[token_id] = Logprob(logprob, rank, text)
        return result


class RequestTracker:
    """A user's request: its prompt and its n completions, each a request of its own in the engine."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], completions: list[CompletionTracker]
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.completions = completions
        self.arrival_time = time.monotonic()

    @property
    def is_finished(self) -> bool:
        return all(completion.is_finished for completion in self.completions)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(completion.output.token_ids) for completion in self.completions)

    def unfinished_req_ids(self) -> list[str]:
        return [completion.req_id for completion in self.completions if not completion.is_finished]

    def output(self) -> RequestOutput:
        """The request as it stands now."""
        first = self.completions[0]
        wants_prompt_logprobs = first.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion.output for completion in self.completions],
            finished=self.is_finished,
            prompt_logprobs=first.prompt_logprobs if wants_prompt_logprobs else None,
            num_cached_tokens=first.num_cached_tokens,
            metrics=self._metrics(),
            spec_decode=self._spec_decode(),
        )

    def _spec_decode(self) -> SpecDecodeStats | None:
        total = SpecDecodeStats.total(part.spec_decode for part in self.completions if part.spec_decode)
        return total if total.num_verifications else None

    def _metrics(self) -> RequestMetrics:
        timed = [completion for completion in self.completions if completion.token_times]
        if not timed:
            return RequestMetrics()
        intervals = sum(len(completion.output.token_ids) - 1 for completion in timed)
        spent = sum(completion.token_times[1] - completion.token_times[0] for completion in timed)
        return RequestMetrics(
            queue_time=min(completion.queue_time for completion in timed),
            time_to_first_token=min(completion.token_times[0] for completion in timed) - self.arrival_time,
            inter_token_latency=spent / intervals if intervals else 0.0,
            end_to_end_latency=max(completion.token_times[1] for completion in timed) - self.arrival_time,
        )
