"""What crosses between GPUs in one step: pipeline stages against tensor-parallel ranks.

    pipeline   p - 1 sends of hidden and residual, [2, tokens, hidden_size], one after each stage but the last
    tensor     two all-reduces a layer, of [tokens, hidden_size] each: after attention and after the MLP
               (Megatron-LM, Shoeybi et al. 2019); a ring moves 2 (t - 1) / t of that over each rank's link

Embedding and head add little, and are left out.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Of one step: how often ranks must wait for each other, and the bytes that one rank's link carries."""

    num_exchanges: int
    bytes_per_link: int


def pipeline_traffic(num_tokens: int, hidden_size: int, num_stages: int, bytes_per_element: int = 2) -> Traffic:
    """One send after each stage but the last; the busiest link carries one of them."""
    if num_stages == 1:
        return Traffic(0, 0)
    return Traffic(num_stages - 1, 2 * num_tokens * hidden_size * bytes_per_element)


def tensor_traffic(
    num_tokens: int, hidden_size: int, num_layers: int, num_ranks: int, bytes_per_element: int = 2
) -> Traffic:
    """Two all-reduces a layer."""
    payload = num_tokens * hidden_size * bytes_per_element
    per_all_reduce = 2 * (num_ranks - 1) * payload // num_ranks
    return Traffic(0 if num_ranks == 1 else 2 * num_layers, 2 * num_layers * per_all_reduce)
