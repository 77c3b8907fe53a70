"""How many KV cache blocks fit into memory.

On a GPU: what `gpu_memory_utilization` allows, less what is in use, less what the activations of the largest step
took in a trial run. On a CPU the memory belongs to everybody, and a machine in swap helps nobody: the cache gets at
most half of what is free, and never more than 4 GiB unless `num_gpu_blocks_override` asks for it. Memory limits of a
container count as much as those of the machine.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from minivllm.config import ConfigError, EngineConfig

GIB = 2**30
CPU_CACHE_LIMIT = 4 * GIB


@dataclass(frozen=True)
class LatentCacheSpec:
    """The shape of a cache of latents (MLA), over all layers: one row a token and layer, for all heads."""

    num_layers: int
    block_size: int
    row_size: int
    """d_c + d_r, or bytes in FP8."""
    bytes_per_element: int

    @property
    def bytes_per_token(self) -> int:
        """Latents and rotary keys of one token in all layers."""
        return self.num_layers * self.row_size * self.bytes_per_element

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    def layer_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """[num_blocks, block_size, 1, row_size]."""
        return num_blocks, self.block_size, 1, self.row_size


@dataclass(frozen=True)
class KVCacheSpec:
    """The shape of a cache of K and V, over all layers."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    bytes_per_element: int

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_element

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    def layer_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """[2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]."""
        return 2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim


@dataclass(frozen=True)
class JointCacheSpec:
    """Caches that share block ids, a target's and its drafter's: a block takes room in each."""

    parts: tuple[KVCacheSpec | LatentCacheSpec, ...]

    @property
    def block_size(self) -> int:
        return self.parts[0].block_size

    @property
    def bytes_per_block(self) -> int:
        return sum(part.bytes_per_block for part in self.parts)


def count_blocks(
    config: EngineConfig,
    spec: KVCacheSpec | LatentCacheSpec | JointCacheSpec,
    max_model_len: int,
    device: torch.device,
    measure_activations: Callable[[], int],
    num_sharing: int = 1,
) -> int:
    """Blocks to allocate: the override, or as many as memory allows and all requests together can use.

    Args:
        max_model_len: longest request in tokens.
        measure_activations: runs the largest step once and returns the bytes it needed; called on a GPU only.
        num_sharing: caches that share this memory evenly.

    Raises:
        ConfigError: not even one block fits, or the cache cannot hold the max_model_len that was asked for.
    """
    num_useful = config.max_num_seqs * math.ceil(max_model_len / spec.block_size)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    else:
        if device.type == "cuda":
            num_bytes = _gpu_budget(config, device, measure_activations())
        else:
            num_bytes = min(CPU_CACHE_LIMIT, available_memory() // 2)
        num_blocks = min(num_useful, num_bytes // num_sharing // spec.bytes_per_block)
    _check_fits(config, spec, num_blocks)
    return num_blocks


def _check_fits(config: EngineConfig, spec: KVCacheSpec | LatentCacheSpec | JointCacheSpec, num_blocks: int) -> None:
    if num_blocks < 1:
        raise ConfigError(
            f"there is no room for the KV cache: one block of {spec.block_size} tokens takes "
            f"{spec.bytes_per_block / 2**20:.1f} MiB; free some memory, raise gpu_memory_utilization, or choose a "
            "smaller block_size or model"
        )
    capacity = num_blocks * spec.block_size
    if capacity < 2 or (config.max_model_len is not None and capacity < config.max_model_len):
        asked = f"max_model_len is {config.max_model_len}" if config.max_model_len else "a request needs 2"
        raise ConfigError(
            f"the KV cache has room for {capacity} tokens ({num_blocks} blocks of {spec.block_size}), but {asked}: "
            f"lower max_model_len to at most {capacity}, or give the cache more blocks"
        )


def _gpu_budget(config: EngineConfig, device: torch.device, activation_bytes: int) -> int:
    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    used = total - free - reusable
    return max(0, int(total * config.gpu_memory_utilization) - used - activation_bytes)


def available_memory() -> int:
    """Bytes that a process can take here without swapping anything out."""
    return min([_machine_available(), *_cgroup_available()])


def _machine_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        # macOS does not say what is free: count on a quarter of the machine.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return 2 * GIB


def _cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the container's own limit leaves (cgroup v2, then v1); empty where there is none.

    A container's usage counts the files that it has read, too. Those that nobody reads any more make room by
    themselves: without them a container that has just unpacked a model would look full.
    """
    names = (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    )
    for limit_name, usage_name, stat_name, reclaimable in names:
        try:
            limit, usage = (root / limit_name).read_text().strip(), (root / usage_name).read_text().strip()
        except OSError:
            continue
        if limit == "max":
            return []
        used = int(usage) - _stat_entry(root / stat_name, reclaimable)
        return [max(0, int(limit) - used)]
    return []


def _stat_entry(path: Path, name: str) -> int:
    """A line "name number" of a cgroup's memory.stat; 0 where there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
