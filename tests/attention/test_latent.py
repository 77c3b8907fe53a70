"""Which backend serves latent attention, and how contexts are cut into pieces."""

import pytest
import torch

from minivllm.attention.backend import ENVIRONMENT_VARIABLE
from minivllm.attention.latent import choose_latent_backend
from minivllm.attention.latent_triton import _merge, cut_contexts
from minivllm.attention.metadata import PagedRows
from minivllm.attention.reference import attend
from minivllm.config import ConfigError
from minivllm.layers.mla import MLAttention

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def layer(d_c=512, d_rope=64, d_nope=128, d_v=128) -> MLAttention:
    with torch.device("meta"):
        return MLAttention("layer", 16, d_nope, d_rope, d_v, d_c, scale=0.1)


def test_a_cpu_gets_torch_and_a_gpu_triton_where_triton_can_serve(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert choose_latent_backend("auto", CPU, layer(), 64).name == "torch"
    assert choose_latent_backend("auto", GPU, layer(), 64).name == "triton"
    assert choose_latent_backend("auto", GPU, layer(d_c=1024), 64).name == "torch"
    assert choose_latent_backend("auto", GPU, layer(), 8).name == "torch"


def test_the_environment_decides_where_the_config_says_auto(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    assert choose_latent_backend("auto", CPU, layer(), 64).name == "reference"
    assert choose_latent_backend("torch", CPU, layer(), 64).name == "torch"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "flash")
    with pytest.raises(ConfigError, match=rf"{ENVIRONMENT_VARIABLE} must be one of auto, .*'flash'"):
        choose_latent_backend("auto", CPU, layer(), 64)


@pytest.mark.parametrize(
    ("sizes", "block_size", "culprit"),
    [
        ({"d_c": 520}, 64, "kv_lora_rank that is a multiple of 16 up to 512, not 520"),
        ({"d_c": 1024}, 64, "kv_lora_rank"),
        ({"d_rope": 128}, 64, "qk_rope_head_dim that is a multiple of 16 up to 64"),
        ({"d_nope": 200}, 64, "qk_nope_head_dim [+] qk_rope_head_dim that is a multiple of 16 up to 256, not 264"),
        ({"d_v": 264}, 64, "v_head_dim"),
        ({}, 8, "block_size that is a power of two from 16 to 256 for latent attention, not 8"),
        ({}, 48, "block_size"),
        ({}, 512, "block_size"),
    ],
)
def test_triton_says_what_it_cannot_serve(sizes, block_size, culprit):
    with pytest.raises(ConfigError, match=f"attention_backend='triton' needs a {culprit}"):
        choose_latent_backend("triton", CPU, layer(**sizes), block_size)


def rows(query_lens, context_lens, block_size=4) -> PagedRows:
    """Request i owns the blocks from 100 i on, in falling order; tails of the table hold garbage."""
    width = -(-max(context_lens) // block_size)
    table = torch.full((len(query_lens), width), 2**31 - 1, dtype=torch.int32)
    for index, length in enumerate(context_lens):
        blocks = -(-length // block_size)
        table[index, :blocks] = 100 * index + torch.arange(blocks).flip(0)
    return PagedRows(
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_table=table,
        block_size=block_size,
        num_rows=sum(query_lens),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(context_lens),
        query_lens=query_lens,
        context_lens=context_lens,
    )


@pytest.mark.parametrize("piece_len", [1, 3, 7, 16, 100])
def test_pieces_hold_every_earlier_token_once_in_the_order_of_requests(piece_len):
    query_lens, context_lens = [3, 5, 2, 4], [10, 5, 9, 4]  # the second and the last have no earlier context
    chunks = rows(query_lens, context_lens)
    pieces = cut_contexts(chunks, piece_len)
    found = {index: [] for index in range(4)}
    for piece in pieces:
        assert len(piece.slots) == piece.cu_seqlens_k[-1] <= piece_len and piece.cu_seqlens_k[0] == 0
        assert piece.cu_seqlens_k.diff().max() <= piece.max_seqlen_k
        assert piece.cu_seqlens_k.dtype == torch.int32
        for index, part in enumerate(piece.slots.split(piece.cu_seqlens_k.diff().tolist())):
            found[index] += part.tolist()
    for index, (new, length) in enumerate(zip(query_lens, context_lens, strict=True)):
        table = chunks.block_table[index].tolist()
        assert found[index] == [table[position // 4] * 4 + position % 4 for position in range(length - new)]


def test_merging_two_halves_of_the_keys_gives_attention_over_all():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 2, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 8)
    whole, whole_lse = attend(q, k, v, 0.3)
    (first, first_lse), (second, second_lse) = (attend(q, k[part], v[part], 0.3) for part in (slice(4), slice(4, 12)))
    merged, lse = _merge(second, second_lse, first, first_lse)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_merging_with_no_keys_changes_nothing():
    torch.manual_seed(0)
    out, lse = attend(torch.randn(5, 2, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 8), 0.3)
    merged, merged_lse = _merge(out, lse, torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
