"""Weights into a model: stream safetensors files into the model's slots, or fill it at random.

    slots: checkpoint name -> view of a parameter          (the model says what it needs) files:
    model.safetensors, or shards named by model.safetensors.index.json   (the directory says what there is)

Invariant: a load that returns has filled every slot exactly from a tensor of that name and shape, and has
ignored nothing but what a model of that kind is known to carry unused. A tensor in fp8 is dequantised on its way,
with the scales that lie beside it (`NAME_scale_inv`, one for each 128 x 128: DeepSeek-V3's form). Otherwise one
CheckpointError lists everything that does not fit. Tensors are read one at a time, so the peak is the model plus its
largest tensor. Of a tensor that ranks divide (`layers/sharding.py`) only this rank's part is read.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minivllm.checkpoints.errors import CheckpointError
from minivllm.gemm.quantize import BLOCK, dequantize
from minivllm.layers.sharding import Shard, Slot, whole

SINGLE_FILE = "model.safetensors"
SCALE_SUFFIX = "_scale_inv"
INDEX_FILE = "model.safetensors.index.json"

# Older exports carry the rotary table; the model computes its own.
_UNUSED = re.compile(r".*\.rotary_emb\.inv_freq")
_MAX_LISTED = 10
_DUMMY_STD = 0.02


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory. Raises CheckpointError if there are none or one is missing."""
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        raise CheckpointError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}: save the model in safetensors form, "
            'or use load_format="dummy" for random weights'
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is not a safetensors index: download it again") from None
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {_listed(missing)}, named in {INDEX_FILE}: download the missing shards"
        )
    return [directory / name for name in names]


def tensor_names(directory: Path) -> frozenset[str]:
    """All names in a checkpoint. Raises CheckpointError as `load_weights` does."""
    names: set[str] = set()
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file ({error}): download it again") from None
    return frozenset(names)


def load_weights(
    slots: Iterable[tuple[str, Slot]], directory: Path, is_unused: Callable[[str], bool] = lambda name: False
) -> None:
    """Copies every tensor of the checkpoint into the slot of its name, in the slot's dtype and device.

    A tensor whose slot is None has to be there, and is not read. `is_unused` tells whether a name may be there without
    a slot (the head's, when it is tied). Raises CheckpointError that lists missing, unexpected and wrongly shaped
    tensors, or that names an unreadable file.
    """
    waiting = dict(slots)
    scales = _read_scales(directory)
    filled: set[str] = set()
    unexpected: list[str] = []
    misshapen: list[str] = []
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safe_open handle is no dict)
                    if name in scales and name.removesuffix(SCALE_SUFFIX) in waiting:
                        continue
                    if name not in waiting:
                        if not is_unused(name) and not _UNUSED.fullmatch(name):
                            unexpected.append(name)
                        continue
                    filled.add(name)
                    if waiting[name] is None:
                        continue
                    problem = _fill(waiting[name], name, file, scales)
                    if problem:
                        misshapen.append(problem)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file ({error}): download it again") from None
    problems = [
        f"{kind}: {_listed(names)}"
        for kind, names in (
            ("missing", [name for name in waiting if name not in filled]),
            ("unexpected", unexpected),
            ("wrong shape", misshapen),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"the tensors in {directory} do not fit its config.json. " + ". ".join(problems))


def _fill(slot: Tensor | Shard, name: str, file: Any, scales: dict[str, Tensor]) -> str | None:
    """Copies a tensor of an open file, or the slot's part of it, into the slot; or says what does not fit."""
    tensor, shares = slot if isinstance(slot, Shard) else (slot, tuple(whole(size) for size in slot.shape))
    stored = file.get_slice(name)
    shape, wanted = tuple(stored.get_shape()), tuple(share.whole for share in shares)
    if shape != wanted:
        return f"{name} is {shape}, should be {wanted}"
    there = tuple(share.stored for share in shares)
    if stored.get_dtype() == "F8_E4M3":
        problem = _scale_problem(name, shape, scales)
        if problem:
            return problem
        found = _dequantize_part(stored, there, scales[name + SCALE_SUFFIX].float())
    else:
        found = stored[there] if isinstance(slot, Shard) else file.get_tensor(name)
    _copy_padded(tensor, found)
    return None


def _copy_padded(tensor: Tensor, found: Tensor) -> None:
    """`found` into the corner of `tensor`, and zeros where a padded vocabulary has no rows."""
    if tensor.shape != found.shape:
        tensor.zero_()
        tensor = tensor[tuple(slice(0, size) for size in found.shape)]
    tensor.copy_(found)


def _dequantize_part(stored: Any, part: tuple[slice, ...], scale: Tensor) -> Tensor:
    """Rows and columns `part` of a matrix in fp8: read with the rest of the 128 x 128 blocks that they touch."""
    blocks = tuple(slice(one.start // BLOCK, -(-one.stop // BLOCK)) for one in part)
    read = stored[tuple(slice(block.start * BLOCK, block.stop * BLOCK) for block in blocks)]
    offsets = [block.start * BLOCK for block in blocks]
    inner = tuple(slice(one.start - offset, one.stop - offset) for one, offset in zip(part, offsets, strict=True))
    return dequantize(read, scale[blocks])[inner]


def _read_scales(directory: Path) -> dict[str, Tensor]:
    """All scales of a checkpoint in fp8, by name: they may lie in another shard than their tensors."""
    found = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.endswith(SCALE_SUFFIX)]  # noqa: SIM118
                found |= {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file ({error}): download it again") from None
    return found


def _scale_problem(name: str, shape: tuple[int, ...], scales: dict[str, Tensor]) -> str | None:
    """What is wrong with the scale of a matrix in fp8, or None."""
    wanted = tuple(-(-size // BLOCK) for size in shape)
    scale = scales.get(name + SCALE_SUFFIX)
    if len(shape) != 2 or scale is None:
        return f"{name} is in fp8, and has no {name}{SCALE_SUFFIX} of shape {wanted}"
    if tuple(scale.shape) != wanted:
        return f"{name}{SCALE_SUFFIX} is {tuple(scale.shape)}, should be {wanted}"
    return None


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Random weights, made on the model's own device: the shapes and speed of a model without its download.

    Norm weights stay 1 and all others are normal with a small deviation, so activations stay finite through
    any number of layers, in float16 too. A tensor's numbers follow from the seed and its name: all ranks hold parts of
    the same model, however many they are.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, slot in model.slots():
        if slot is None or "norm" in name:
            continue
        tensor, shares = slot if isinstance(slot, Shard) else (slot, ())
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device)
        generator = generators[tensor.device].manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if not shares:
            tensor.normal_(0.0, _DUMMY_STD, generator=generator)
            continue
        full = tensor.new_empty([share.whole for share in shares]).normal_(0.0, _DUMMY_STD, generator=generator)
        _copy_padded(tensor, full[tuple(share.stored for share in shares)])


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    rest = len(names) - _MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
