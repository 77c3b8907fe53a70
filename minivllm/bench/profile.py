"""Where a step's time goes, on the host and on the device.

The host's time is taken around the engine's own boxes in an undisturbed run. On a GPU a forward pass is only launched
there, and the waiting happens where the sampled ids are fetched, in `sample`: a step whose `sample` takes long is bound
by the device, one whose `sample` takes nothing by the host. The device's time is taken by PyTorch's profiler from some
steps in the middle of a second run.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minivllm.bench.peers import sampling_params
from minivllm.bench.workloads import Workload

if TYPE_CHECKING:
    from minivllm.llm import LLM

_NUM_PROFILED_STEPS = 30
_NUM_KERNELS = 15


def profile(llm: "LLM", workload: Workload) -> dict[str, Any]:
    """Milliseconds a step for each box of the host, and on a GPU for each of the costliest kernels.

    Args:
        llm: as the benchmark made it; its prefix cache is off.
        workload: run twice.
    """
    return {"host_ms_per_step": _host(llm, workload), "device": _device(llm, workload)}


def _host(llm: "LLM", workload: Workload) -> dict[str, float]:
    import minivllm.worker.model_runner as room

    scheduler, runner = llm.engine.scheduler, llm.model_runner
    boxes = {
        "schedule": (scheduler, "schedule"),
        "update_states": (runner.batch, "update_states"),
        "prepare_inputs": (room, "prepare_inputs"),
        "forward": (runner, "forward"),
        "sample": (runner, "sample"),
        "update_from_output": (scheduler, "update_from_output"),
        "step": (llm.engine, "step"),
    }
    spent: dict[str, list[float]] = defaultdict(list)
    originals = {name: getattr(owner, attribute) for name, (owner, attribute) in boxes.items()}
    for name, (owner, attribute) in boxes.items():
        setattr(owner, attribute, _timed(originals[name], spent[name]))
    try:
        start = time.perf_counter()
        llm.generate(workload.prompts, sampling_params(workload), use_tqdm=False)
        total = time.perf_counter() - start
    finally:
        for name, (owner, attribute) in boxes.items():
            setattr(owner, attribute, originals[name])
    num_steps = len(spent["step"])
    result = {name: 1e3 * sum(times) / num_steps for name, times in spent.items()}
    result["front_door"] = 1e3 * (total - sum(spent["step"])) / num_steps
    result["median_step"] = 1e3 * statistics.median(spent["step"])
    result["num_steps"] = num_steps
    return {name: round(value, 4) for name, value in result.items()}


def _timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        times.append(time.perf_counter() - start)
        return result

    return timed


def _device(llm: "LLM", workload: Workload) -> dict[str, Any] | None:
    """None on a CPU, where the host's boxes say it all."""
    import torch
    from torch.profiler import ProfilerActivity

    if llm.model_runner.device.type != "cuda":
        return None
    steps: list[float] = []
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
    first = max(workload.output_lens) // 4
    step = llm.engine.step

    def watched() -> Any:
        if len(steps) == first:
            torch.cuda.synchronize()
            profiler.start()
        if len(steps) == first + _NUM_PROFILED_STEPS:
            torch.cuda.synchronize()
            profiler.stop()
        steps.append(0.0)
        return step()

    llm.engine.step = watched
    try:
        llm.generate(workload.prompts, sampling_params(workload), use_tqdm=False)
    finally:
        llm.engine.step = step
    num_steps = min(_NUM_PROFILED_STEPS, len(steps) - first)
    kernels = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return {
        "steps": [first, first + num_steps],
        "busy_ms_per_step": round(sum(e.self_device_time_total for e in kernels) / num_steps / 1e3, 4),
        "kernels": [
            {
                "name": event.key[:120],
                "ms_per_step": round(event.self_device_time_total / num_steps / 1e3, 4),
                "launches_per_step": round(event.count / num_steps, 2),
            }
            for event in kernels[:_NUM_KERNELS]
        ],
    }
