"""The training loop: steps, learning rate, held-out loss, the best weights, and a state that can be resumed.

    progress = max(step / steps, elapsed / limit)      so the cosine ends when the run ends, whichever comes first

The host never waits for the device between two log lines. Every evaluation writes the whole state (weights, AdamW's
moments, random generators, best weights, curve) beside the checkpoint; a resumed run continues with the same
numbers as one that was not interrupted.
"""

import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from minivllm.checkpoints.errors import CheckpointError
from minivllm.checkpoints.training.balance import ExpertLoad
from minivllm.checkpoints.training.data import Batches, Stream
from minivllm.checkpoints.training.model import add_dropout, build_model, hidden_states, model_config, parameter_groups
from minivllm.checkpoints.training.mtp import MTPLayer, distillation_loss, initialise, pass_loss, unroll
from minivllm.checkpoints.training.recipes import Recipe

LOG_EVERY = 20
_FINAL_SHARE = 0.1
"""The learning rate ends at this share of its peak; biases rest in the last tenth of a run."""


@dataclass
class Progress:
    """What a run has to show so far; the curve's rows are JSON objects."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    evaluations_since_best: int = 0
    stopped: str = ""
    curve: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """One model on its way. Call run(), then read model, mtp and progress: the weights are the best ones."""

    def __init__(self, recipe: Recipe, stream: Stream, held_out: Stream, vocab_size: int, state_file: Path) -> None:
        self.recipe, self.held_out, self.state_file = recipe, held_out, state_file
        self.device = stream.ids.device
        self.batches = Batches(stream, recipe.batch_size, recipe.seed)
        torch.manual_seed(recipe.seed)
        config = model_config(recipe, vocab_size)
        self.model: PreTrainedModel = build_model(config)
        self.mtp = MTPLayer(config) if recipe.mtp_passes else None
        if self.mtp is not None:
            initialise(self.mtp, self.model)
        self.modules = nn.ModuleDict({"model": self.model} | ({"mtp": self.mtp} if self.mtp is not None else {}))
        self.modules.to(self.device)
        layers = [*self.model.model.layers, *([self.mtp.block] if self.mtp is not None else [])]
        add_dropout(self.model, layers, recipe.dropout)
        self.load = ExpertLoad(self.model, self.mtp)
        self.optimizer = torch.optim.AdamW(
            parameter_groups([self.modules], recipe.weight_decay),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}

    def losses(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [B, T + 2] -> float32 [1 + mtp_passes] and [mtp_passes], in nats a token.

        The main loss, then each pass's against the text; and each pass's against the target's distribution.
        """
        length = rows.shape[1] - 2
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = hidden_states(self.model, rows[:, :length])
            logits = self.model.lm_head(hidden)
            losses = [F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:-1].flatten())]
            distillation = [losses[0].new_zeros(())]
            if self.mtp is not None:
                outputs = unroll(self.model, self.mtp, rows, hidden, self.recipe.mtp_passes)
                drafts = [self.model.lm_head(output) for output in outputs]
                losses += [pass_loss(draft, rows, index) for index, draft in enumerate(drafts)]
                distillation = [distillation_loss(draft, logits, index) for index, draft in enumerate(drafts)]
        return torch.stack(losses), torch.stack(distillation)

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up by steps, then a cosine over the run's progress in [0, 1]."""
        warm_up = min(1.0, (self.progress.step + 1) / max(1, self.recipe.warmup_steps))
        cosine = _FINAL_SHARE + (1 - _FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.recipe.learning_rate * warm_up * cosine

    def train_step(self, rows: Tensor, learning_rate: float, bias_speed: float) -> Tensor:
        """One optimizer step; returns the losses, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.load.reset()
        losses, distillation = self.losses(rows)
        total = losses[0] + self.recipe.sequence_balance * self.load.sequence_loss()
        if self.mtp is not None:
            share = self.recipe.mtp_distillation
            total = total + self.recipe.mtp_weight * ((1 - share) * losses[1:].mean() + share * distillation.mean())
        total.backward()
        nn.utils.clip_grad_norm_(self.modules.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.load.update_biases(bias_speed)
        return losses.detach()

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        """Held-out losses: main, then each MTP pass."""
        self.modules.eval()
        starts = self.held_out.held_out_starts().split(self.recipe.batch_size)
        total = sum(self.losses(self.held_out.rows(some))[0] * len(some) for some in starts)
        self.modules.train()
        return (total / sum(len(some) for some in starts)).tolist()

    def run(self, max_minutes: float | None = None, stop_at: int | None = None, progress_bar: bool = True) -> Progress:
        """Trains until the steps or the minutes from now on are used up, or the held-out loss has stopped falling.

        stop_at interrupts the run after that step with its state saved, as an evaluation does.
        """
        recipe, progress = self.recipe, self.progress
        limit = math.inf if max_minutes is None else progress.seconds + max_minutes * 60
        begin = time.monotonic() - progress.seconds
        self.modules.train()
        pending: list[Tensor] = []
        bar = tqdm(
            total=recipe.steps,
            initial=progress.step,
            desc=recipe.name,
            file=sys.stderr,
            disable=not progress_bar,
            mininterval=0.1 if sys.stderr.isatty() else 15.0,
        )
        while not progress.stopped:
            share = max(progress.step / recipe.steps, (time.monotonic() - begin) / limit)
            learning_rate = self.learning_rate(share)
            speed = recipe.bias_update_speed if share < 1 - _FINAL_SHARE else 0.0
            pending.append(self.train_step(self.batches.batch(progress.step), learning_rate, speed))
            progress.step += 1
            bar.update()
            done = progress.step >= recipe.steps or time.monotonic() - begin >= limit
            if done or progress.step % LOG_EVERY == 0:
                self._log(pending, learning_rate, bar)
                pending = []
            if done or progress.step % recipe.eval_every == 0:
                self._note_held_out(self.evaluate())
                if done:
                    progress.stopped = (
                        "all steps were done" if progress.step >= recipe.steps else "the time was used up"
                    )
            progress.seconds = time.monotonic() - begin
            if done or progress.step % recipe.eval_every == 0 or progress.step == stop_at:
                self.save_state()
            if progress.step == stop_at:
                break
        bar.close()
        if progress.stopped:
            self.modules.load_state_dict(self.best)
        return progress

    def _log(self, pending: list[Tensor], learning_rate: float, bar: tqdm) -> None:
        mean = torch.stack(pending).mean(0).tolist()
        self.progress.curve.append(
            {
                "step": self.progress.step,
                "losses": [round(loss, 4) for loss in mean],
                "lr": float(f"{learning_rate:.3e}"),
            }
        )
        bar.set_postfix(loss=f"{mean[0]:.3f}", held_out=f"{self.progress.best_loss:.3f}", refresh=False)
        if not math.isfinite(mean[0]):
            raise CheckpointError(
                f"{self.recipe.name}: the loss is {mean[0]} at step {self.progress.step}; lower the learning rate"
            )

    def _note_held_out(self, losses: list[float]) -> None:
        progress = self.progress
        progress.held_out.append({"step": progress.step, "losses": [round(loss, 4) for loss in losses]})
        progress.evaluations_since_best += 1
        if losses[0] < progress.best_loss:
            progress.best_loss, progress.best_step, progress.evaluations_since_best = losses[0], progress.step, 0
            self.best = {name: tensor.detach().clone() for name, tensor in self.modules.state_dict().items()}
        elif progress.evaluations_since_best >= self.recipe.patience:
            progress.stopped = "the held-out loss had stopped falling"

    def save_state(self) -> None:
        """Everything that a resumed run needs, in one file that is whole or absent."""
        state = {
            "recipe": self.recipe.as_dict(),
            "progress": vars(self.progress),
            "modules": self.modules.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }
        partial = self.state_file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.state_file)

    def load_state(self) -> None:
        """Continues from the state file. Raises CheckpointError if it belongs to another recipe."""
        state = torch.load(self.state_file, map_location=self.device, weights_only=True)
        check_same_recipe(self.recipe.as_dict(), state["recipe"], self.state_file)
        self.modules.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best = state["best"]
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"].cpu())
        if state["cuda_random"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"].cpu())


def check_same_recipe(wanted: dict[str, Any], found: dict[str, Any], where: Path) -> None:
    """Raises CheckpointError, which names what differs."""
    differing = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if differing:
        detail = ", ".join(f"{key} {found.get(key)!r} there, {wanted.get(key)!r} asked for" for key in differing)
        raise CheckpointError(
            f"{where} was made with another config ({detail}): use another --out, or the same options"
        )
