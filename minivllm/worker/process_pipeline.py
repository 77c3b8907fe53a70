"""A pipeline with a process a rank: the engine's messages go to all, the result comes from the last stage.

engine --message--> every rank            (a pipe or a socket each; plain Python objects)
       stage --hidden--> stage            (torch.distributed, parallel.py)
       <--ModelRunnerOutput-- the first rank of the last stage
"""

import os

from minivllm.config import EngineConfig
from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.models.registry import load_config
from minivllm.worker.parallel import Place, device_of_rank
from minivllm.worker.processes import StageProcesses


class ProcessPipeline:
    """A `PipelineWorker` (engine/batch_queue.py) of processes. They may load one model after another.

    Args:
        config: the engine's settings; its world size is the number of processes.
        model_path: directory with the checkpoint, on every host.
        processes: who does the work.

    Attributes:
        num_blocks, max_model_len: the least that any rank has room for.

    Raises:
        ValueError: a setting or a checkpoint that a rank refuses.
        StageDied: a rank has died while it loaded.
    """

    def __init__(self, config: EngineConfig, model_path: str, processes: StageProcesses) -> None:
        self.num_stages = config.pipeline_parallel_size
        self.processes = processes
        num_ranks = len(processes.connections)
        processes.places = [
            Place(rank, config.pipeline_parallel_size, config.tensor_parallel_size) for rank in range(num_ranks)
        ]
        self._epoch = 0
        try:
            processes.send_to_all(("load", config, model_path))
            facts = {}
            while len(facts) < num_ranks:
                rank, item = processes.receive()
                facts[rank] = item[1]
        except BaseException:
            processes.close()
            raise
        self.hf_config = load_config(model_path)
        self.num_blocks = facts[0]["num_blocks"]
        self.max_model_len = min(fact["max_model_len"] for fact in facts.values())
        self.block_size, self.vocab_size = facts[0]["block_size"], facts[0]["vocab_size"]

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        self.processes.send_to_all(("run", self._epoch, scheduler_output))

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest result; raises StageDied, with the culprit, when a process has ended."""
        while True:
            _, (_, epoch, output) = self.processes.receive()
            if epoch == self._epoch:
                return output

    def reset(self) -> None:
        """Forget all requests; results of steps that are on their way are dropped when they come."""
        self._epoch += 1
        if self.processes.death is None:
            self.processes.send_to_all(("reset",))

    def close(self) -> None:
        """End all processes."""
        self.processes.close()


def start_processes(config: EngineConfig, model_path: str) -> ProcessPipeline:
    """A pipeline of processes of its own, on this host."""
    return ProcessPipeline(config, model_path, StageProcesses.start(config.world_size))


def take_torchrun_processes(config: EngineConfig, model_path: str) -> ProcessPipeline:
    """On rank 0 of those that torchrun has started: the pipeline. The others serve, and never return from here."""
    device = device_of_rank(config, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    return ProcessPipeline(config, model_path, StageProcesses.take_torchrun(device))
