"""Log-probabilities as users ask for them: of the raw model, before any processor touched the logits."""

import torch

from minivllm.engine.messages import TokenLogprobs


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """For each row the given token's log-probability and rank, and those of the most likely tokens.

    Args:
        logits: [N, V], raw.
        token_ids: [N] int64, the sampled token or the next prompt token.
        num_top: for each row, how many of the most likely tokens to report.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    rank = (logprobs > own).sum(dim=-1) + 1
    # Every row is cut from the longest list that any row asks for.
    top_values, top_ids = logprobs.topk(min(max(num_top), logprobs.shape[-1]), dim=-1)
    columns = zip(
        token_ids.tolist(), own[:, 0].tolist(), rank.tolist(), top_ids.tolist(), top_values.tolist(), num_top,
        strict=True,
    )  # fmt: skip
    return [
        TokenLogprobs([token_id, *ids[:count]], [value, *values[:count]], rank)
        for token_id, value, rank, ids, values, count in columns
    ]
