"""Is it the same text? Greedy tokens of pipelines and tensor-parallel ranks against those of one process, in float32.

    model x (stages, ranks a stage) x way of drafting x feedback x (whole prompts, chunks, a crowd that preempts)

Ranks add up in another order than one process, so prompts are kept whose best logit leads by more than 1e-3 at every
step; then all tokens must be equal.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.batch_queue import PipelineCore
from minivllm.engine.core import EngineCore
from minivllm.engine.request import Request
from minivllm.sampling_params import SamplingParams

MARGIN = 1e-3
MODELS = ("tiny-deepseek", "tiny-qwen3")
SIZES = ((4, 1), (2, 2))
SITUATIONS = ("whole", "chunks", "crowded")
Answers = dict[tuple[int, ...], list[int]]

_TEXTS = (
    "Once upon a time", "The king had three daughters", "The wolf said", "There was an old woman who", "In the forest",
    "A poor miller", "The youngest son went", "Then the fox ran", "One day the princess", "The giant was so angry that",
)  # fmt: skip


def methods_of(model: str) -> list[dict[str, Any]]:
    """Engine arguments for no drafts, and for each way of drafting that the model has."""
    methods: list[dict[str, Any]] = [{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}]
    if model == "tiny-deepseek":
        methods.append({"method": "mtp", "num_speculative_tokens": 3})
    if model == "tiny-qwen3":
        methods.append({"method": "draft_model", "num_speculative_tokens": 3, "model": "tiny-qwen3-draft"})
    return [{}, *({"speculative_config": settings} for settings in methods)]


def reference(model: str, num_prompts: int, num_tokens: int) -> tuple[Answers, dict[tuple[int, ...], float]]:
    """What one process makes of each prompt alone, and by how much its closest choice was led.

    Prompts with a close call are passed over.
    """
    from minivllm.checkpoints import resolve
    from minivllm.tokenizer import load_tokenizer
    from minivllm.worker.executor import make_engine

    path = resolve(model)
    tokenizer = load_tokenizer(path)
    core = make_engine(EngineConfig(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=256), str(path))
    leads: list[float] = []
    sampler = core.worker.sampler

    def watched(logits: Any, metadata: Any) -> Any:
        best_two = logits.topk(2).values
        leads.append(float((best_two[:, 0] - best_two[:, 1]).min()))
        return sampler(logits, metadata)

    core.worker.sampler = watched
    answers: Answers = {}
    margins = {}
    for text in _TEXTS:
        prompt = tuple(tokenizer.encode(text))
        leads.clear()
        ids = ids_of(core, [prompt], num_tokens)[prompt]
        if min(leads) > MARGIN and len(answers) < num_prompts:
            answers[prompt], margins[prompt] = ids, min(leads)
    return answers, margins


def ids_of(core: EngineCore, prompts: Any, num_tokens: int) -> Answers:
    """Greedy continuations of prompts that run together, EOS ignored."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    requests = [Request(str(index), list(prompt), params) for index, prompt in enumerate(prompts)]
    for request in requests:
        core.add_request(request)
    while core.has_unfinished_requests():
        core.step()
    return {tuple(request.prompt_token_ids): request.output_token_ids for request in requests}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m minivllm bench parallel`."""
    parser.set_defaults(run=run)
    parser.add_argument("--num-prompts", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-tokens", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", metavar="OUT", help="write a result file")


def run(arguments: argparse.Namespace) -> int:
    """The whole matrix; exit code 1 if a token differs."""
    from minivllm.bench.environment import describe_code
    from minivllm.bench.result_file import Measurement, ResultFile
    from minivllm.worker.processes import StageProcesses

    package = Path(__file__).resolve().parents[1]
    folders = ("engine", "worker", "sample", "speculate", "attention", "layers", "models", "moe")
    code = describe_code([path for folder in folders for path in sorted((package / folder).glob("*.py"))])
    processes = StageProcesses.start(4)
    measurements = []
    try:
        for model in MODELS:
            answers, margins = reference(model, arguments.num_prompts, arguments.num_tokens)
            for (pp, tp), method, feedback in itertools.product(SIZES, methods_of(model), ("scheduler", "broadcast")):
                for situation in SITUATIONS:
                    start = time.perf_counter()
                    outcome = _run_case(processes, model, pp, tp, method, feedback, situation, answers)
                    name = " ".join(
                        (model, f"pp{pp} tp{tp}", method.get("speculative_config", {}).get("method", "plain"),
                         feedback, situation)
                    )  # fmt: skip
                    print(f"{name}: {outcome}", file=sys.stderr, flush=True)
                    measurements.append(
                        Measurement.from_samples(
                            name,
                            [outcome["num_equal"]],
                            shapes={"prompts": len(answers), "output_tokens": arguments.num_tokens},
                            dtype="float32",
                            unit="equal outputs",
                            warmup=0,
                            extra={
                                **outcome,
                                "least_margin": min(margins.values()),
                                "seconds": round(time.perf_counter() - start, 2),
                            },
                        )
                    )
    finally:
        processes.close()
    is_good = all(measurement.extra["holds"] for measurement in measurements)
    result = ResultFile.record("parallel", "cpu", measurements, code, extra={"all_hold": is_good})
    if arguments.json:
        result.save(arguments.json)
    print("all configurations hold" if is_good else "some configurations FAILED")
    return 0 if is_good else 1


def _run_case(
    processes: Any, model: str, pp: int, tp: int, method: dict, feedback: str, situation: str, answers: Answers
) -> dict[str, Any]:
    from minivllm.checkpoints import resolve
    from minivllm.worker.process_pipeline import ProcessPipeline

    path = str(resolve(model))
    longest = max(len(prompt) + len(ids) for prompt, ids in answers.items()) + 1
    block_size = 16
    of_one = -(-longest // block_size)
    config = EngineConfig(
        path, dtype="float32", device="cpu", block_size=block_size, max_model_len=longest, max_num_seqs=16,
        num_gpu_blocks_override=of_one + 1 if situation == "crowded" else of_one * len(answers),
        long_prefill_token_threshold=3 if situation == "chunks" else 0,
        pipeline_parallel_size=pp, tensor_parallel_size=tp, pp_token_feedback=feedback, **method,
    )  # fmt: skip
    worker = ProcessPipeline(config, path, processes)
    core = PipelineCore(config, worker, worker.num_blocks, worker.max_model_len, worker.block_size)
    preempted = []
    preempt = core.scheduler.preempt
    core.scheduler.preempt = lambda request: (preempted.append(request.request_id), preempt(request))
    ids = ids_of(core, answers, len(next(iter(answers.values()))))
    num_equal = sum(ids[prompt] == expected for prompt, expected in answers.items())
    holds = num_equal == len(answers) and (situation != "crowded" or bool(preempted))
    return {"num_equal": num_equal, "num_outputs": len(answers), "num_preemptions": len(preempted), "holds": holds}
