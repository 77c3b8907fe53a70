"""Tensor parallelism: the ranks that compute one layer together, and the three things they say to each other.

    all_reduce   each rank has a tensor of the same shape     -> each gets the sum            a layer's partial sums
    all_gather   each rank has [..., n]                       -> each gets [..., size * n]    the vocabulary's logits
    broadcast    one rank has a tensor, the others room       -> each has it                  sampled tokens

| group | ranks are | for |
|---|---|---|
| SingleRank | this one | no parallelism: layers that see it call nothing |
| ThreadGroup | threads of this process | tests and notebooks: counts what is sent |
| DistributedGroup | processes, gloo on CPUs and NCCL on GPUs | machines |

Layers learn their group when they are built, as they do dtype and device: `with building_for(group)`.

Invariant: every rank gets the same bits. Routers and samplers rely on it, since each rank runs its own copy of them.

Method: Megatron-LM (Shoeybi et al. 2019).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_TIMEOUT_SECONDS = 120.0


class TensorParallelGroup(ABC):
    """Ranks 0 .. size - 1 that call the same collectives in the same order."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in x's dtype: x itself, overwritten, or a tensor of its own. x is contiguous."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """x [..., n] of all ranks side by side, [..., size * n], in the order of the ranks."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of rank `source` on every rank; the others give a tensor of that shape and dtype, which may be changed."""


class SingleRank(TensorParallelGroup):
    """A group of one: every collective is the identity."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x


class DistributedGroup(TensorParallelGroup):
    """The ranks of a torch.distributed process group (gloo, NCCL); None is the default group."""

    def __init__(self, process_group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, process_group
        # PyTorch 2.13 has given it a new name.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])  # gloo wants them one below the other
        self._gather(parts, x.contiguous(), group=self._group)
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self._dist.broadcast(x, group_src=source, group=self._group)
        return x


@dataclass
class Traffic:
    """What one rank handed to a collective. How often it crosses a wire is up to the algorithm: a ring sends
    2 (size - 1) / size times an all_reduce's bytes, and size - 1 times an all_gather's."""

    calls: int = 0
    num_bytes: int = 0


@dataclass
class _Shared:
    barrier: threading.Barrier
    tensors: list[Tensor | None]


@dataclass
class ThreadGroup(TensorParallelGroup):
    """A rank that is a thread; make all of them with `ThreadGroup.create(size)`, and run them with `run_ranks`.

    `traffic` counts this rank's calls and bytes by the collective's name.
    """

    rank: int
    size: int
    shared: _Shared = field(repr=False)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    @classmethod
    def create(cls, size: int) -> list["ThreadGroup"]:
        shared = _Shared(threading.Barrier(size, timeout=_TIMEOUT_SECONDS), [None] * size)
        return [cls(rank, size, shared) for rank in range(size)]

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._exchange("all_reduce", x, _sum)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._exchange("all_gather", x, lambda parts: torch.cat(list(parts), dim=-1))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return self._exchange("broadcast", x, lambda parts: parts[source].clone(), sends=self.rank == source)

    def _exchange(
        self, name: str, x: Tensor, combine: Callable[[Sequence[Tensor]], Tensor], sends: bool = True
    ) -> Tensor:
        """What `combine` makes of all ranks' tensors: a tensor of this rank's own, since layers write into theirs."""
        traffic = self.traffic.setdefault(name, Traffic())
        traffic.calls += 1
        traffic.num_bytes += x.nbytes if sends else 0
        self.shared.tensors[self.rank] = x
        self.shared.barrier.wait()
        result = combine(self.shared.tensors)
        self.shared.barrier.wait()  # nobody changes its tensor while another reads it
        return result


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def run_ranks(function: Callable[..., Result], groups: Sequence[ThreadGroup], *each: Sequence[Any]) -> list[Result]:
    """function(group, ...) of every rank at the same time, a thread each; `each` holds further arguments by rank.

    Returns the results in the order of the ranks. Where a rank raises, the others stop waiting for it, and its
    exception comes out here.
    """

    def run(group: ThreadGroup, *arguments: Any) -> Result:
        try:
            return function(group, *arguments)
        except BaseException:
            group.shared.barrier.abort()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(run, *arguments) for arguments in zip(groups, *each, strict=True)]
    errors = [future.exception() for future in futures]
    for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def agree_on(token_ids: Tensor, group: TensorParallelGroup) -> Tensor:
    """Rank 0's sampled tokens on every rank.

    Ranks that sample from the same logits with the same seeds choose alike without this; it is for samplers whose bits
    may differ between devices.
    """
    return group.broadcast(token_ids)


SINGLE_RANK = SingleRank()
_building: ContextVar[TensorParallelGroup] = ContextVar("tensor parallel group", default=SINGLE_RANK)


@contextmanager
def building_for(group: TensorParallelGroup) -> Iterator[None]:
    """Layers that are made inside become this rank's part of themselves."""
    token = _building.set(group)
    try:
        yield
    finally:
        _building.reset(token)


def current_group() -> TensorParallelGroup:
    """The group that layers are being built for: a single rank outside of `building_for`."""
    return _building.get()


def collective_group() -> TensorParallelGroup | None:
    """The same for layers that communicate; None for a single rank, so that they can ask without a call."""
    group = _building.get()
    return group if group.size > 1 else None
