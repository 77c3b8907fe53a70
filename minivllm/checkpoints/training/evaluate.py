"""What a finished checkpoint can do, measured on the stored bfloat16 weights, computed in float32.

    held-out loss      nats a token and bits a byte, each token predicted once, at most T tokens of context
    first draft        on held-out text: how often the MTP layer's argmax is the target's argmax for the same prefix
    chains             drafts 1, 2, 3 on the model's own continuations of held-out prompts, each draft given that those
                       before it were accepted, at the places where an engine with three drafts a step would draft
    experts            tokens of each expert on held-out text
    samples            text, with the seeds that give it

A draft is the MTP layer's argmax. It is accepted if the continuation has that token next: for greedy continuations
this is the rule of greedy verification; for sampled ones it happens with probability p(draft), as in rejection
sampling with a one-hot proposal.
"""

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from minivllm.checkpoints.training.balance import ExpertLoad, load_statistics
from minivllm.checkpoints.training.data import Stream
from minivllm.checkpoints.training.export import load_checkpoint, num_parameters
from minivllm.checkpoints.training.mtp import MTPLayer, unroll
from minivllm.checkpoints.training.tokenizer import token_bytes

NUM_DRAFTS = 3
_ROWS = 8
"""Rows of held-out text at a time."""
SAMPLES = (
    ("Once upon a time there was a", 0.8, 0),
    ("The old king called his three sons and said:", 0.8, 1),
    ("Deep in the forest, in a little house,", 0.8, 2),
    ("Once upon a time there was a", 0.0, 0),
)


def evaluate_checkpoint(
    directory: Path,
    tokenizer: Tokenizer,
    held_out: Stream,
    num_prompts: int = 64,
    prompt_length: int = 32,
    new_tokens: int = 128,
    sample_tokens: int = 120,
) -> dict[str, Any]:
    """Everything the model card reports, as JSON. `held_out` decides the device."""
    model, mtp = load_checkpoint(directory, held_out.ids.device)
    report: dict[str, Any] = {"parameters": num_parameters([model] if mtp is None else [model, mtp])}
    load = ExpertLoad(model, mtp)
    report["held_out"] = measure_held_out(model, mtp, tokenizer, held_out)
    report["experts"] = load_statistics(load.counts)
    load.close()
    if mtp is not None:
        fit = held_out.sequence_length - 2
        prompt_length, new_tokens = min(prompt_length, fit // 4), min(new_tokens, fit // 2)
        starts = held_out.held_out_starts()[:num_prompts]
        prompts = held_out.rows(starts)[:, :prompt_length]
        report["chains"] = {}
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            text = continue_ids(model, prompts, new_tokens, temperature, seed=0)
            report["chains"][name] = measure_chains(model, mtp, text, prompt_length)
    report["samples"] = write_samples(model.cpu(), tokenizer, min(sample_tokens, held_out.sequence_length // 2))
    return report


@torch.no_grad()
def measure_held_out(model: PreTrainedModel, mtp: MTPLayer | None, tokenizer: Tokenizer, held_out: Stream) -> dict:
    """Loss of the main model, and how often the first draft is the target's own choice."""
    lengths = torch.tensor(token_bytes(tokenizer), device=held_out.ids.device)
    nats = tokens = text_bytes = agreed = compared = 0
    for starts in held_out.held_out_starts().split(_ROWS):
        rows = held_out.rows(starts)
        hidden = model.model(input_ids=rows[:, :-2], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
        targets = rows[:, 1:-1]
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        tokens += targets.numel()
        text_bytes += lengths[targets].sum().item()
        if mtp is not None:
            drafts = model.lm_head(unroll(model, mtp, rows, hidden, 1)[0]).argmax(-1)
            agreed += (drafts[:, :-1] == logits.argmax(-1)[:, 1:]).sum().item()
            compared += drafts[:, :-1].numel()
    report = {"tokens": tokens, "loss": nats / tokens, "bits_per_byte": nats / math.log(2) / text_bytes}
    return report | ({"first_draft_accepted": agreed / compared} if compared else {})


def continue_ids(model: PreTrainedModel, prompts: Tensor, new_tokens: int, temperature: float, seed: int) -> Tensor:
    """prompts [B, P] -> [B, P + new_tokens], greedy at temperature 0; <eos> does not end a text."""
    torch.manual_seed(seed)
    model.generation_config.eos_token_id = None
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        pad_token_id=model.config.pad_token_id,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )


@torch.no_grad()
def measure_chains(model: PreTrainedModel, mtp: MTPLayer, text: Tensor, prompt_length: int) -> dict[str, Any]:
    """text [B, L], of which the first prompt_length tokens are not the model's own."""
    hidden = model.model(input_ids=text[:, :-2], use_cache=False).last_hidden_state
    outputs = unroll(model, mtp, text, hidden, NUM_DRAFTS)
    hits = torch.stack([model.lm_head(output).argmax(-1) == text[:, 2:] for output in outputs])
    return chain_statistics(hits.permute(1, 0, 2).tolist(), prompt_length)


def chain_statistics(hits: list[list[list[bool]]], prompt_length: int) -> dict[str, Any]:
    """hits[b][p][j]: pass p at position j predicts the text's token j + 2. Walks through each text as an engine does.

    The target has read position i and sampled token i + 1. Draft p + 1 comes from pass p at position i + p, and is
    looked at if all before it were right; after a accepted drafts and one token of the target's, i grows by a + 1.
    """
    num_drafts = len(hits[0])
    offered, accepted = [0] * num_drafts, [0] * num_drafts
    steps = 0
    for passes in hits:
        position = prompt_length - 1
        while position + num_drafts <= len(passes[0]):
            steps += 1
            right = 0
            while right < num_drafts:
                offered[right] += 1
                if not passes[right][position + right]:
                    break
                accepted[right] += 1
                right += 1
            position += right + 1
    return {
        "accepted": [a / n if n else 0.0 for a, n in zip(accepted, offered, strict=True)],
        "offered": offered,
        "tokens_per_step": 1 + sum(accepted) / steps if steps else 1.0,
    }


def write_samples(model: PreTrainedModel, tokenizer: Tokenizer, new_tokens: int) -> list[dict[str, Any]]:
    """Continuations on the CPU, where a seed gives the same text everywhere."""
    samples = []
    for prompt, temperature, seed in SAMPLES:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        text = tokenizer.decode(continue_ids(model, ids, new_tokens, temperature, seed)[0].tolist())
        samples.append({"prompt": prompt, "temperature": temperature, "seed": seed, "text": text})
    return samples
