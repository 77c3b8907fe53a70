"""Which experts a token goes to: the routers of DeepSeek-V2 and V3 as pure functions of the router's logits.

    logits [T, E] -> weights [T, top_k] float32, expert ids [T, top_k] int64, the best expert first

| method | score s | groups are ranked by | experts are ranked by | weight |
|---|---|---|---|---|
| greedy (V2-Lite) | softmax | | s | s |
| group_limited_greedy (V2) | softmax | their best s | s, 0 outside of the kept groups | s |
| noaux_tc (V3) | sigmoid | the sum of their two best b = s + bias | b, -inf outside of the kept groups | s |

The bias of V3 keeps the experts evenly busy without a loss term of its own ("noaux": no auxiliary loss): it decides
who is chosen and leaves the weights alone. Groups stand for machines, and a token that visits few groups visits few
machines.

What holds for all of them: ties go to the lower expert id; the ids of a token are distinct, even where the gate is NaN;
a number of groups that does not divide the experts means no groups. Nothing waits for the device.

Sources: DeepSeek-V2 (2024), DeepSeek-V3 (2024, section 2.1.2), and transformers, whose results these equal.
"""

from dataclasses import dataclass

import torch

METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


@dataclass(frozen=True)
class Routing:
    """A router's settings; calling it routes."""

    method: str
    top_k: int
    num_groups: int = 1
    topk_group: int = 1
    """Groups a token may visit."""
    renormalize: bool = False
    """Whether the weights of a token are divided by their sum; noaux_tc only."""
    scaling: float = 1.0
    """Factor on the weights, after that division."""

    def __call__(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E], bias [E] float32 (noaux_tc; else None) -> weights [T, top_k], ids [T, top_k]."""
        if self.method == "greedy":
            return greedy(logits, self.top_k, self.scaling)
        if self.method == "group_limited_greedy":
            return group_limited_greedy(logits, self.top_k, self.num_groups, self.topk_group, self.scaling)
        groups = self.num_groups, self.topk_group
        return noaux_tc(logits, bias, self.top_k, *groups, self.renormalize, self.scaling)


def greedy(logits: torch.Tensor, top_k: int, scaling: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k most probable experts, each weighted by its probability among all experts times `scaling`."""
    scores = logits.float().softmax(dim=-1)
    ids = best(scores, top_k)
    return scores.gather(1, ids) * scaling, ids


def group_limited_greedy(
    logits: torch.Tensor, top_k: int, num_groups: int, topk_group: int, scaling: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`greedy` among the experts of the topk_group groups that hold the most probable experts."""
    scores = logits.float().softmax(dim=-1)
    if _is_grouped(scores, num_groups):
        group_scores = scores.unflatten(1, (num_groups, -1)).amax(dim=-1)
        scores = scores.masked_fill(~_kept(group_scores, topk_group, scores), 0.0)
    ids = best(scores, top_k)
    return scores.gather(1, ids) * scaling, ids


def noaux_tc(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_groups: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores, chosen with the bias, weighted without it."""
    scores = logits.float().sigmoid()
    ranked = scores + bias
    if _is_grouped(ranked, num_groups):
        in_groups = ranked.unflatten(1, (num_groups, -1))
        group_scores = in_groups.topk(min(2, in_groups.shape[2]), dim=-1).values.sum(dim=-1)
        ranked = ranked.masked_fill(~_kept(group_scores, topk_group, ranked), float("-inf"))
    ids = best(ranked, top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scaling, ids


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the highest scores of each row, [T, count] int64, the highest first, ties in order of index.

    A stable sort, because torch.topk leaves open who wins a tie. A row's indices are part of a permutation, hence
    distinct whatever the scores are; NaN ranks highest.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _is_grouped(scores: torch.Tensor, num_groups: int) -> bool:
    return num_groups > 1 and scores.shape[1] % num_groups == 0


def _kept(group_scores: torch.Tensor, topk_group: int, scores: torch.Tensor) -> torch.Tensor:
    """[T, E] bool: whether an expert's group is among the topk_group best."""
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best(group_scores, topk_group), True)
    return chosen.repeat_interleave(scores.shape[1] // group_scores.shape[1], dim=1)
