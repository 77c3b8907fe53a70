"""Experts: all at once as transformers computes them, and a load that is pulled towards the mean."""

import pytest
import torch
from tiny_training import VOCAB, deepseek
from transformers import AutoModelForCausalLM

from minivllm.checkpoints.training.balance import ExpertLoad, load_statistics
from minivllm.checkpoints.training.model import build_model, hidden_states, model_config, routers
from minivllm.checkpoints.training.mtp import MTPLayer, initialise


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build_model(model_config(deepseek(), VOCAB)).eval()


def test_all_experts_at_once_equal_transformers_loop(model):
    plain = AutoModelForCausalLM.from_config(
        model_config(deepseek(), VOCAB), experts_implementation="eager", dtype=torch.float32
    ).eval()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(3, VOCAB, (3, 17))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=1e-5)
    for some in (model, plain):
        some.zero_grad()
        some(input_ids=ids, labels=ids).loss.backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_bias_rises_for_experts_with_little_load_and_falls_for_those_with_much(model):
    load = ExpertLoad(model, None)
    (name,) = load.routers
    assert name == "model.layers.1.mlp.gate"
    load.counts[name] = torch.tensor([8, 0, 4, 5, 4, 4, 4, 3])
    load.update_biases(0.25)
    bias = load.routers[name].e_score_correction_bias
    assert bias.tolist() == [-0.25, 0.25, 0.0, -0.25, 0.0, 0.0, 0.0, 0.25]


def test_an_expert_that_all_tokens_choose_loses_its_crowd(model):
    load = ExpertLoad(model, None)
    (router,) = load.routers.values()
    router.e_score_correction_bias[3] = 1.0
    ids = torch.randint(3, VOCAB, (4, 32))

    def most() -> float:
        load.reset()
        with torch.no_grad():
            hidden_states(model, ids)
        return load_statistics(load.counts)["model.layers.1.mlp.gate"]["max"]

    assert most() == 4.0  # each token takes 2 of 8 experts: one that all take has four times the mean
    for _ in range(150):
        most()
        load.update_biases(0.01)
    assert most() < 1.5


def test_counts_are_those_of_the_routers_and_the_sequence_loss_is_its_formula(model):
    load = ExpertLoad(model, None)
    seen = []
    (router,) = routers(model).values()
    router.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].shape, output[0], output[2])))
    hidden_states(model, torch.randint(3, VOCAB, (2, 5)))
    ((shape, logits, chosen),) = seen
    assert shape[:2] == (2, 5)
    assert load.counts["model.layers.1.mlp.gate"].tolist() == torch.bincount(chosen.flatten(), minlength=8).tolist()

    expected = 0.0
    scores, chosen = logits.sigmoid().view(2, 5, 8), chosen.view(2, 5, 2)
    for sequence in range(2):
        for expert in range(8):
            fraction = 8 / (2 * 5) * (chosen[sequence] == expert).sum()
            share = (scores[sequence, :, expert] / scores[sequence].sum(-1)).mean()
            expected += fraction * share / 2
    torch.testing.assert_close(load.sequence_loss(), expected)
    load.reset()
    assert load.sequence_loss() == 0


def test_the_mtp_layers_router_is_watched_under_its_name_in_the_checkpoint(model):
    mtp = MTPLayer(model.config)
    initialise(mtp, model)
    assert set(ExpertLoad(model, mtp).routers) == {"model.layers.1.mlp.gate", "model.layers.2.mlp.gate"}


def test_routers_stay_in_float32_under_autocast(model):
    (router,) = routers(model).values()
    hidden = torch.randn(1, 40, 32)
    expected = router(hidden)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(hidden)[0], expected)


def test_idle_experts_are_counted():
    statistics = load_statistics({"gate": torch.tensor([0, 1, 99, 100])})
    assert statistics == {"gate": {"min": 0.0, "max": 2.0, "idle": 2}}
