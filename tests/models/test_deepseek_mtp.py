"""Multi-token prediction against transformers' own layer, under the three rules that training shares."""

import pytest
import torch
from cached_forward import CachedForward
from safetensors.torch import load_file, save_file
from tiny_deepseek import YARN, add_mtp_layers, random_prompt, save_deepseek

from minivllm.checkpoints import CheckpointError
from minivllm.models.registry import load_model, load_mtp

TOLERANCE = 5e-5


@pytest.fixture
def checkpoint(tmp_path):
    """(directory, transformers' target, transformers' MTP layers): two of those."""
    target = save_deepseek(tmp_path, num_nextn_predict_layers=2, rope_parameters=YARN)
    return tmp_path, target, add_mtp_layers(tmp_path, target, std=0.2, seed=0)


def loaded(directory):
    target, config = load_model(directory)
    return target, load_mtp(directory, target, config)


@torch.no_grad()
def expected_hidden(target, mtp, layer, token_ids, positions, hidden):
    """What transformers' MTP layer makes of a whole request, with the embedding zeroed at position 0."""
    embedded = target.get_input_embeddings()(token_ids).masked_fill((positions == 0)[:, None], 0.0)
    return mtp.forward_layer(
        layer, hidden[None], position_ids=positions[None], mtp_cache=None, inputs_embeds=embedded[None]
    )[0]


def test_every_pass_gives_the_hidden_states_and_logits_of_transformers(checkpoint):
    """Prompt, chunk and decodes of the first pass; then passes that are fed their own output, on either layer."""
    directory, reference, reference_mtp = checkpoint
    _, mtp = loaded(directory)
    token_ids = torch.tensor(random_prompt(24, 0))
    positions = torch.arange(24)
    with torch.inference_mode():
        hidden = reference.model(token_ids[None]).last_hidden_state[0]
    tokens = token_ids.roll(-1)  # the layer reads the token behind the one that h belongs to
    cached = CachedForward(mtp.attention_layers())
    for step in range(3):
        rows, start = [], 0
        for count in (9, 1, 12, 1, 1):
            part = slice(start, start + count)
            rows.append(
                cached.run(lambda p, part=part: mtp(tokens[part], p, hidden[part], step), start, count)  # noqa: B023
            )
            start += count
        got = torch.cat(rows)
        expected = expected_hidden(reference, reference_mtp, step % 2, tokens, positions, hidden)
        assert (got - expected).abs().max() < TOLERANCE
        with torch.inference_mode():
            logits = mtp.compute_logits(got, step)
            assert (logits - reference.lm_head(expected)).abs().max() < TOLERANCE
        hidden = got


def test_the_embedding_counts_everywhere_but_at_position_0(checkpoint):
    directory, _, _ = checkpoint
    _, mtp = loaded(directory)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    outputs = []
    for first, second in ((1, 2), (9, 2), (1, 9)):
        tokens = torch.tensor([first, second, 3, 4])
        cached = CachedForward(mtp.attention_layers())
        outputs.append(cached.run(lambda p, tokens=tokens: mtp(tokens, p, hidden), 0, 4))
    same, first_changed, second_changed = outputs
    torch.testing.assert_close(first_changed, same)
    torch.testing.assert_close(second_changed[0], same[0])
    assert (second_changed[1] - same[1]).abs().max() > 0.1


def test_the_main_model_is_the_same_with_and_without_mtp_layers_in_its_checkpoint(checkpoint):
    directory, reference, _ = checkpoint
    model, _ = load_model(directory)
    assert not any(name.startswith("layers.3") for name, _ in model.named_parameters())
    token_ids = torch.tensor(random_prompt(20, 0))
    cached = CachedForward(model.attention_layers())
    hidden = cached.run(lambda p: model(token_ids, p), 0, 20)
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
    assert (model.compute_logits(hidden) - expected).abs().max() < TOLERANCE


def test_an_embedding_and_a_head_of_its_own_are_used_and_absent_ones_are_the_targets(checkpoint):
    directory, _, _ = checkpoint
    target, mtp = loaded(directory)
    assert all(layer.embed_tokens is not target.embed_tokens for layer in mtp.layers)
    edit(directory, lambda t: [t.pop(name) for name in list(t) if "embed_tokens" in name and "layers.4" in name])
    edit(directory, lambda t: [t.pop(name) for name in list(t) if "shared_head.head" in name and "layers.3" in name])
    target, mtp = loaded(directory)
    assert [layer.embed_tokens is target.embed_tokens for layer in mtp.layers] == [False, True]
    assert [layer.head is target.lm_head for layer in mtp.layers] == [True, False]
    hidden = torch.randn(3, 64)
    with torch.inference_mode():
        torch.testing.assert_close(mtp.compute_logits(hidden, 0), mtp.compute_logits(hidden, 1))
    changed = "model.layers.4.shared_head.head.weight"
    edit(directory, lambda t: t.update({changed: t[changed] * 2}))
    _, mtp = loaded(directory)
    with torch.inference_mode():
        torch.testing.assert_close(mtp.compute_logits(hidden, 0) * 2, mtp.compute_logits(hidden, 1))


def test_attention_layers_have_names_of_their_own(checkpoint):
    directory, _, _ = checkpoint
    target, mtp = loaded(directory)
    names = [layer.layer_name for layer in target.attention_layers() + mtp.attention_layers()]
    assert names == [f"model.layers.{index}.self_attn" for index in range(5)]


def test_dummy_weights_need_a_config_only_and_leave_the_target_alone(checkpoint):
    directory, _, _ = checkpoint
    (directory / "model.safetensors").unlink()
    target, config = load_model(directory, load_format="dummy", dtype="bfloat16")
    before = target.embed_tokens.weight.clone()
    mtp = load_mtp(directory, target, config, load_format="dummy", seed=1)
    assert torch.equal(target.embed_tokens.weight, before)
    assert {weight.dtype for name, weight in mtp.named_parameters() if "gate" not in name} == {torch.bfloat16}
    hidden = torch.randn(4, 64, dtype=torch.bfloat16)
    cached = CachedForward(mtp.attention_layers())
    cached.caches = {name: cache.bfloat16() for name, cache in cached.caches.items()}
    assert torch.isfinite(cached.run(lambda p: mtp(torch.arange(4), p, hidden), 0, 4)).all()


def test_asking_for_layers_that_the_config_does_not_have_is_refused(tmp_path):
    for version, said in ((3, "num_nextn_predict_layers 0"), (2, "num_nextn_predict_layers None")):
        save_deepseek(tmp_path / str(version), version)
        target, config = load_model(tmp_path / str(version))
        with pytest.raises(CheckpointError, match=f"has no MTP layers .*'DeepseekV{version}ForCausalLM', {said}"):
            load_mtp(tmp_path / str(version), target, config)


def test_asking_for_layers_that_the_checkpoint_does_not_have_is_refused(tmp_path):
    save_deepseek(tmp_path, num_nextn_predict_layers=1)
    target, config = load_model(tmp_path)  # which does not miss them
    with pytest.raises(
        CheckpointError, match=r"num_nextn_predict_layers 1, but no tensor's name begins with 'model\.lay"
    ):
        load_mtp(tmp_path, target, config)


def test_a_tensor_that_an_mtp_layer_lacks_is_named_and_one_too_many_too(checkpoint):
    directory, _, _ = checkpoint

    def spoil(tensors):
        del tensors["model.layers.4.eh_proj.weight"]
        tensors["model.layers.3.extra"] = torch.zeros(1)

    edit(directory, spoil)
    target, config = load_model(directory)
    with pytest.raises(CheckpointError) as error:
        load_mtp(directory, target, config)
    assert "missing: model.layers.4.eh_proj.weight." in str(error.value)
    assert "unexpected: model.layers.3.extra" in str(error.value)


def test_a_layer_behind_the_last_mtp_layer_is_unexpected(checkpoint):
    directory, _, _ = checkpoint
    edit(directory, lambda t: t.update({"model.layers.5.enorm.weight": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.5\.enorm\.weight"):
        load_model(directory)


def edit(directory, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
