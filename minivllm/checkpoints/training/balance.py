"""Load balancing without a large auxiliary loss, as DeepSeek-V3 does it.

After each step every router's e_score_correction_bias, which decides who is chosen but not with which weight, moves
by a fixed speed: up for experts that had fewer tokens than the mean, down for those that had more. A very small loss
within each sequence keeps single sequences from crowding onto few experts:

    alpha * sum_e f_e P_e      f_e = E / (top_k T) * tokens that chose e,   P_e = mean of e's share of the scores

Methods: auxiliary-loss-free balancing (Wang et al., 2024), DeepSeek-V3 (2024), section 2.1.2.
"""

import torch
from torch import Tensor, nn

from minivllm.checkpoints.training.model import routers


class ExpertLoad:
    """Watches the routers of a model and its MTP layer: how many tokens each expert got, and the sequence-wise loss.

    counts maps a router's name in the checkpoint to a device tensor [E], summed since the last reset().
    """

    def __init__(self, model: nn.Module, mtp: nn.Module | None) -> None:
        self.routers = routers(model)
        if mtp is not None:
            prefix = f"model.layers.{model.config.num_hidden_layers}."
            self.routers |= {prefix + name.removeprefix("block."): router for name, router in routers(mtp).items()}
        self.counts: dict[str, Tensor] = {}
        self._losses: list[Tensor] = []
        self._handles = [
            router.register_forward_hook(lambda module, inputs, output, name=name: self._watch(name, inputs[0], output))
            for name, router in self.routers.items()
        ]

    def _watch(self, name: str, hidden: Tensor, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, chosen = output
        num_experts = logits.shape[-1]
        hits = (chosen.unsqueeze(-1) == torch.arange(num_experts, device=chosen.device)).sum(1)
        counts = hits.sum(0)
        self.counts[name] = self.counts[name] + counts if name in self.counts else counts
        if torch.is_grad_enabled():
            # hidden is [B, T, hidden_size]; a router flattens it.
            share = logits.sigmoid()
            share = (share / share.sum(-1, keepdim=True)).view(*hidden.shape[:-1], num_experts).mean(-2)
            fraction = hits.view(*hidden.shape[:-1], num_experts).float().mean(-2) * num_experts / chosen.shape[-1]
            self._losses.append((fraction * share).sum(-1).mean())

    def sequence_loss(self) -> Tensor | float:
        """Sum over routers of the loss without alpha, of all forward passes since the last reset()."""
        return sum(self._losses)

    @torch.no_grad()
    def update_biases(self, speed: float) -> None:
        """bias += speed * sign(mean load - load), for every router."""
        for name, counts in self.counts.items():
            load = counts.float()
            self.routers[name].e_score_correction_bias += speed * (load.mean() - load).sign()

    def reset(self) -> None:
        """Forgets counts and losses."""
        self.counts, self._losses = {}, []

    def close(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()


def load_statistics(counts: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """For each router: the smallest and largest load relative to the mean, and the experts below a tenth of it."""
    statistics = {}
    for name, count in counts.items():
        relative = count.float() / count.float().mean()
        statistics[name] = {
            "min": relative.min().item(),
            "max": relative.max().item(),
            "idle": int((relative < 0.1).sum()),
        }
    return statistics
