"""Launching a Triton kernel that has been launched like this before, at a third of the price.

`kernel[grid](...)` works out from scratch which compiled version fits the arguments: for each of some thirty it asks
for its type, whether it is 1, whether it is a multiple of 16, and joins all that into the key of a cache. That is 20 to
40 microseconds of the host's time, more than most kernels of a decode step run on the device, and a step has a few
hundred of them. Here the key is the numbers themselves, as they are: equal arguments need the same version.

    launch_kernel(kernel, grid, tensors, numbers, num_warps, num_stages, CONSTEXPR=...)

A call that is not known yet goes through Triton, which compiles if it must, and what it returns is kept. Hooks that
profilers put around Triton's launches (Proton's) are not called for known ones. In the interpreter every call goes
through Triton.
"""

from typing import Any

import torch

from minivllm.triton_env import INTERPRET, triton

_MOST_KNOWN = 65_536
_known: dict[tuple, Any] = {}


def launch_kernel(
    kernel: "triton.JITFunction",
    grid: tuple[int, int, int],
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    **constexprs: Any,
) -> None:
    """Run `kernel` on the current stream of the tensors' device.

    The kernel's parameters are the tensors (None stands for one that is left out), then the numbers, then its
    constexprs in the order in which they are given here. Raises TypeError if that order is another one.
    """
    if INTERPRET.value:
        kernel[grid](*tensors, *numbers, **constexprs, num_warps=num_warps, num_stages=num_stages)
        return
    device = tensors[0].get_device()
    settings = constexprs.values()
    # Triton distinguishes pointers by their type and by whether they are multiples of 16.
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    kinds = [None if x is None else x.dtype for x in tensors]
    odd = [pointer is not None and pointer & 15 for pointer in pointers]
    key = (kernel, device, numbers, num_warps, num_stages, *settings, *kinds, *odd)
    known = _known.get(key)
    if known is None:
        if kernel.arg_names[len(tensors) + len(numbers) :] != list(constexprs):
            raise TypeError(f"the constexprs of {kernel.__name__} should be given in its own order, not {constexprs}")
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        with torch.cuda.device(device):
            compiled = kernel[grid](*tensors, *numbers, **constexprs, num_warps=num_warps, num_stages=num_stages)
        _known[key] = compiled.run, compiled.function, compiled.packed_metadata
        return
    run, function, metadata = known
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(*grid, stream, function, metadata, None, None, None, *pointers, *numbers, *settings)
