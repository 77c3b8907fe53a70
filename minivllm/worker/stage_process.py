"""What the process of a rank does: load its part of the model, then run what the engine sends until it is told to end.

    engine --("load", config, path)--> loads          --("ready", facts) or ("refused", error)--> engine
           --("run", epoch, message)-> runs a step    --("result", epoch, output)--> from the rank that reports
           --("reset",)--------------> forgets all requests
           --("close",)--------------> ends

An exception goes to the engine as ("died", time, traceback), and the process ends with exit code 1. When the engine's
end of the connection closes, whatever became of the engine, the process ends too: nobody is left behind.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from minivllm.config import EngineConfig
from minivllm.triton_mode import settle_triton_mode
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.parallel import (
    DistributedLink,
    ParallelGroups,
    Place,
    default_to_loopback,
    device_of_rank,
    join_world,
)
from minivllm.worker.stage import PipelineStage

EXIT_DIED = 1


def run_started_process(connection: Connection, rank: int, world_size: int, port: int) -> None:
    """The target of a process that the engine has started on its own host; `port` is the store's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine says what follows
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    default_to_loopback()

    def join(device: str) -> None:
        store = torch.distributed.TCPStore("127.0.0.1", port, world_size, is_master=False)
        join_world(device, store=store, rank=rank, world_size=world_size)

    is_well = serve(connection, rank, rank, world_size, join)
    sys.stdout.flush()
    os._exit(0 if is_well else EXIT_DIED)  # torch.distributed may hold threads that wait for ranks which are gone


def serve(
    connection: Connection, rank: int, local_rank: int, local_world_size: int, join: Callable[[str], None]
) -> bool:
    """Do what the engine sends. Returns True when told to end, or when the engine has gone; False after an exception.

    Args:
        connection: to the engine.
        local_rank, local_world_size: among the ranks of this host, which share its GPUs and its memory.
        join: makes this process a rank, given its device; called once.
    """
    stage: PipelineStage | None = None
    place: Place | None = None
    try:
        settle_triton_mode()
        while True:
            kind, *arguments = connection.recv()
            if kind == "run":
                epoch, message = arguments
                output = stage.run(message)
                if output is not None and place.reports:
                    connection.send(("result", epoch, output))
            elif kind == "reset":
                stage.drain()
                stage.reset()
            elif kind == "load":
                config, model_path = arguments
                place = Place(rank, config.pipeline_parallel_size, config.tensor_parallel_size)
                if stage is not None:
                    stage.drain()
                    stage.link.flush()
                stage = None  # its memory is free before the next one counts what there is
                try:
                    device = device_of_rank(config, local_rank, local_world_size)
                    if not torch.distributed.is_initialized():
                        join(device)
                    stage, facts = _load(config, model_path, place, device, local_world_size)
                except ValueError as error:
                    connection.send(("refused", error))
                    return False
                connection.send(("ready", facts))
            elif kind == "close":
                return True
            else:
                raise RuntimeError(f"the engine has sent {kind!r}")
    except (EOFError, ConnectionResetError, BrokenPipeError):
        return True
    except BaseException:
        _report(connection)
        return False


def _load(
    config: EngineConfig, model_path: str, place: Place, device: str, local_world_size: int
) -> tuple[PipelineStage, dict[str, Any]]:
    groups = ParallelGroups(place)
    runner = ModelRunner(
        config,
        model_path,
        (place.stage, place.num_stages),
        device,
        num_sharing=local_world_size if device == "cpu" else 1,
        allocate=False,
        tensor_parallel=groups.tensor,
    )
    runner.allocate_kv_cache(groups.minimum(runner.num_blocks))
    facts = {
        "num_blocks": runner.num_blocks,
        "max_model_len": runner.max_model_len,
        "block_size": runner.block_size,
        "vocab_size": runner.vocab_size,
    }
    return PipelineStage(runner, DistributedLink(place)), facts


def _report(connection: Connection) -> None:
    try:
        connection.send(("died", time.time(), traceback.format_exc()))
    except OSError:
        traceback.print_exc()
