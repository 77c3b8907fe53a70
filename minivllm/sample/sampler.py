"""Choosing the next token: logits [B, V] in, one token id a row out.

```
    logits -> penalties -> min_tokens -> (greedy: argmax)
                                      -> temperature -> min_p -> top-k -> top-p -> probabilities -> one draw
```

Rows of one batch may ask for different things; a step that nobody asks for is skipped. A draw needs a single random
number: it is the token at which the running sum of the probabilities passes u (inverse transform sampling).
"""

from dataclasses import dataclass, field

import torch

from minivllm.layers import use_fused_kernels
from minivllm.sample.random import Purpose, uniform

_CHUNK = 128
# Below it, logits divided by the temperature could leave the range of float32; there it is greedy long since.
_LOWEST_TEMPERATURE = 1e-30


@dataclass
class SamplingMetadata:
    """What the B rows of a step ask for. Tensors are [B] on the device; flags are known on the host.

    The flags let a step skip what no row needs without asking the device.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    all_greedy: bool
    all_random: bool
    max_top_k: int
    """Largest top_k if every row that samples has one, else 0."""
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    penalties: "list[PenaltyRow]" = field(default_factory=list)
    banned_token_ids: list[tuple[int, list[int]]] = field(default_factory=list)
    """(row, ids that must not come yet), for rows below their min_tokens."""

    @property
    def asks_for_temperature_alone(self) -> bool:
        """Whether some rows are random, and none wants its distribution changed in any other way."""
        changed = self.any_top_k or self.any_top_p or self.any_min_p or self.penalties or self.banned_token_ids
        return not self.all_greedy and not changed


@dataclass
class PenaltyRow:
    """A row with penalties: what its prompt and its output hold."""

    row: int
    prompt_mask: torch.Tensor
    output_counts: torch.Tensor
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


class Sampler:
    """Stateless: everything it needs is in the metadata."""

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """logits [B, V] of any floating dtype (may be overwritten) -> token ids [B] int64."""
        if metadata.asks_for_temperature_alone and use_fused_kernels(logits):
            from minivllm.sample.fused import sample_rows

            seeds, positions = metadata.seeds, metadata.positions
            return sample_rows(logits, metadata.temperature, seeds, positions, _LOWEST_TEMPERATURE)
        logits = process(logits.float(), metadata)
        if metadata.all_greedy:
            return logits.argmax(dim=-1)
        u = uniform(metadata.seeds, metadata.positions, Purpose.SAMPLE)
        sampled = draw(probabilities(logits, metadata), u)
        if metadata.all_random:
            return sampled
        return torch.where(metadata.temperature == 0, logits.argmax(dim=-1), sampled)


def process(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Penalties and min_tokens, in place: what greedy rows take the argmax of."""
    logits = apply_penalties(logits, metadata.penalties)
    for row, token_ids in metadata.banned_token_ids:
        logits[row, token_ids] = float("-inf")
    return logits


def apply_penalties(logits: torch.Tensor, rows: list[PenaltyRow]) -> torch.Tensor:
    """Make tokens that were seen less likely (repetition: CTRL, Keskar et al. 2019), in place."""
    for penalty in rows:
        row = logits[penalty.row]
        seen = penalty.prompt_mask | (penalty.output_counts > 0)
        factor = torch.where(row > 0, 1 / penalty.repetition_penalty, penalty.repetition_penalty)
        row = torch.where(seen, row * factor, row)
        row = row - penalty.frequency_penalty * penalty.output_counts
        logits[penalty.row] = row - penalty.presence_penalty * (penalty.output_counts > 0)
    return logits


def probabilities(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """What a row samples from, after temperature, min_p, top-k and top-p: [B, V] float32, rows sum to 1.

    Greedy rows (temperature 0) get the plain softmax; nobody draws from it.
    """
    temperature = torch.where(metadata.temperature == 0, 1.0, metadata.temperature.clamp(min=_LOWEST_TEMPERATURE))
    logits = logits / temperature[:, None]
    if metadata.any_min_p:
        # p < min_p * p_max is, in logits, a distance from the largest one.
        floor = logits.amax(dim=-1, keepdim=True) + metadata.min_p[:, None].log()
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if metadata.any_top_k or metadata.any_top_p:
        logits = _keep_top(logits, metadata)
    return logits.softmax(dim=-1)


def _keep_top(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Mask all but the top k, and of those all but the nucleus of mass top_p (Holtzman et al. 2020).

    Both look at tokens from the most likely down, and both come down to a smallest logit that stays; tokens that tie
    with it stay too, so what a row keeps does not depend on how a sort orders equals. If every row has a k, only the
    largest k tokens need sorting.
    """
    vocab_size = logits.shape[-1]
    num_sorted = min(metadata.max_top_k or vocab_size, vocab_size)
    values = logits.topk(num_sorted, dim=-1).values
    rank = torch.arange(num_sorted, device=logits.device)
    top_k = torch.where(metadata.top_k == 0, vocab_size, metadata.top_k)
    is_out = rank >= top_k[:, None]
    if metadata.any_top_p:
        p = values.masked_fill(is_out, float("-inf")).softmax(dim=-1)
        mass_before = p.cumsum(dim=-1) - p
        # The most likely token always stays, whatever rounding makes of a tiny top_p.
        is_out |= (mass_before >= metadata.top_p[:, None]) & (rank > 0) & (metadata.top_p < 1)[:, None]
    smallest_kept = values.masked_fill(is_out, float("inf")).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < smallest_kept, float("-inf"))


def draw(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of p passes u: p [B, V], rows need not sum to 1; u [B] float64 in [0, 1).

    The sum is taken in two levels, chunks first and then within one chunk, so that only one pass touches all of p.
    A token of probability 0 is never drawn.

    Returns:
        [B] int64.
    """
    num_rows, vocab_size = p.shape
    num_chunks = -(-vocab_size // _CHUNK)
    if padding := num_chunks * _CHUNK - vocab_size:
        p = torch.nn.functional.pad(p, (0, padding))
    chunks = p.view(num_rows, num_chunks, _CHUNK)
    chunk_sums = chunks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = u[:, None] * chunk_sums[:, -1:]
    chunk, target = _first_above(chunk_sums, target)
    before = torch.where(chunk > 0, chunk_sums.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK))[:, 0].double().cumsum(dim=-1)
    offset, _ = _first_above(inside, target - before)
    return (chunk * _CHUNK + offset)[:, 0]


def _first_above(sums: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the first running sum above the target [B, 1], which rounding may have pushed to the very end."""
    below_end = torch.nextafter(sums[:, -1:], torch.zeros_like(target))
    target = torch.minimum(target, below_end)
    index = torch.searchsorted(sums, target, right=True)
    return index.clamp(max=sums.shape[-1] - 1), target
