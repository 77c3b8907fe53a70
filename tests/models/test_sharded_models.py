"""A model divided between ranks is the same model: logits of prompts, chunks and decodes, and what the ranks send.

Ranks are threads of this process. In float32 the division changes the order of sums and nothing else: logits move by
some units in the last place of numbers whose size is that of the residual stream, while one head, column or expert that
is missing, doubled or swapped moves them by as much as they are large.
"""

import pytest
import torch
from cached_forward import STEPS, CachedForward, logits_in_steps
from rank_models import NUM_TOKENS, ids_below, load_ranks, logits_of
from safetensors.torch import load_file, save_file
from tiny_deepseek import V3, save_deepseek
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from minivllm.checkpoints import CheckpointError
from minivllm.layers.embedding import LMHead, VocabEmbedding
from minivllm.layers.linear import RowParallelLinear
from minivllm.models.registry import load_model, load_mtp
from minivllm.moe.layer import RoutedExperts
from minivllm.worker.tensor_parallel import ThreadGroup, Traffic, run_ranks

TOLERANCE = 2e-5
"""Of the largest logit: 170 units in the last place, for sums of a few hundred numbers in some ten layers in a row."""


def compare(path, size, vocab_size, tolerance=TOLERANCE, **settings):
    """Asserts that every rank gets the whole model's logits, and all ranks the same bits."""
    ids = ids_below(vocab_size)
    whole, _ = load_model(path, **{"dtype": "float32", **settings})
    expected = logits_in_steps(whole, ids)
    models, groups = load_ranks(path, size, **settings)
    results = run_ranks(logits_of, groups, models, [ids] * size)
    assert results[0].shape == expected.shape == (NUM_TOKENS, vocab_size)
    assert (results[0] - expected).abs().max() < tolerance * expected.abs().max()
    assert all(torch.equal(result, results[0]) for result in results)
    return models, groups


FAMILIES = {
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "num_key_value_heads": 4}),
    "mqa": (LlamaConfig, {"num_key_value_heads": 1, "num_attention_heads": 8}),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_gets_the_logits_of_the_whole_model(save_checkpoint, family, size):
    config_class, settings = FAMILIES[family]
    path, _ = save_checkpoint(config_class, **settings)
    compare(path, size, 300)


DEEPSEEK = {
    "v3": (3, {}),
    "v3-tied-without-lora": (3, {"q_lora_rank": None, "tie_word_embeddings": True}),
    "v2": (2, {}),
    "v2-greedy": (2, {"n_shared_experts": 1, "topk_method": "greedy"}),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", DEEPSEEK)
def test_every_rank_gets_the_logits_of_the_whole_deepseek_model(tmp_path, kind, size):
    version, settings = DEEPSEEK[kind]
    save_deepseek(tmp_path, version, **settings)
    models, _ = compare(tmp_path, size, 160)
    experts = [m for m in models[-1].modules() if isinstance(m, RoutedExperts)]
    assert [len(layer.gate_up) for layer in experts] == [8 // size] * 2


@pytest.mark.parametrize("size", [2, 4])
def test_the_mtp_layers_are_divided_like_their_target(tmp_path, size):
    save_deepseek(tmp_path, mtp_layers=1)
    ids = ids_below(160)
    hidden = torch.randn(NUM_TOKENS, 64, generator=torch.Generator().manual_seed(2))

    @torch.inference_mode()
    def drafts(group, mtp):
        cached, rows, start = CachedForward(mtp.attention_layers()), [], 0
        for count in STEPS:
            part = slice(start, start + count)
            rows.append(cached.run(lambda p, part=part: mtp(ids[part], p, hidden[part]), start, count))
            start += count
        return mtp.compute_logits(torch.cat(rows))

    def load(group=None):
        return load_mtp(tmp_path, *load_model(tmp_path, dtype="float32", tensor_parallel=group))

    groups = ThreadGroup.create(size)
    expected = drafts(None, load())
    for got in run_ranks(drafts, groups, [load(group) for group in groups]):
        assert (got - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [3, 301])
def test_a_vocabulary_that_ranks_do_not_divide_is_padded(save_checkpoint, vocab_size, tied):
    path, _ = save_checkpoint(vocab_size=vocab_size, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None)
    models, _ = compare(path, 4, vocab_size)
    embeddings = [model.embed_tokens.weight for model in models]
    assert all(len(weight) == -(-vocab_size // 4) for weight in embeddings)
    stored = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    rows = torch.cat(list(embeddings))
    assert torch.equal(rows[:vocab_size], stored) and not rows[vocab_size:].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_a_part_each_and_together_all_of_it(save_checkpoint, family):
    """What a rank holds of a divided layer is 1 / size of it; KV heads are held twice where there are too few."""
    config_class, settings = FAMILIES[family]
    path, model = save_checkpoint(config_class, **settings)
    models, _ = load_ranks(path, 2)
    kv_heads = model.config.num_key_value_heads
    assert {layer.num_kv_heads for rank in models for layer in rank.attention_layers()} == {max(1, kv_heads // 2)}
    for rank in models:
        for layer in rank.layers:
            assert layer.mlp.gate_up_proj.outputs.size == 96
            assert layer.mlp.down_proj.inputs == (96, 48 * rank.tensor_parallel.rank, 48)


def test_a_step_sends_two_sums_a_layer_one_for_the_embedding_and_the_logits(save_checkpoint):
    path, _ = save_checkpoint(num_hidden_layers=3, vocab_size=301)
    _, groups = compare(path, 2, 301)
    sums = 2 * 3 + 1
    for group in groups:
        assert group.traffic == {
            "all_reduce": Traffic(len(STEPS) * sums, sums * NUM_TOKENS * 64 * 4),
            "all_gather": Traffic(len(STEPS), NUM_TOKENS * 151 * 4),
        }


def test_a_mixture_of_experts_sends_no_more_than_an_mlp(tmp_path):
    save_deepseek(tmp_path)
    _, groups = compare(tmp_path, 2, 160)
    sums = 2 * V3["num_hidden_layers"] + 1
    assert groups[1].traffic["all_reduce"] == Traffic(len(STEPS) * sums, sums * NUM_TOKENS * 64 * 4)


def test_a_single_rank_is_built_of_the_layers_that_there_were_and_sends_nothing(tmp_path):
    save_deepseek(tmp_path)
    (model,), (group,) = load_ranks(tmp_path, 1)
    logits_of(group, model, ids_below(160))
    assert group.traffic == {}
    for module in model.modules():
        if isinstance(module, RowParallelLinear | VocabEmbedding | LMHead):
            assert module.group is None


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_are_parts_of_the_same_model(tmp_path, size):
    save_deepseek(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    compare(tmp_path, size, 160, load_format="dummy", seed=3)


def test_a_tensor_that_another_rank_reads_must_be_in_the_checkpoint(tmp_path):
    save_deepseek(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = tensors.pop("model.layers.2.mlp.experts.7.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert gone.shape == (32, 64)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.mlp\.experts\.7\.up_proj\.weight"):
        load_model(tmp_path, tensor_parallel=ThreadGroup.create(2)[0])


TWELVE_HEADS = {"num_attention_heads": 12, "head_dim": 8, "hidden_size": 96}


@pytest.mark.parametrize(
    ("size", "settings", "culprit"),
    [
        (3, {}, "tensor_parallel_size=3 does not divide num_attention_heads=4: use a divisor, 1, 2, 4"),
        (4, {**TWELVE_HEADS, "num_key_value_heads": 3}, "neither a divisor nor a multiple of num_key_value_heads=3"),
        (4, {**TWELVE_HEADS, "num_key_value_heads": 6}, "tensor_parallel_size=4 does not divide num_key_value_heads=6"),
        (4, {"intermediate_size": 90}, "intermediate_size=90"),
    ],
)
def test_ranks_that_do_not_divide_a_model_are_refused_by_name(save_checkpoint, size, settings, culprit):
    path, _ = save_checkpoint(**settings)
    with pytest.raises(ValueError, match=culprit):
        load_ranks(path, size)


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ({"n_routed_experts": 6, "n_group": 1}, "n_routed_experts=6"),
        ({"moe_intermediate_size": 30}, r"n_shared_experts \* moe_intermediate_size=30"),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused_by_name(tmp_path, settings, culprit):
    save_deepseek(tmp_path, **settings)
    with pytest.raises(ValueError, match=f"tensor_parallel_size=4 does not divide {culprit}"):
        load_ranks(tmp_path, 4)
