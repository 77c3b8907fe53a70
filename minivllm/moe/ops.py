"""torch.ops.minivllm.moe_forward: the experts of a layer as one operator, which torch.compile takes as it is.

    torch.ops.minivllm.moe_forward(hidden_states [T, H], router_logits [T, E], layer_name)          -> [T, H]
    torch.ops.minivllm.moe_forward_shared(hidden_states, router_logits, layer_name)   -> routed [T, H], shared [T, H]

torch.compile traces a model with tensors that have shapes but no numbers ("fake"). Sorting pairs by expert, choosing
tiles and launching kernels is Python that it should not look into. An operator is the door: one node in the graph, for
which the fake implementation says what shapes come out. It takes no module, only tensors, numbers and strings; so it
gets the layer's name, and `register` keeps which layer that is, as long as the layer lives.

Declared: no argument is changed (mutates_args is empty); strides of the inputs are kept as they were at tracing time
(needs_fixed_stride_order), since kernels read rows.

`minivllm.attention` and `minivllm.latent_attention` are the same door for attention, used only while a graph is traced:
their layers find cache and metadata in the forward context when the graph runs.

Source: vLLM's torch.ops.vllm.moe_forward.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

_layers: "weakref.WeakValueDictionary[str, nn.Module]" = weakref.WeakValueDictionary()
_library = torch.library.Library("minivllm", "FRAGMENT")


def register(layer: nn.Module, layer_name: str) -> str:
    """Makes a layer known to the operators; returns the name to call them with.

    That is layer_name itself, or layer_name#2 and so on where another living model has a layer of that name.
    """
    name, count = layer_name, 1
    while name in _layers:
        count += 1
        name = f"{layer_name}#{count}"
    _layers[name] = layer
    return name


class Registered:
    """Mixin of a module with a layer_name: a copy of it is a layer of its own."""

    layer_name: str
    op_name: str

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self.op_name = register(self, self.layer_name)


def find(layer_name: str) -> nn.Module:
    """The layer of that name; raises ValueError for one that was never made, or is gone."""
    layer = _layers.get(layer_name)
    if layer is None:
        known = ", ".join(sorted(_layers)) or "none"
        raise ValueError(f"layer_name {layer_name!r} is no living layer's; known: {known}")
    return layer


def moe_forward(hidden_states: Tensor, router_logits: Tensor, layer_name: str) -> Tensor:
    return find(layer_name).run(hidden_states, router_logits)


def moe_forward_fake(hidden_states: Tensor, router_logits: Tensor, layer_name: str) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


def moe_forward_shared(hidden_states: Tensor, router_logits: Tensor, layer_name: str) -> tuple[Tensor, Tensor]:
    layer = find(layer_name)
    return layer.run(hidden_states, router_logits), layer.run_shared(hidden_states)


def moe_forward_shared_fake(hidden_states: Tensor, router_logits: Tensor, layer_name: str) -> tuple[Tensor, Tensor]:
    return hidden_states.new_empty(hidden_states.shape), hidden_states.new_empty(hidden_states.shape)


def attention(q: Tensor, k: Tensor, v: Tensor, layer_name: str) -> Tensor:
    return find(layer_name).attend(q, k, v).contiguous()


def attention_fake(q: Tensor, k: Tensor, v: Tensor, layer_name: str) -> Tensor:
    return q.new_empty(q.shape)


def latent_attention(q: Tensor, c: Tensor, k_rope: Tensor, d_v: int, layer_name: str) -> Tensor:
    return find(layer_name).attend(q, c, k_rope).contiguous()


def latent_attention_fake(q: Tensor, c: Tensor, k_rope: Tensor, d_v: int, layer_name: str) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], d_v)


def define(function: Callable[..., object], fake: Callable[..., object]) -> None:
    """Adds `function`, which changes none of its arguments, to torch.ops.minivllm under its own name."""
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _library.define(name + schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    torch.library.register_fake(f"minivllm::{name}", fake, lib=_library)


define(moe_forward, moe_forward_fake)
define(moe_forward_shared, moe_forward_shared_fake)
define(attention, attention_fake)
define(latent_attention, latent_attention_fake)
