"""From the command line to a directory that transformers loads: names, sizes, numbers in the card, refusals."""

import json
import math
import re
import shutil
import tarfile

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import VOCAB, deepseek, qwen3, write_tale
from transformers import AutoModelForCausalLM, AutoTokenizer

from minivllm.checkpoints.train import main
from minivllm.checkpoints.training import card, driver
from minivllm.checkpoints.training.export import load_checkpoint, num_parameters, save_checkpoint
from minivllm.checkpoints.training.model import build_model, hidden_states, model_config
from minivllm.checkpoints.training.mtp import MTPLayer, initialise, unroll
from minivllm.checkpoints.training.recipes import RECIPES, VOCAB_SIZE, Recipe

MEGABYTES = {"tiny-deepseek": 16, "tiny-qwen3": 12, "tiny-qwen3-draft": 2}


@pytest.fixture(autouse=True)
def nano_recipes(monkeypatch):
    monkeypatch.setitem(RECIPES, "nano", deepseek())
    monkeypatch.setitem(RECIPES, "nano-qwen3", qwen3())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Both nano models, trained by one command."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "nano", deepseek())
        patch.setitem(RECIPES, "nano-qwen3", qwen3())
        text = write_tale(folder)
        command = ["--config", "nano,nano-qwen3", "--text", str(text), "--out", str(folder / "out")]
        assert main([*command, "--pack", str(folder / "packed"), "--vocab-size", str(VOCAB), "--device", "cpu"]) == 0
    return folder


def arguments(folder, *more, config="nano", text=None):
    text = text or write_tale(folder)
    out = ["--out", str(folder / "out"), "--device", "cpu", "--vocab-size", str(VOCAB)]
    return ["--config", config, "--text", str(text), *out, *more]


def test_transformers_misses_no_tensor_and_does_not_expect_exactly_the_mtp_layers(trained):
    directory = trained / "out" / "nano"
    model, loading = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    # transformers joins a layer's experts before it looks for their place.
    stored = {
        re.sub(r"experts\.\d+\.(gate|up)_proj\.weight", "experts.gate_up_proj", name)
        for name in load_file(directory / "model.safetensors")
        if name.startswith("model.layers.2.")
    }
    stored = {re.sub(r"experts\.\d+\.down_proj\.weight", "experts.down_proj", name) for name in stored}
    assert set(loading["unexpected_keys"]) == stored
    assert model.dtype == torch.bfloat16
    assert model.config.num_nextn_predict_layers == 1


def test_the_stored_names_are_those_of_deepseek_v3(trained):
    tensors = load_file(trained / "out" / "nano" / "model.safetensors")
    of_mtp = {name.removeprefix("model.layers.2.") for name in tensors if name.startswith("model.layers.2.")}
    experts = {f"mlp.experts.{i}.{part}_proj.weight" for i in range(8) for part in ("gate", "up", "down")}
    attention = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    assert of_mtp == experts | {f"self_attn.{part}.weight" for part in attention} | {
        "embed_tokens.weight",
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "shared_head.head.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
    }
    assert torch.equal(tensors["model.layers.2.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_is_what_is_loaded(tmp_path, tied):
    config = model_config(deepseek(architecture={"tie_word_embeddings": tied}), VOCAB)
    model, mtp = build_model(config), MTPLayer(config)
    initialise(mtp, model)
    with torch.no_grad():
        for module in (model, mtp):
            for parameter in module.parameters():
                parameter.copy_(parameter.bfloat16())  # so that storing loses nothing
            for name, buffer in module.named_buffers():
                if name.endswith("bias"):
                    buffer.copy_(torch.randn(8))
    save_checkpoint(model, mtp, tmp_path)
    loaded, loaded_mtp = load_checkpoint(tmp_path, torch.device("cpu"))
    rows = torch.randint(3, VOCAB, (2, 12))
    with torch.no_grad():
        for ours, theirs in ((model.eval(), loaded), (mtp.eval(), loaded_mtp)):
            assert num_parameters([ours]) == num_parameters([theirs])
        expected, found = hidden_states(model, rows[:, :10]), hidden_states(loaded, rows[:, :10])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        outputs = unroll(model, mtp, rows, expected, 3), unroll(loaded, loaded_mtp, rows, found, 3)
        for one, other in zip(*outputs, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


def test_the_directory_is_whole_and_its_tokenizer_loads(trained):
    for name in ("nano", "nano-qwen3"):
        directory = trained / "out" / name
        assert {file.name for file in directory.iterdir()} == {
            "README.md",
            "config.json",
            "evaluation.json",
            "generation_config.json",
            "loss_curve.png",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "training.json",
        }
        tokenizer = AutoTokenizer.from_pretrained(directory)
        text = "Once a king met a fox in the wood.\n"
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    one, other = ((trained / "out" / name / "tokenizer.json").read_bytes() for name in ("nano", "nano-qwen3"))
    assert one == other


def test_the_card_gives_the_measured_numbers(trained):
    directory = trained / "out" / "nano"
    evaluation = json.loads((directory / "evaluation.json").read_text())
    card = (directory / "README.md").read_text()
    held_out = evaluation["held_out"]
    perplexity = math.exp(held_out["loss"])
    assert f"| {held_out['loss']:.3f} | {perplexity:.1f} | {held_out['bits_per_byte']:.3f} |" in card
    assert f"nano {100 * held_out['first_draft_accepted']:.1f} %" in card
    for kind, chain in evaluation["chains"].items():
        assert f"| nano, {kind} | {' | '.join(f'{100 * rate:.1f} %' for rate in chain['accepted'])} |" in card
    assert set(evaluation["experts"]) == {"model.layers.1.mlp.gate", "model.layers.2.mlp.gate"}
    assert len(evaluation["samples"]) == 4 and evaluation["samples"][0]["text"][:25] in card


def test_a_card_tells_a_newcomer_what_it_is_how_to_use_it_and_under_which_licence(trained):
    for name, has_mtp in (("nano", True), ("nano-qwen3", False)):
        card = (trained / "out" / name / "README.md").read_text()
        heads = re.findall(r"^## (.+)$", card, re.MULTILINE)
        of_experts = ["Multi-token prediction", "Load of the experts"] if has_mtp else []
        assert heads == ["Use", "Training", "Held-out text", *of_experts, "Samples", "Shape", "Licence"]
        assert "fairy tales in the public domain" in card and "Apache-2.0" in card
        assert f'LLM("{name}"' in card and ('"method": "mtp"' in card) == has_mtp
        assert "Temperature 0.8, seed 2:" in card and "Greedy:" in card


def test_comparisons_stay_when_the_compared_models_do_not_ship(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "out", tmp_path / "out")
    monkeypatch.setitem(card._COMPARED, "nano", ("nano-qwen3", "nano-one-pass"))
    one_pass = shutil.copytree(tmp_path / "out" / "nano", tmp_path / "out" / "nano-one-pass")
    report = json.loads((one_pass / "evaluation.json").read_text())
    report["chains"]["greedy"]["accepted"][-1] = 0.125
    (one_pass / "evaluation.json").write_text(json.dumps(report))
    card.write_card(tmp_path / "out" / "nano")
    before = (tmp_path / "out" / "nano" / "README.md").read_text()
    loss = json.loads((trained / "out" / "nano-qwen3" / "evaluation.json").read_text())["held_out"]["loss"]
    assert f"| {loss:.3f} | {math.exp(loss):.1f} |" in before and "- nano-qwen3: " in before
    assert "nano-one-pass, greedy |" in before and "greedy 12.5 -> " in before
    shutil.move(tmp_path / "out" / "nano", tmp_path / "nano")
    card.write_card(tmp_path / "nano")
    assert (tmp_path / "nano" / "README.md").read_text() == before


def test_held_out_loss_is_transformers_own_on_the_stored_weights(trained):
    directory = trained / "out" / "nano-qwen3"
    evaluation = json.loads((directory / "evaluation.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = (trained / "tale.txt").read_text()
    lines, held_out = text.splitlines(keepends=True), ""
    while len(held_out) < 0.05 * len(text):
        held_out = lines.pop() + held_out
    ids = tokenizer(held_out, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    losses = []
    for start in range(0, len(ids) - 32, 32):
        row = torch.tensor([[tokenizer.bos_token_id, *ids[start : start + 32]]])
        losses.append(model(input_ids=row, labels=row).loss.item())
    assert evaluation["held_out"]["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert evaluation["held_out"]["tokens"] == 32 * len(losses)


def test_packed_files_hold_the_directories(trained):
    for name in ("nano", "nano-qwen3"):
        with tarfile.open(trained / "packed" / f"{name}.tar") as archive:
            packed = {member.name: archive.extractfile(member).read() for member in archive}
        directory = trained / "out" / name
        assert packed == {f"{name}/{file.name}": file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("name", RECIPES)
def test_shapes_suit_kernels_stages_and_tensor_parallelism(name):
    shape = RECIPES[name].architecture
    assert all(shape[key] % 128 == 0 for key in shape if key.endswith(("hidden_size", "intermediate_size", "_rank")))
    assert all(shape[key] % 16 == 0 for key in shape if key.endswith("head_dim"))
    assert shape["num_attention_heads"] % 2 == shape["num_key_value_heads"] % 2 == 0
    assert shape["num_hidden_layers"] >= (2 if name.endswith("draft") else 6)
    if shape["model_type"] == "deepseek_v3":
        assert shape["n_routed_experts"] % 2 == 0 and shape["n_group"] >= 2 and shape["kv_lora_rank"] == 128


@pytest.mark.parametrize("name", MEGABYTES)
def test_stored_weights_leave_room_for_the_other_files(name, tmp_path):
    recipe = RECIPES[name]
    config = model_config(recipe, VOCAB_SIZE)
    model, mtp = build_model(config), MTPLayer(config) if recipe.mtp_passes else None
    save_checkpoint(model, mtp, tmp_path)
    others = 250_000  # tokenizer, curve, cards
    assert (tmp_path / "model.safetensors").stat().st_size + others <= MEGABYTES[name] * 1_000_000


def test_the_baseline_is_as_large_as_the_model_without_its_mtp_layer():
    sizes = [
        num_parameters([build_model(model_config(RECIPES[n], VOCAB_SIZE))]) for n in ("tiny-deepseek", "tiny-dense")
    ]
    assert abs(sizes[1] / sizes[0] - 1) < 0.03


def test_a_run_that_was_interrupted_continues_with_resume_only(tmp_path, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "save_tokenizer", stop)
    with pytest.raises(KeyboardInterrupt):
        main(arguments(tmp_path))
    monkeypatch.undo()
    monkeypatch.setitem(RECIPES, "nano", deepseek())
    assert (tmp_path / "out" / "training_state.pt").is_file()
    assert main(arguments(tmp_path)) == 1
    assert "is not empty: give --resume" in capsys.readouterr().err
    assert main(arguments(tmp_path, "--resume")) == 0
    assert (tmp_path / "out" / "evaluation.json").is_file() and not (tmp_path / "out" / "training_state.pt").exists()
    assert main(arguments(tmp_path, "--resume", "--dropout", "0.4")) == 1
    assert "another config (dropout 0.2 there, 0.4 asked for)" in capsys.readouterr().err


def test_one_failure_leaves_the_other_models_alone(tmp_path, monkeypatch, capsys):
    original = driver.save_checkpoint

    def fail_for_deepseek(model, mtp, directory):
        if mtp is not None:
            raise RuntimeError("no room on the disk")
        original(model, mtp, directory)

    monkeypatch.setattr(driver, "save_checkpoint", fail_for_deepseek)
    assert main(arguments(tmp_path, "--pack", str(tmp_path / "packed"), config="nano,nano-qwen3")) == 1
    said = capsys.readouterr().err
    assert "no room on the disk" in said and "nano failed; the others are in" in said
    assert (tmp_path / "out" / "nano-qwen3" / "README.md").is_file()
    with tarfile.open(tmp_path / "packed" / "nano.tar") as archive:  # what there was, without the large state
        assert sorted(archive.getnames()) == ["nano/tokenizer.json", "nano/tokenizer_config.json", "nano/training.json"]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--config", "tiny-gpt"], "unknown config 'tiny-gpt'; known: tiny-deepseek, tiny-qwen3"),
        (["--text", "nowhere.txt"], "there is no text file nowhere.txt"),
        (["--valid", "nowhere.txt"], "there is no text file nowhere.txt"),
        (["--tokenizer", "nowhere"], "nowhere has no tokenizer.json"),
        (["--max-minutes", "0"], "--max-minutes 0.0: give more than 0"),
        (["--vocab-size", "4096"], "fewer than 4096"),
        (["--steps", "0"], "steps = 0, must be at least 1"),
        (["--dropout", "1"], "dropout = 1.0, must be in [0, 1)"),
        (["--config", "nano-qwen3", "--mtp-passes", "2"], "nano-qwen3 is a qwen3; only deepseek_v3 has an MTP layer"),
        (["--mtp-passes", "-1"], "mtp_passes = -1, must be 0 (no MTP layer) or more"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path, capsys, more, message):
    assert main([*arguments(tmp_path), *more]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_out_must_not_be_a_file(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert main(arguments(tmp_path)) == 1
    assert "out is a file" in capsys.readouterr().err


def test_minutes_are_shared_by_the_recipes_own(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(driver, "train_model", lambda recipe, *rest: given.append(rest[3]))
    monkeypatch.setattr(driver, "write_card", lambda directory: None)
    recipes = [Recipe(f"m{i}", "", deepseek().architecture, minutes=m) for i, m in enumerate((6.0, 3.0, 1.0))]
    driver.train_all(recipes, None, tmp_path, False, 10.0, None)
    # Nothing was used up here: each gets its share of all that is left.
    assert given == pytest.approx([0.85 * 6.0, 0.85 * 7.5, 0.85 * 10.0], rel=1e-3)
