"""A kernel that is launched the short way computes what Triton's own launch computes."""

import pytest
import torch

from minivllm import triton_launch
from minivllm.triton_env import tl, triton
from minivllm.triton_launch import launch_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _scale_kernel(x, bias, out, x_stride, size, factor, BLOCK: tl.constexpr, NEGATE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at * x_stride, mask=at < size, other=0.0) * factor
    if bias is not None:
        y += tl.load(bias + at, mask=at < size, other=0.0)
    tl.store(out + at, -y if NEGATE else y, mask=at < size)


def scaled(x, bias=None, factor=2.0, negate=False, dtype=torch.float32):
    out = torch.full((len(x),), torch.nan, device=DEVICE, dtype=dtype)
    grid = (triton.cdiv(len(x), 16), 1, 1)
    launch_kernel(_scale_kernel, grid, (x, bias, out), (x.stride(0), len(x), factor), BLOCK=16, NEGATE=negate)
    return out


def numbers(size):
    return torch.arange(size, dtype=torch.float32, device=DEVICE) + 1


@pytest.mark.parametrize("size", [1, 16, 17, 100])
def test_the_second_launch_gives_what_the_first_gave(size):
    x = numbers(size)
    for _ in range(2):
        torch.testing.assert_close(scaled(x), 2 * x)


def test_launches_that_differ_in_anything_do_not_share_a_version():
    x = numbers(64)
    for _ in range(2):
        torch.testing.assert_close(scaled(x, negate=True), -2 * x)
        torch.testing.assert_close(scaled(x, factor=3.0), 3 * x)
        torch.testing.assert_close(scaled(x, bias=x), 3 * x)
        torch.testing.assert_close(scaled(x[::2]), 2 * x[::2])
        torch.testing.assert_close(scaled(x[1:17]), 2 * x[1:17])  # its pointer is no multiple of 16
        torch.testing.assert_close(scaled(x[:16]), 2 * x[:16])
        torch.testing.assert_close(scaled(x.half(), dtype=torch.float16), 2 * x.half())
        torch.testing.assert_close(scaled(x[:1]), 2 * x[:1])


@pytest.mark.gpu
def test_known_launches_are_remembered_and_run_without_triton(monkeypatch):
    x = numbers(32)
    scaled(x)
    monkeypatch.setattr(type(_scale_kernel), "run", None)
    torch.testing.assert_close(scaled(x), 2 * x)


@pytest.mark.gpu
def test_memory_of_launches_is_bounded(monkeypatch):
    monkeypatch.setattr(triton_launch, "_MOST_KNOWN", 8)
    monkeypatch.setattr(triton_launch, "_known", {})
    for size in range(1, 30):
        torch.testing.assert_close(scaled(numbers(size)), 2 * numbers(size))
        assert len(triton_launch._known) <= 8


@pytest.mark.gpu
def test_a_known_launch_can_be_captured_in_a_graph_and_replayed():
    x = numbers(32)
    out = scaled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled(x)
    x.mul_(5)
    graph.replay()
    torch.testing.assert_close(out, 2 * x)


@pytest.mark.gpu
def test_constexprs_out_of_order_are_refused_by_name():
    x = numbers(16)
    with pytest.raises(TypeError, match="constexprs of _scale_kernel"):
        launch_kernel(_scale_kernel, (1, 1, 1), (x, None, x), (1, 16, 1.0), NEGATE=False, BLOCK=16)
