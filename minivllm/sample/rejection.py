"""Verifying drafts: what a step emits for each request, so that speculation changes no distribution.

A request with s drafts has s + 1 rows of target probabilities p. Draft d of row j was drawn from q_j:

    accept d  if  q(d) > 0  and  u q(d) < p(d), u in [0, 1)      and look at the next row
    else emit a token drawn from max(p - q, 0), normalised       the *recovered* token, and stop
    all s accepted: the ordinary sampler's choice of the last row, the *bonus* token

Then P(emit x) = min(p, q)(x) + (1 - sum min(p, q)) max(p - q, 0)(x) / sum max(p - q, 0) = p(x) (Leviathan et al. 2023,
Chen et al. 2023). Drafts that were not drawn have a q of 1 at d: recovered from p with p(d) = 0. Greedy rows accept the
target's argmax and nothing else.

Rows of all requests lie one after the other, N in all; -1 among the drafts marks the last row of a request.
"""

import importlib.util

import torch

from minivllm.sample.random import Purpose, uniform
from minivllm.sample.sampler import SamplingMetadata, draw, probabilities, process


class RejectionSampler:
    """Stateless, like `Sampler`: drafts and metadata in, emitted tokens out."""

    def __call__(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        draft_ids: torch.Tensor,
        cu_rows: torch.Tensor,
        max_drafts: int,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Emit 1 to s + 1 tokens for each request.

        Args:
            logits: [N, V] float32 (may be overwritten).
            metadata: of the N rows; positions are those of the token that a row chooses.
            draft_ids: [N] int64; -1 on the last row of each request.
            cu_rows: [B + 1] int64: rows cu_rows[i] .. cu_rows[i + 1] - 1 belong to request i.
            max_drafts: most drafts of a request, k.
            q: [N, V] float32, what the drafts were drawn from; None where none was drawn.

        Returns:
            [B, k + 1] int64: tokens, then -1.
        """
        logits = process(logits, metadata)
        greedy_ids = logits.argmax(dim=-1)
        if metadata.all_greedy:
            return emit(greedy_ids == draft_ids, draft_ids, greedy_ids, cu_rows, max_drafts)
        p = probabilities(logits, metadata)
        u = [uniform(metadata.seeds, metadata.positions, purpose) for purpose in (Purpose.ACCEPT, Purpose.RECOVER)]
        bonus_u = uniform(metadata.seeds, metadata.positions, Purpose.SAMPLE)
        is_greedy = metadata.temperature == 0
        verify_rows = verify
        if p.is_cuda and importlib.util.find_spec("triton") is not None:
            from minivllm.sample.rejection_triton import verify_rows
        accepted, recovered = verify_rows(p, q, draft_ids, *u)
        last = cu_rows[1:] - 1
        recovered[last] = draw(p[last], bonus_u[last])
        accepted = torch.where(is_greedy, greedy_ids == draft_ids, accepted)
        replacement = torch.where(is_greedy, greedy_ids, recovered)
        return emit(accepted, draft_ids, replacement, cu_rows, max_drafts)


def verify(
    p: torch.Tensor, q: torch.Tensor | None, draft_ids: torch.Tensor, u_accept: torch.Tensor, u_recover: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule for each row by itself.

    Args:
        p: [N, V] float32, rows sum to 1; not changed.
        q: the same for the drafts, or None for drafts that were not drawn.
        draft_ids: [N] int64, -1 where a row has no draft.
        u_accept, u_recover: [N] float64 in [0, 1).

    Returns:
        accepted [N] bool; recovered [N] int64, the token that takes the draft's place. Neither means anything where
        there is no draft, except that nothing is accepted there.
    """
    has_draft = draft_ids >= 0
    column = draft_ids.clamp(min=0)[:, None]
    p_draft = p.gather(1, column)[:, 0].double()
    q_draft = torch.ones_like(p_draft) if q is None else q.gather(1, column)[:, 0].double()
    accepted = has_draft & (q_draft > 0) & (u_accept * q_draft < p_draft)
    residual = p.scatter(1, column, 0.0) if q is None else (p - q).clamp(min=0)
    # Nothing is left where p = q up to rounding, or where p is all at a draft that was never drawn.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)
    return accepted, draw(residual, u_recover)


def emit(
    accepted: torch.Tensor, draft_ids: torch.Tensor, replacement: torch.Tensor, cu_rows: torch.Tensor, max_drafts: int
) -> torch.Tensor:
    """Drafts up to the first that is not accepted, then the token in its place: [B, k + 1] int64, -1 after the end."""
    rows = cu_rows[:-1, None] + torch.arange(max_drafts + 1, device=cu_rows.device)
    is_row = rows < cu_rows[1:, None]
    rows = torch.where(is_row, rows, cu_rows[:-1, None])
    goes_on = accepted[rows] & is_row
    reached = torch.ones_like(is_row)
    reached[:, 1:] = goes_on[:, :-1].cumprod(dim=1).bool()
    tokens = torch.where(accepted, draft_ids, replacement)[rows]
    return torch.where(reached & is_row, tokens, -1)
