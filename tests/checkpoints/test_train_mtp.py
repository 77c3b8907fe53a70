"""The MTP layer's passes: which token is fed and which is the target, who attends to whom, and what a chain counts."""

from types import SimpleNamespace

import pytest
import torch
from tiny_training import VOCAB, deepseek

from minivllm.checkpoints.training.evaluate import chain_statistics
from minivllm.checkpoints.training.model import build_model, hidden_states, model_config
from minivllm.checkpoints.training.mtp import MTPLayer, distillation_loss, initialise, pass_loss, pass_mask, unroll


class Notebook:
    """In place of an MTP layer: writes down what it is fed, and marks its output with the pass."""

    def __init__(self):
        self.fed = []

    def __call__(self, embeddings, hidden, rotary, mask, passes):
        self.fed.append((embeddings[0, :, 0].tolist(), hidden[0, :, 0].tolist(), rotary[0].tolist()))
        return torch.arange(embeddings.shape[1]).view(1, -1, 1) + 100.0 * len(self.fed)


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    config = model_config(deepseek(), VOCAB)
    model, mtp = build_model(config).eval(), MTPLayer(config).eval()
    initialise(mtp, model)
    return model, mtp


def test_the_three_passes_of_a_hand_worked_row():
    # Tokens are named by their places: the row is x0 .. x5, so T = 4, and the embedding of x_i is i + 10.
    rows = torch.tensor([[0, 1, 2, 3, 4, 5]])
    model = SimpleNamespace(
        get_input_embeddings=lambda: lambda ids: ids[..., None] + 10.0,
        model=SimpleNamespace(rotary_emb=lambda _, position_ids: (position_ids[0], position_ids[0])),
    )
    target_hidden = torch.tensor([[[50.0], [51.0], [52.0], [53.0]]])
    notebook = Notebook()
    unroll(model, notebook, rows, target_hidden, num_passes=3)
    tokens = [0.0, 12.0, 13.0, 14.0]  # x1 at position 0 is zeroed; then x2, x3, x4 at positions 1, 2, 3
    positions = [0, 1, 2, 3]
    assert notebook.fed == [
        (tokens, [50.0, 51.0, 52.0, 53.0], positions),  # h0 .. h3 of the target
        (tokens, [0.0, 100.0, 101.0, 102.0], positions),  # own output of pass 1, one position earlier
        (tokens, [0.0, 200.0, 201.0, 202.0], positions),  # own output of pass 2, one position earlier
    ]


@pytest.mark.parametrize("index, targets", [(0, [2, 3, 4, 5]), (1, [3, 4, 5]), (2, [4, 5])])
def test_position_j_predicts_token_j_plus_2_from_position_of_the_pass_on(index, targets):
    rows = torch.tensor([[0, 1, 2, 3, 4, 5]])
    logits = torch.zeros(1, 4, 6)
    logits[0, torch.arange(index, 4), targets] = 50.0
    assert pass_loss(logits, rows, index) < 1e-6
    assert pass_loss(logits.roll(1, dims=1), rows, index) > 10


@pytest.mark.parametrize("index", [0, 1, 2])
def test_position_j_is_taught_by_the_targets_position_j_plus_1(index):
    target = 40.0 * torch.nn.functional.one_hot(torch.tensor([[7, 2, 3, 4, 5]]), 8).float()
    drafts = torch.zeros(1, 5, 8, requires_grad=True)
    with torch.no_grad():
        drafts[0, torch.arange(4), [2, 3, 4, 5]] = 40.0
    assert distillation_loss(drafts, target, index) < 1e-6
    assert distillation_loss(drafts.roll(1, dims=1), target, index) > 10
    assert distillation_loss(drafts.roll(-1, dims=1), target, index) > 10
    target.requires_grad_()
    distillation_loss(drafts, target, index).backward()
    assert drafts.grad is not None and target.grad is None


def test_masks_of_four_positions():
    def drawn(index):
        return ["".join("x" if seen else "." for seen in row) for row in pass_mask(4, index, torch.device("cpu"))[0, 0]]

    assert drawn(0) == ["x...", "xx..", "xxx.", "xxxx"]
    #       positions of pass 1, then of pass 2
    assert drawn(1) == ["...." + "x...", "x..." + ".x..", "xx.." + "..x.", "xxx." + "...x"]
    #       of pass 1, of pass 2, of pass 3
    assert drawn(2) == [
        "...." + "...." + "x...",
        "...." + "x..." + ".x..",
        "x..." + ".x.." + "..x.",
        "xx.." + "..x." + "...x",
    ]


class OneSlotAPosition:
    """The cache of an engine: one row a position, later passes behind the accepted ones."""

    def __init__(self):
        self.rows = None

    def update(self, *new_and_layer, **_):
        new = new_and_layer[:2]
        self.rows = new if self.rows is None else [torch.cat(pair, dim=2) for pair in zip(self.rows, new, strict=True)]
        return tuple(self.rows)


@torch.no_grad()
@pytest.mark.parametrize("last", [0, 1, 6])
def test_unrolled_passes_equal_drafting_token_by_token_with_a_cache(models, last):
    # The target has read positions 0 .. last; tokens last + 1 (sampled), last + 2 and last + 3 (drafts) follow.
    model, mtp = models
    rows = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    hidden = hidden_states(model, rows[:, :10])
    parallel = unroll(model, mtp, rows, hidden, num_passes=3)

    cache = OneSlotAPosition()
    h, positions = hidden[:, : last + 1], torch.arange(last + 1)
    for index in range(3):
        embeddings = model.get_input_embeddings()(rows[:, positions + 1]) * (positions > 0)[:, None]
        rotary = model.model.rotary_emb(embeddings, position_ids=positions[None])
        mask = torch.arange(last + 1 + index)[None] <= positions[:, None]
        out = mtp(embeddings, h, rotary, mask[None, None], cache)
        torch.testing.assert_close(out[:, -1], parallel[index][:, last + index], rtol=0, atol=1e-5)
        h, positions = out[:, -1:], positions[-1:] + 1


def test_the_first_pass_reads_the_state_after_the_final_norm(models):
    model, _ = models
    ids = torch.randint(3, VOCAB, (1, 9))
    with torch.no_grad():
        expected = model.model(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(hidden_states(model, ids), expected)
        assert torch.equal(model.lm_head(expected), model(input_ids=ids).logits)


def test_a_chain_counts_drafts_only_where_those_before_were_accepted():
    # Prompt of 2 tokens, so the first drafts are made at position 1. hits[pass][position].
    yes, no = True, False
    hits = [
        [no, yes, yes, yes, no, yes, yes, yes],  # draft 1, at position i
        [no, no, yes, yes, yes, no, yes, yes],  # draft 2, at position i + 1
        [no, no, no, no, yes, yes, yes, yes],  # draft 3, at position i + 2
    ]
    # i = 1: 1 right, 2 right (position 2), 3 wrong (position 3) -> 2 accepted, i = 4
    # i = 4: 1 wrong                                             -> 0 accepted, i = 5
    # i = 5: 1, 2 (position 6), 3 (position 7) right             -> 3 accepted, i = 9: the end
    report = chain_statistics([hits], prompt_length=2)
    assert report["offered"] == [3, 2, 2]
    assert report["accepted"] == [2 / 3, 1.0, 0.5]
    assert report["tokens_per_step"] == 1 + 5 / 3
