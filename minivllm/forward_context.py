"""What the layers of one forward pass need to know and the model code does not: where the cache is, who sits where.

The model runner sets the context around a forward pass; attention layers read it. Model code stays free of batch
details: it sees a flat list of tokens with their positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.attention.backend import AttentionBackend
    from minivllm.attention.metadata import AttentionMetadata, KVCache


@dataclass
class ForwardContext:
    """One forward pass.

    `kv_caches` maps an attention layer's name to its caches of K and V, [num_blocks, block_size, num_kv_heads,
    head_dim] each, or to its one cache of latents (MLA), [num_blocks, block_size, 1, d_c + d_r].
    """

    attention_metadata: "AttentionMetadata"
    attention_backend: "AttentionBackend"
    kv_caches: "dict[str, KVCache]" = field(default_factory=dict)


# Each thread has its own: ranks of one process run side by side.
_current: ContextVar[ForwardContext | None] = ContextVar("forward context", default=None)


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one for the body of the with statement."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """The current forward pass; raises RuntimeError outside of one."""
    context = _current.get()
    if context is None:
        raise RuntimeError("no forward pass is running: wrap the call in set_forward_context(...)")
    return context
