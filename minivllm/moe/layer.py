"""The mixture-of-experts layer of DeepSeek: router, routed experts, and shared experts that every token visits.

    hidden [T, H] --router, float32--> router_logits [T, E]
    RoutedExperts(hidden, router_logits) + shared(hidden)                     [T, H]     one all_reduce between ranks

The router works in float32 whatever the model's dtype: a choice between experts is a step, and rounding moves steps.
Both kinds of experts run behind operators (`ops.py`), which need hidden states, logits and the layer's name: to a graph
of torch.compile a layer's experts are one node.

With tensor parallelism each rank routes all tokens (from the same hidden states to the same choice), computes its own
experts and its columns of the shared ones, and the sum over the ranks is the layer's result.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.gemm.quantize import quantize_128x128
from minivllm.layers.sharding import Slot, split
from minivllm.moe import ops
from minivllm.moe.experts import run_experts
from minivllm.moe.routing import Routing
from minivllm.worker.tensor_parallel import collective_group

Slots = Iterator[tuple[str, Slot]]


class Router(nn.Module):
    """Scores of all experts for each token, and the bias of V3 that takes part in the choice only."""

    def __init__(self, hidden_size: int, num_experts: int, has_bias: bool) -> None:
        super().__init__()
        weight = torch.empty(num_experts, hidden_size, dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        bias = torch.zeros(num_experts, dtype=torch.float32) if has_bias else None
        self.e_score_correction_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> logits [T, E] float32."""
        return F.linear(x.float(), self.weight)

    def slots(self, prefix: str) -> Slots:
        yield f"{prefix}.weight", self.weight
        if self.e_score_correction_bias is not None:
            yield f"{prefix}.e_score_correction_bias", self.e_score_correction_bias


class RoutedExperts(ops.Registered, nn.Module):
    """E gated MLPs, of which each token visits top_k.

    Weights of all experts lie in two tensors, gate_up [E, 2 I, H] and down [E, H, I]; a checkpoint holds three tensors
    an expert, and each is loaded into its part of them. A rank holds E / ranks experts that follow each other, and
    gives their part of the sum.
    """

    def __init__(
        self,
        layer_name: str,
        routing: Routing,
        bias: torch.Tensor | None,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
    ) -> None:
        super().__init__()
        self.layer_name, self.routing, self._bias = layer_name, routing, bias
        self.experts = split("n_routed_experts", num_experts)
        # As `run_experts` takes it; 0 says that all are here.
        self._num_in_all = 0 if self.experts.is_whole else num_experts
        gate_up = torch.empty(self.experts.size, 2 * intermediate_size, hidden_size)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        down = torch.empty(self.experts.size, hidden_size, intermediate_size)
        self.down = nn.Parameter(down, requires_grad=False)
        self.gate_up_scale: torch.Tensor | None = None
        self.down_scale: torch.Tensor | None = None
        self._quantization: str | None = None
        self.shared: nn.Module | None = None
        self.op_name = ops.register(self, layer_name)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """[T, H] and [T, E] float32 -> [T, H]."""
        return torch.ops.minivllm.moe_forward(hidden_states, router_logits, self.op_name)

    def forward_shared(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and what the shared experts give, [T, H]."""
        return torch.ops.minivllm.moe_forward_shared(hidden_states, router_logits, self.op_name)

    def run(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """What the operator does, outside of any graph."""
        weights, ids = self.routing(router_logits, self._bias)
        if self._num_in_all:
            ids = ids - self.experts.start  # those of other ranks fall outside of 0 .. E, and are left out
        scales = self.gate_up_scale, self.down_scale
        return run_experts(hidden_states, weights, ids, self.gate_up, self.down, *scales, self._num_in_all)

    def plan(self, quantization: str) -> None:
        """What `finalize` shall make of the weights: "fp8_block"."""
        self._quantization = quantization

    def finalize(self) -> None:
        """Called once, after loading; slots end with it."""
        if self._quantization is not None:
            for name in ("gate_up", "down"):
                q, scale = zip(*(quantize_128x128(weight) for weight in getattr(self, name)), strict=True)
                setattr(self, name, nn.Parameter(torch.stack(q), requires_grad=False))
                setattr(self, f"{name}_scale", torch.stack(scale))

    def run_shared(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.shared(hidden_states)

    def slots(self, prefix: str) -> Slots:
        here = range(len(self.gate_up))
        for expert in range(self.experts.whole):
            row = expert - self.experts.start
            gate, up = self.gate_up[row].chunk(2) if row in here else (None, None)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
            yield f"{prefix}.{expert}.down_proj.weight", self.down[row] if row in here else None


class MoE(nn.Module):
    """Router, routed experts and shared experts (`shared`, one gated MLP as wide as all of them; None: none).

    `shared` leaves its sum over the ranks to this module.
    """

    def __init__(
        self,
        layer_name: str,
        routing: Routing,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        shared: nn.Module | None,
    ) -> None:
        super().__init__()
        self.gate = Router(hidden_size, num_experts, has_bias=routing.method == "noaux_tc")
        bias = self.gate.e_score_correction_bias
        self.experts = RoutedExperts(layer_name, routing, bias, num_experts, hidden_size, intermediate_size)
        self.shared_experts = shared
        self.group = collective_group()
        if shared is not None:
            # Not as a submodule: its weights belong to this module alone.
            object.__setattr__(self.experts, "shared", shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shared_experts is None:
            out = self.experts(x, self.gate(x))
        else:
            out, shared = self.experts.forward_shared(x, self.gate(x))
            out.add_(shared)
        return out if self.group is None else self.group.all_reduce(out)

    def slots(self, prefix: str) -> Slots:
        yield from self.gate.slots(f"{prefix}.gate")
        yield from self.experts.slots(f"{prefix}.experts")
        if self.shared_experts is not None:
            yield from self.shared_experts.slots(f"{prefix}.shared_experts")
