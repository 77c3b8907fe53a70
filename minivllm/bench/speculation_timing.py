"""Engines that differ in nothing but their drafts, run in turns; the clock, the steps and the drafts of each."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.engine.spec_stats import SpecDecodeStats

if TYPE_CHECKING:
    from minivllm.bench.speculation_prompts import GreedyAnswer
    from minivllm.llm import LLM


@dataclass
class Timing:
    """All runs of one engine on one batch."""

    k: int
    seconds: list[float] = field(default_factory=list)
    num_steps: int = 0
    """Of one run; every run is the same."""
    drafts: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    num_different: int = 0
    """Outputs of the last run that are not the answers'."""


class SpeculatingEngine:
    """An engine that knows its k and counts its steps."""

    def __init__(self, llm: "LLM", k: int) -> None:
        self.llm, self.k, self.num_steps = llm, k, 0
        execute = llm.engine.worker.execute_model

        def counting(message: Any) -> Any:
            self.num_steps += bool(message.num_scheduled_tokens)
            return execute(message)

        llm.engine.worker.execute_model = counting

    def run(self, batch: "list[GreedyAnswer]", num_tokens: int, timing: Timing) -> None:
        """Write `num_tokens` tokens for each prompt of the batch; time, steps and drafts go into `timing`."""
        from minivllm.sampling_params import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.num_steps, start = 0, time.perf_counter()
        outputs = self.llm.generate([answer.prompt_token_ids for answer in batch], params, use_tqdm=False)
        timing.seconds.append(time.perf_counter() - start)
        timing.num_steps = self.num_steps
        timing.drafts = SpecDecodeStats.total(output.spec_decode for output in outputs if output.spec_decode)
        pairs = zip(outputs, batch, strict=True)
        timing.num_different = sum(output.outputs[0].token_ids != answer.token_ids for output, answer in pairs)


def time_in_turns(
    engines: list[SpeculatingEngine], batch: "list[GreedyAnswer]", num_tokens: int, warmup: int, repeats: int
) -> list[Timing]:
    """Time the engines in alternation, after `warmup` untimed runs of each."""
    timings = [Timing(engine.k) for engine in engines]
    for turn in range(warmup + repeats):
        for engine, timing in zip(engines, timings, strict=True):
            if turn == warmup:
                timing.seconds.clear()
            engine.run(batch, num_tokens, timing)
    return timings
