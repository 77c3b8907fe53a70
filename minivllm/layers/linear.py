"""Linear layers whose weights may hold several checkpoint tensors stacked along their rows.

    x [T, in_features] -> [T, out_features], y = x W^T + b, W [out_features, in_features]

One matrix product over stacked weights (q, k, v; gate, up) reads the input once and gives the hardware a
larger problem. A layer names its checkpoint tensors through `slots`: each is a view of some rows, and loading
is a copy into the view. Slots exist until `finalize`, which may trade the plain weight for a copy that is
laid out for the CPU's matrix units, or in 8 bits (`quantization.py`).

Sizes may be given as a rank's share of them (`sharding.py`): the layer is then that part of a larger one.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.gemm.dispatch import gemm
from minivllm.layers import Layer
from minivllm.layers.quantization import ScaledWeight
from minivllm.layers.sharding import Share, Slot, slot, whole
from minivllm.worker.tensor_parallel import collective_group

# oneDNN chooses the layout of a packed weight for an expected number of rows. Measured for float32 and
# bfloat16 over 1 to 4096 rows: every hint above 1 gives the same speed, a hint of 1 is up to 2.4x slower.
_EXPECTED_ROWS = 512


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """Copies a CPU weight [out, in] into oneDNN's blocked layout; None where that is not to be had.

    Against F.linear the packed product takes half the time in float32 and half to all of it in bfloat16
    (AVX-512, 2 threads). None: not a CPU tensor, a build of PyTorch without oneDNN, or a dtype that this CPU
    has no oneDNN kernel for (float16 on most).
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _EXPECTED_ROWS)
    except (AttributeError, RuntimeError):
        return None


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] times a weight from `pack_weight`, plus bias [out]: [T, out].

    In float32 every row is computed the same way whatever the number of rows, which makes a request's logits
    independent of its company in the batch. The one exception of oneDNN, a lone row, is computed as two equal rows.
    In bfloat16 that holds on CPUs with AVX-512 but not on those with AMX, where the last bits may differ.
    """
    if x.shape[0] == 1 and x.dtype == torch.float32:
        return packed_linear(x.repeat(2, 1), packed, bias)[:1]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class Linear(Layer):
    """A linear layer that holds exactly one checkpoint tensor (and one bias), or a rank's share of its outputs."""

    def __init__(self, in_features: int | Share, out_features: int | Share, bias: bool = False) -> None:
        super().__init__()
        self.inputs, self.outputs = whole(in_features), whole(out_features)
        size = self.outputs.size
        self.weight = nn.Parameter(torch.empty(size, self.inputs.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None
        self._packed: torch.Tensor | None = None
        self._transposed: torch.Tensor | None = None
        self._quantization: str | None = None
        self._backend = "auto"
        self.scaled: ScaledWeight | None = None

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yields (checkpoint name, the tensor to copy into); `prefix` is the layer's name there."""
        yield f"{prefix}.weight", slot(self.weight, self.outputs, self.inputs)
        if self.bias is not None:
            yield f"{prefix}.bias", slot(self.bias, self.outputs)

    def plan(self, quantization: str | None, backend: str) -> None:
        """What `finalize` shall make of the weight, and which GEMM backend is preferred ("auto": none)."""
        self._quantization, self._backend = quantization, backend

    def finalize(self) -> None:
        """Called once, after loading: quantizes or packs (CPUs) the weight, and lets go of the plain one."""
        if self._quantization is not None:
            self.scaled = ScaledWeight(self.weight, self._quantization, self._backend)
            self.weight = None
            return
        if self._backend != "auto":
            return
        self._packed = pack_weight(self.weight)
        if self._packed is not None:
            self.weight = None
        elif self.bias is None and self.weight.is_cuda:
            self._transposed = self.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        if self._transposed is not None:
            return torch.mm(x, self._transposed)  # what F.linear comes down to, without its detours on the host
        if self.scaled is not None:
            return self.scaled.multiply(x, self.bias)
        if self._backend != "auto":
            y = gemm(x, self.weight, preferred=self._backend)
            return y if self.bias is None else y.add_(self.bias)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(Linear):
    """A linear layer of which each rank holds a share of the inputs: the results of all ranks are summed.

    `reduce` false leaves the sum to the caller, who has more to add to it.
    """

    def __init__(self, in_features: int | Share, out_features: int, bias: bool = False, reduce: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self._rank_group = collective_group()
        self.group = self._rank_group if reduce else None

    def finalize(self) -> None:
        if self._rank_group is not None and self._rank_group.rank > 0:
            self.bias = None  # the sum shall have it once: rank 0's
        super().finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.forward(x)
        return y if self.group is None else self.group.all_reduce(y)


class MergedLinear(Linear):
    """Several linear layers over the same input as one; their outputs stand side by side.

    `parts` maps the checkpoint name of each layer to its number of rows (or the rank's share of them: a part is
    sharded by itself), in the order of the output.
    """

    def __init__(self, in_features: int, parts: dict[str, int | Share], bias: bool = False) -> None:
        shares = {name: whole(rows) for name, rows in parts.items()}
        super().__init__(in_features, sum(rows.size for rows in shares.values()), bias)
        self.parts = shares

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yields the rows of each part; `prefix` is the name of the module that the parts belong to."""
        sizes = [rows.size for rows in self.parts.values()]
        for (name, rows), weight in zip(self.parts.items(), self.weight.split(sizes), strict=True):
            yield f"{prefix}.{name}.weight", slot(weight, rows, self.inputs)
        if self.bias is not None:
            for (name, rows), bias in zip(self.parts.items(), self.bias.split(sizes), strict=True):
                yield f"{prefix}.{name}.bias", slot(bias, rows)


class QKVLinear(MergedLinear):
    """The three projections in front of attention: hidden states to query, key and value heads."""

    def __init__(
        self, hidden_size: int, num_heads: int | Share, num_kv_heads: int | Share, head_dim: int, bias: bool
    ) -> None:
        q, kv = whole(num_heads), whole(num_kv_heads)
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        super().__init__(hidden_size, {name: heads.times(head_dim) for name, heads in rows.items()}, bias)
        self.num_heads, self.num_kv_heads, self.head_dim = q.size, kv.size, head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> q, k and v heads side by side, [T, num_heads + 2 num_kv_heads, head_dim]."""
        return super().forward(x).view(x.shape[0], -1, self.head_dim)
