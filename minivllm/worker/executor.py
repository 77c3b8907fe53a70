"""From a config to an engine with its worker: one runner, stages in this process, or a process a rank."""

import os

from minivllm.config import ConfigError, EngineConfig
from minivllm.engine.batch_queue import PipelineCore
from minivllm.engine.core import EngineCore
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.pipeline import InProcessPipeline


def make_engine(config: EngineConfig, model_path: str) -> EngineCore:
    """The engine of a config, its worker ready to run.

    Raises:
        ConfigError: a setting that cannot work here; ValueError of loading and of counting blocks, from any rank.
    """
    if config.world_size == 1:
        worker = ModelRunner(config, model_path)
        make = EngineCore
    else:
        worker, make = _make_pipeline(config, model_path), PipelineCore
    return make(config, worker, worker.num_blocks, worker.max_model_len, worker.block_size)


def _make_pipeline(config: EngineConfig, model_path: str):
    backend = choose_backend(config)
    if backend == "in_process":
        return InProcessPipeline(config, model_path)
    from minivllm.worker.process_pipeline import start_processes, take_torchrun_processes

    return (start_processes if backend == "mp" else take_torchrun_processes)(config, model_path)


def choose_backend(config: EngineConfig) -> str:
    """ "mp", "torchrun" or "in_process".

    Raises:
        ConfigError: torchrun has started another number of processes, or was asked for and is not there.
    """
    backend, world_size = config.distributed_executor_backend, os.environ.get("WORLD_SIZE")
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if backend == "auto":
        backend = "torchrun" if is_torchrun else "mp"
    if backend == "torchrun":
        if not is_torchrun:
            raise ConfigError(
                "distributed_executor_backend='torchrun' needs processes that torchrun has started: run "
                f"`torchrun --nproc-per-node {config.world_size} -m minivllm generate …`, or use 'mp'"
            )
        if int(world_size) != config.world_size:
            raise ConfigError(
                f"torchrun has started {world_size} processes, but pipeline_parallel_size "
                f"({config.pipeline_parallel_size}) x tensor_parallel_size ({config.tensor_parallel_size}) is "
                f"{config.world_size}: start {config.world_size}, or choose sizes whose product is {world_size}"
            )
    return backend
