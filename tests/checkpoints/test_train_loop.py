"""The loop: the loss falls, a resumed run is the uninterrupted one, the best weights are kept."""

from dataclasses import replace

import pytest
import torch
from tiny_training import VOCAB, corpus, deepseek, qwen3

from minivllm.checkpoints import CheckpointError
from minivllm.checkpoints.training.data import Stream
from minivllm.checkpoints.training.loop import Trainer


@pytest.fixture(scope="module")
def texts():
    return corpus()


def trainer(recipe, texts, state_file):
    train, held_out = (Stream(ids, recipe.sequence_length) for ids in (texts.train, texts.held_out))
    return Trainer(recipe, train, held_out, VOCAB, state_file)


def weights(trained) -> dict:
    return {name: tensor.clone() for name, tensor in trained.modules.state_dict().items()}


@pytest.mark.parametrize("make", [deepseek, qwen3])
def test_the_loss_falls_for_the_main_model_and_every_pass(texts, tmp_path, make):
    run = trainer(make(steps=60, eval_every=20, dropout=0.0), texts, tmp_path / "state.pt")
    before = run.evaluate()
    run.run(progress_bar=False)
    after = run.evaluate()
    assert len(after) == 1 + run.recipe.mtp_passes
    assert all(late < early - 1.0 for early, late in zip(before, after, strict=True))


def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(texts, tmp_path):
    recipe = deepseek(steps=10, eval_every=4, dropout=0.2)
    whole = trainer(recipe, texts, tmp_path / "whole.pt")
    whole.run(progress_bar=False)

    first = trainer(recipe, texts, tmp_path / "state.pt")
    first.run(stop_at=5, progress_bar=False)
    assert first.progress.step == 5 and not first.progress.stopped
    torch.manual_seed(99)  # whatever happened in between
    second = trainer(recipe, texts, tmp_path / "state.pt")
    second.load_state()
    second.run(progress_bar=False)

    assert second.progress.held_out == whole.progress.held_out
    expected, found = weights(whole), weights(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert any(name.endswith("e_score_correction_bias") and tensor.any() for name, tensor in found.items())


def test_a_state_of_another_recipe_is_refused_by_the_field_that_differs(texts, tmp_path):
    recipe = deepseek()
    trainer(recipe, texts, tmp_path / "state.pt").run(stop_at=1, progress_bar=False)
    other = trainer(replace(recipe, weight_decay=0.5), texts, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"another config \(weight_decay 0\.3 there, 0\.5 asked for\)"):
        other.load_state()


def test_training_ends_when_the_held_out_loss_stops_falling_and_the_best_weights_are_kept(texts, tmp_path, monkeypatch):
    run = trainer(deepseek(steps=100, eval_every=1, patience=3), texts, tmp_path / "state.pt")
    losses, kept = iter([5.0, 4.0, 4.5, 4.2, 4.1, 3.0]), []

    def evaluate():
        kept.append(weights(run))
        return [next(losses)]

    monkeypatch.setattr(run, "evaluate", evaluate)
    progress = run.run(progress_bar=False)
    assert (progress.stopped, progress.step, progress.best_step) == ("the held-out loss had stopped falling", 5, 2)
    final = weights(run)
    assert all(torch.equal(final[name], kept[1][name]) for name in final)
    assert any(not torch.equal(final[name], kept[4][name]) for name in final)


def test_a_run_ends_in_its_minutes_with_the_learning_rate_at_its_end(texts, tmp_path, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr("minivllm.checkpoints.training.loop.time.monotonic", lambda: float(next(clock)))
    run = trainer(deepseek(steps=100_000, eval_every=1000), texts, tmp_path / "state.pt")
    progress = run.run(max_minutes=1.0, progress_bar=False)
    assert progress.stopped == "the time was used up"
    assert 10 < progress.step < 60
    assert progress.held_out[-1]["step"] == progress.step
    assert progress.curve[-1]["lr"] < 0.15 * run.recipe.learning_rate


def test_the_learning_rate_warms_up_and_falls_to_a_tenth(texts, tmp_path):
    run = trainer(deepseek(steps=100, warmup_steps=10, learning_rate=1.0), texts, tmp_path / "state.pt")
    assert run.learning_rate(0.0) == pytest.approx(0.1)
    run.progress.step = 50
    assert run.learning_rate(0.5) == pytest.approx(0.55)
    assert run.learning_rate(1.0) == run.learning_rate(1.3) == pytest.approx(0.1)


def test_a_loss_that_is_not_finite_ends_the_run_by_name(texts, tmp_path):
    run = trainer(deepseek(steps=40), texts, tmp_path / "state.pt")
    with torch.no_grad():
        run.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="nano: the loss is nan at step 20; lower the learning rate"):
        run.run(progress_bar=False)


def test_dropout_is_on_in_training_and_off_in_evaluation(texts, tmp_path):
    run = trainer(deepseek(dropout=0.5), texts, tmp_path / "state.pt")
    rows = run.batches.batch(0)
    run.modules.train()
    assert not torch.equal(run.losses(rows)[0], run.losses(rows)[0])
    assert run.evaluate() == run.evaluate()


def test_matrices_decay_and_norms_do_not(texts, tmp_path):
    run = trainer(deepseek(weight_decay=0.3), texts, tmp_path / "state.pt")
    decayed, rest = run.optimizer.param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in rest["params"]} == {1}
    counted = len(decayed["params"]) + len(rest["params"])
    assert counted == len({id(p) for p in run.modules.parameters()})
