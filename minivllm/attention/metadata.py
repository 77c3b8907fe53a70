"""Where the rows of one step belong: which request, which slots, how much context.

A step is one flat list of T tokens. Rows that decode come first, then longer runs of queries:

```
    row        0 .. B * width - 1                     B * width .. T - 1
               |- decode: width queries a request -|- varlen: chunks of prompts, n_i queries each -|
```

Without speculation a decode has one query. To verify drafts it has a few, and requests with fewer than the others are
padded *in front*: masks are aligned bottom-right, so padding behind would shift what a row sees. Padding is stored
nowhere (slot -1) and its output is discarded.

Both parts are described alike (`PagedRows`), so that a kernel written for one can serve the other.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

KVCache = tuple[torch.Tensor, torch.Tensor] | torch.Tensor
"""K and V of one layer, [num_blocks, block_size, Hkv, D] each: a pair, or one tensor [2, ...]."""


@dataclass
class PagedRows:
    """Requests whose query rows lie one after the other and that read K and V through block tables.

    Query i of a request with n queries and context length s sits at position s - n + i and sees keys 0 .. that.
    Tails of block tables may hold anything and must not be read.
    """

    cu_seqlens_q: torch.Tensor
    """[B + 1] int32: rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1 belong to request i."""
    seq_lens: torch.Tensor
    """[B] int32: context length of each request, this step's tokens included."""
    block_table: torch.Tensor
    """[B, width] int32."""
    block_size: int
    num_rows: int
    max_seqlen_q: int
    max_seqlen_k: int
    query_lens: list[int]
    """[B] the same lengths, known on the host; padding counts as queries."""
    context_lens: list[int]
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What a backend worked out for these rows in the first layer of a step, for the layers after it."""
    _slots: torch.Tensor | None = field(default=None, repr=False)
    _mask: torch.Tensor | None = field(default=None, repr=False)

    @property
    def are_whole_prompts(self) -> bool:
        """Whether no request has context from before this step."""
        return self.query_lens == self.context_lens

    def slots(self) -> torch.Tensor:
        """[B, max_seqlen_k] int64: cache slot of each context position; made once a step, shared by all layers.

        Positions past the end of a request point at its last token, so that whatever is read there is finite: a
        masked NaN would still poison the sum.
        """
        if self._slots is None:
            positions = torch.arange(self.max_seqlen_k, device=self.block_table.device)
            positions = torch.minimum(positions, (self.seq_lens[:, None] - 1).clamp(min=0))
            block_ids = self.block_table.gather(1, positions // self.block_size)
            self._slots = block_ids.long() * self.block_size + positions % self.block_size
        return self._slots

    def mask(self) -> torch.Tensor:
        """[B, 1, max_seqlen_q, max_seqlen_k] bool, True where a query sees a position; all have max_seqlen_q rows.

        Padding may stand before position 0. It sees that one all the same: a row without keys would be NaN.
        """
        if self._mask is None:
            positions = torch.arange(self.max_seqlen_k, device=self.seq_lens.device)
            query = torch.arange(self.max_seqlen_q, device=self.seq_lens.device) - self.max_seqlen_q
            last = (self.seq_lens[:, None] + query).clamp(min=0)[..., None]
            self._mask = ((positions <= last) & (positions < self.seq_lens[:, None, None]))[:, None]
        return self._mask


@dataclass
class AttentionMetadata:
    """One step, as the attention layers see it."""

    slot_mapping: torch.Tensor
    """[T] int64: slot = block * block_size + offset where row t's K and V are stored; -1 = nowhere."""
    decode: PagedRows | None
    varlen: PagedRows | None
