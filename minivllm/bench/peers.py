"""The engines that run a workload: minivllm and those it is compared with, all behind one call.

| name                 | how it batches                                                   | rows it computes      |
|----------------------|------------------------------------------------------------------|-----------------------|
| minivllm             | continuously: every step holds what there is to compute          | as scheduled          |
| transformers_dynamic | left-padded static batches, cache grows by concatenation         | B (P + O - 1) a batch |
| transformers_static  | the same, cache allocated once for the batch (`StaticCache`)     | the same              |
| vllm                 | continuously                                                     | not counted           |

with B requests in a batch, P its longest prompt, O its longest output. A *row* is one token in one forward pass, which
costs the same whether anybody asked for it or not: padding in front of a short prompt, and tokens that a finished
request goes on producing until the longest one of its batch is done, are rows too.

All engines start from token ids and end with token ids; none tokenizes. All run in inference mode, on the same device,
in the same dtype; transformers with sdpa attention.
"""

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from minivllm.bench.workloads import Workload

if TYPE_CHECKING:
    from minivllm.sampling_params import SamplingParams

TRANSFORMERS_CACHES = ("dynamic", "static")


@dataclass(frozen=True)
class Setup:
    """What all engines are built from; made of plain values, so that a process of its own can be given one.

    Args:
        model_path: a directory in Hugging Face layout.
        load_format: "auto" for the weights of the directory, "dummy" for random ones (each engine draws its own).
        device: "cpu" or "cuda".
        batch_size: requests in a static batch of transformers.
    """

    model_path: Path
    load_format: str
    dtype: str
    device: str
    max_model_len: int
    attention_backend: str
    gpu_memory_utilization: float
    batch_size: int
    num_threads: int | None


@dataclass(frozen=True)
class Run:
    """One run of a workload: wall time, rows computed (None: not known), and the ids that each request got."""

    seconds: float
    num_rows: int | None
    token_ids: list[list[int]]


class Engine(Protocol):
    """Loaded once, run several times."""

    name: str

    def run(self, workload: Workload) -> Run: ...


def make_engine(name: str, setup: Setup) -> Engine:
    """Load an engine by its name in the table above; raises ValueError where it cannot work here."""
    if setup.num_threads is not None:
        import torch

        torch.set_num_threads(setup.num_threads)
    if name == "minivllm":
        return MinivllmEngine(setup)
    if name == "vllm":
        return VllmEngine(setup)
    return TransformersEngine(setup, cache=name.removeprefix("transformers_"))


class MinivllmEngine:
    """Ours. The prefix cache is off: with it, a second run of the same prompts would skip them."""

    name = "minivllm"

    def __init__(self, setup: Setup) -> None:
        from minivllm.llm import LLM

        self.llm = LLM(
            str(setup.model_path),
            load_format=setup.load_format,
            skip_tokenizer_init=True,
            dtype=setup.dtype,
            device=setup.device,
            max_model_len=setup.max_model_len,
            gpu_memory_utilization=setup.gpu_memory_utilization,
            enable_prefix_caching=False,
            attention_backend=setup.attention_backend,
        )
        self._counter = self.llm.engine.worker = _RowCounter(self.llm.engine.worker)

    def run(self, workload: Workload) -> Run:
        params = sampling_params(workload)
        self._counter.num_rows = 0
        start = time.perf_counter()
        outputs = self.llm.generate(workload.prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        refused = next((output.error for output in outputs if output.error), None)
        if refused:
            raise ValueError(f"minivllm refused a request of the workload: {refused}")
        return Run(seconds, self._counter.num_rows, [output.outputs[0].token_ids for output in outputs])


def sampling_params(workload: Workload) -> "list[SamplingParams]":
    """What each request of a workload asks of minivllm: its own number of tokens, whatever they are."""
    from minivllm.sampling_params import SamplingParams

    return [
        SamplingParams(temperature=workload.temperature, ignore_eos=True, max_tokens=length)
        for length in workload.output_lens
    ]


class _RowCounter:
    """Stands between engine and worker and counts the rows that pass; preempted work counts each time."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.num_rows = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        self.num_rows += sum(scheduler_output.num_scheduled_tokens.values())
        return self._worker.execute_model(scheduler_output)

    def reset(self) -> None:
        self._worker.reset()


class TransformersEngine:
    """`generate` of Hugging Face transformers, in left-padded static batches.

    Requests are sorted by output length before they are cut into batches, which wastes least.
    """

    def __init__(self, setup: Setup, cache: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.name = f"transformers_{cache}"
        self._cache = cache
        self._device = torch.device(setup.device)
        self._batch_size = setup.batch_size
        options = {"dtype": getattr(torch, setup.dtype), "attn_implementation": "sdpa"}
        with self._device:
            if setup.load_format == "dummy":
                config = AutoConfig.from_pretrained(setup.model_path)
                self._model = AutoModelForCausalLM.from_config(config, **options)
            else:
                self._model = AutoModelForCausalLM.from_pretrained(setup.model_path, **options)
        self._model.eval()
        # Without an end-of-sequence token nothing ends a batch before its longest output, as with ignore_eos.
        self._model.generation_config.eos_token_id = None

    def run(self, workload: Workload) -> Run:
        order = sorted(range(len(workload.prompts)), key=lambda index: workload.output_lens[index])
        token_ids: list[list[int]] = [[] for _ in order]
        num_rows = 0
        start = time.perf_counter()
        for first in range(0, len(order), self._batch_size):
            batch = order[first : first + self._batch_size]
            longest_output = max(workload.output_lens[index] for index in batch)
            prompts = [workload.prompts[index] for index in batch]
            outputs = self._generate(prompts, longest_output, workload.temperature)
            for index, output in zip(batch, outputs, strict=True):
                token_ids[index] = output[: workload.output_lens[index]]
            num_rows += padded_rows([len(prompt) for prompt in prompts], longest_output)
        return Run(time.perf_counter() - start, num_rows, token_ids)

    def _generate(self, prompts: list[list[int]], num_new_tokens: int, temperature: float) -> list[list[int]]:
        import torch

        width = max(map(len, prompts))
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        output = self._model.generate(
            input_ids=torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self._device),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device),
            min_new_tokens=num_new_tokens,
            max_new_tokens=num_new_tokens,
            pad_token_id=0,
            cache_implementation=self._cache,
            **(sampling or {"do_sample": False}),
        )
        return output[:, width:].tolist()


def padded_rows(prompt_lens: list[int], num_new_tokens: int) -> int:
    """Rows of one left-padded static batch; the last token of an output is never fed back."""
    return len(prompt_lens) * (max(prompt_lens) + num_new_tokens - 1)


def require_vllm() -> None:
    """Raises ValueError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("--peer vllm needs the package vllm, which is not installed here")


class VllmEngine:
    """vLLM, where it is installed."""

    name = "vllm"

    def __init__(self, setup: Setup) -> None:
        require_vllm()
        from vllm import LLM

        self.llm = LLM(
            str(setup.model_path),
            load_format=setup.load_format,
            skip_tokenizer_init=True,
            dtype=setup.dtype,
            max_model_len=setup.max_model_len,
            gpu_memory_utilization=setup.gpu_memory_utilization,
            enable_prefix_caching=False,
        )

    def run(self, workload: Workload) -> Run:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=workload.temperature, ignore_eos=True, max_tokens=length, detokenize=False)
            for length in workload.output_lens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Run(seconds, None, [list(output.outputs[0].token_ids) for output in outputs])
