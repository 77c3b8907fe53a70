"""Ranks and their process groups: pipeline_parallel_size stages of tensor_parallel_size ranks each.

    rank = stage * tensor_parallel_size + tensor-parallel rank

                    tp rank 0   tp rank 1
    stage 0             0           1         all-reduces within a row, after attention and MLP of each layer
                        |           |
    stage 1             2           3         hidden states down a column, once a step: [2, T, hidden_size]

Every rank of a stage has all of the hidden states, so each sends its own to the rank below. Groups are those of
torch.distributed:
gloo where ranks compute on CPUs, NCCL where each has a GPU; what the host has to say always goes through gloo.
"""

import os
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from minivllm.config import ConfigError, EngineConfig
from minivllm.worker.tensor_parallel import SINGLE_RANK, DistributedGroup, TensorParallelGroup

_TOKENS_TAG = 1
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    rank: int
    num_stages: int
    num_tensor_ranks: int

    @property
    def stage(self) -> int:
        return self.rank // self.num_tensor_ranks

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.num_tensor_ranks

    @property
    def reports(self) -> bool:
        """Whether this rank tells the engine what came of a step: the first of the last stage."""
        return self.rank == (self.num_stages - 1) * self.num_tensor_ranks

    def __str__(self) -> str:
        name = f"stage {self.stage} of {self.num_stages}"
        if self.num_tensor_ranks > 1:
            name += f", tensor-parallel rank {self.tensor_rank} of {self.num_tensor_ranks}"
        return name


def device_of_rank(config: EngineConfig, local_rank: int, local_world_size: int) -> str:
    """ "cpu", or the GPU of this rank's own.

    Raises:
        ConfigError: the host has fewer GPUs than ranks.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    num_gpus = torch.cuda.device_count()
    if num_gpus < local_world_size:
        raise ConfigError(
            f"pipeline_parallel_size ({config.pipeline_parallel_size}) x tensor_parallel_size "
            f"({config.tensor_parallel_size}) needs {local_world_size} GPUs on this host, and PyTorch sees {num_gpus}: "
            "lower the sizes, or use device='cpu'"
        )
    return f"cuda:{local_rank}"


def join_world(device: str, **arguments: Any) -> None:
    """Become a rank of the default process group; arguments as for torch.distributed.init_process_group."""
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=_TIMEOUT, **arguments)


def default_to_loopback() -> None:
    """Ranks of one host need no network; without this gloo looks its own name up, which fails in some containers."""
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class ParallelGroups:
    """The groups of one rank; every rank of the world has to make them at the same time."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.tensor: TensorParallelGroup = SINGLE_RANK
        width = place.num_tensor_ranks
        if width > 1:
            for stage in range(place.num_stages):
                group = dist.new_group(list(range(stage * width, (stage + 1) * width)))
                if stage == place.stage:
                    self.tensor = DistributedGroup(group)

    def minimum(self, number: int) -> int:
        """The least number of any rank."""
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


class DistributedLink:
    """A `StageLink` (stage.py) of processes. Sends do not wait: a tensor is kept until the other side has it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._on_their_way: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, hidden: torch.Tensor) -> None:
        self._send(hidden, self._place.rank + self._place.num_tensor_ranks, 0)
        # A stage that is ahead waits for the one after it, so that what is on its way stays bounded.
        while len(self._on_their_way) > 4 * self._place.num_stages * self._place.num_tensor_ranks:
            self._on_their_way.popleft()[0].wait()

    def receive(self, room: torch.Tensor) -> torch.Tensor:
        dist.recv(room, self._place.rank - self._place.num_tensor_ranks)
        return room

    def send_tokens(self, token_ids: np.ndarray) -> None:
        if self._place.reports:
            for rank in range(self._place.rank):
                self._send(torch.from_numpy(token_ids), rank, _TOKENS_TAG)

    def receive_tokens(self, num_rows: int, width: int) -> np.ndarray:
        room = torch.empty(num_rows, width, dtype=torch.int32)
        dist.recv(room, (self._place.num_stages - 1) * self._place.num_tensor_ranks, tag=_TOKENS_TAG)
        return room.numpy()

    def flush(self) -> None:
        """Wait until everything has arrived: what is dropped before that never does."""
        while self._on_their_way:
            self._on_their_way.popleft()[0].wait()

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        while self._on_their_way and self._on_their_way[0][0].is_completed():
            self._on_their_way.popleft()
        self._on_their_way.append((dist.isend(tensor, rank, tag=tag), tensor))
