"""Peak memory of an engine, measured in a process of its own.

The resident set of a process only ever grows in the books (its high-water mark is never reset), and several engines in
one process share its libraries. So each engine gets a fresh process that loads it, runs the workload once, and reports:

    on a CPU   the high-water mark of the whole process: interpreter, libraries, weights, cache, activations
    on a GPU   the most that PyTorch's allocator held, without the CUDA context; minivllm allocates its cache
               for as many tokens as `gpu_memory_utilization` has room for, so this is a choice, not a need
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from minivllm.bench.peers import Setup, make_engine
from minivllm.bench.workloads import Workload


def peak_memory(engine_name: str, setup: Setup, workload: Workload) -> int | None:
    """Bytes, or None where the engine computes in yet another process (vLLM).

    Raises:
        ValueError: the engine cannot work here, or its process died.
    """
    if engine_name == "vllm":
        return None
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_run_and_measure, engine_name, setup, workload).result()
        except BrokenProcessPool:
            raise ValueError(f"the process that measured {engine_name}'s memory died: not enough memory?") from None


def _run_and_measure(engine_name: str, setup: Setup, workload: Workload) -> int:
    import torch

    make_engine(engine_name, setup).run(workload)
    if setup.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return process_peak()


def process_peak() -> int:
    """High-water mark of this process's resident set in bytes.

    Linux hands `ru_maxrss` on to a started program, so a small child of a large parent looks large: there, the mark of
    the address space is read instead.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
