"""One model from text to checkpoint, or several in one budget of minutes; what exists is reused, failures stay local.

OUT/                     one model                       OUT/NAME/          one for each of several models
  config.json ...        the checkpoint
  training.json          recipe and loss curve
  evaluation.json        measured numbers; README.md and loss_curve.png are made from these two
  training_state.pt      while training: what --resume continues from; removed at the end
"""

import json
import sys
import tarfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from minivllm.checkpoints.errors import CheckpointError
from minivllm.checkpoints.training.card import EVALUATION, TRAINING, write_card, write_curve, write_json
from minivllm.checkpoints.training.data import Stream, encode, read_documents, split_documents
from minivllm.checkpoints.training.evaluate import evaluate_checkpoint
from minivllm.checkpoints.training.export import save_checkpoint
from minivllm.checkpoints.training.loop import Trainer, check_same_recipe
from minivllm.checkpoints.training.recipes import Recipe
from minivllm.checkpoints.training.tokenizer import read_tokenizer, save_tokenizer, train_tokenizer

STATE = "training_state.pt"
WEIGHTS = "model.safetensors"
_TRAINING_SHARE = 0.85
"""Of a model's minutes; the rest is for loading, evaluating and writing."""


@dataclass(frozen=True)
class Corpus:
    """Token ids on the device, cut into rows by each recipe, and the tokenizer that made them."""

    train: torch.Tensor
    held_out: torch.Tensor
    tokenizer: Tokenizer


def prepare_corpus(
    text: Path, valid: Path | None, tokenizer_dir: Path | None, vocab_size: int, device: torch.device
) -> Corpus:
    """Reads, trains or reuses the tokenizer, encodes. Raises ValueError for files that are missing or empty."""
    documents = read_documents(text)
    documents, held_out = split_documents(documents) if valid is None else (documents, read_documents(valid))
    if tokenizer_dir is not None:
        tokenizer = read_tokenizer(tokenizer_dir)
    else:
        lines = (line for document in documents for line in document.splitlines(keepends=True))
        tokenizer = train_tokenizer(lines, vocab_size)
    return Corpus(encode(documents, tokenizer, device), encode(held_out, tokenizer, device), tokenizer)


def train_model(
    recipe: Recipe, corpus: Corpus, out: Path, resume: bool, max_minutes: float | None = None, progress_bar: bool = True
) -> None:
    """Fills `out` with a whole checkpoint.

    Raises CheckpointError if `out` holds something already and resume is False, or if it holds another config.
    """
    state = out / STATE
    check_directory(recipe, out, resume)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / WEIGHTS).is_file() or state.is_file():
        _train(recipe, corpus, out, max_minutes, progress_bar)
        state.unlink()
    held_out = Stream(corpus.held_out, recipe.sequence_length)
    evaluation = evaluate_checkpoint(out, corpus.tokenizer, held_out)
    write_json(out / EVALUATION, evaluation)
    print(f"{recipe.name}: held out {evaluation['held_out']}, chains {evaluation.get('chains')}", file=sys.stderr)
    write_curve(out)
    write_card(out)


def check_directory(recipe: Recipe, out: Path, resume: bool) -> None:
    """Refuses a directory that training would spoil. Raises CheckpointError, which names it."""
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"{out} is a file: give a directory with --out")
    if any(out.iterdir()) and not resume:
        raise CheckpointError(f"{out} is not empty: give --resume to continue what is there, or another --out")
    if (out / TRAINING).is_file():
        found = json.loads((out / TRAINING).read_text(encoding="utf-8"))["recipe"]
        check_same_recipe(json.loads(json.dumps(recipe.as_dict())), found, out)


def _train(recipe: Recipe, corpus: Corpus, out: Path, max_minutes: float | None, progress_bar: bool) -> None:
    state = out / STATE
    stream, held_out = (Stream(ids, recipe.sequence_length) for ids in (corpus.train, corpus.held_out))
    trainer = Trainer(recipe, stream, held_out, corpus.tokenizer.get_vocab_size(), state)
    if state.is_file():
        trainer.load_state()
    progress = trainer.run(max_minutes, progress_bar=progress_bar)
    save_tokenizer(corpus.tokenizer, out, recipe.sequence_length)
    run = {
        "steps": progress.step,
        "best_step": progress.best_step,
        "stopped": progress.stopped,
        "seconds": round(progress.seconds, 1),
        "epochs": progress.step / trainer.batches.steps_per_epoch,
        "train_tokens": len(corpus.train),
        "device": torch.cuda.get_device_name() if stream.ids.is_cuda else "a CPU",
        "torch": torch.__version__,
    }
    report = {"recipe": recipe.as_dict(), "run": run, "curve": progress.curve, "held_out": progress.held_out}
    write_json(out / TRAINING, report)
    save_checkpoint(trainer.model, trainer.mtp, out)


def train_all(
    recipes: list[Recipe], corpus: Corpus, out: Path, resume: bool, max_minutes: float | None, pack: Path | None
) -> list[str]:
    """Each recipe into out/NAME, in order; returns the names that failed, whose traces were printed.

    Minutes are shared in proportion to the recipes' own; what one leaves unused goes to those after it. With `pack`,
    each directory is written to pack/NAME.tar as soon as it is there, without the training state.
    """
    begin, failed = time.monotonic(), []
    for index, recipe in enumerate(recipes):
        minutes = None
        if max_minutes is not None:
            left = max_minutes - (time.monotonic() - begin) / 60
            minutes = _TRAINING_SHARE * left * recipe.minutes / sum(later.minutes for later in recipes[index:])
        directory = out / recipe.name
        try:
            train_model(recipe, corpus, directory, resume, minutes)
        except Exception:
            traceback.print_exc()
            failed.append(recipe.name)
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if pack is not None and directory.is_dir():
                pack_directory(directory, pack)
    for recipe in recipes:
        # Again, now that all models which a card compares are there.
        if recipe.name not in failed:
            write_card(out / recipe.name)
            if pack is not None:
                pack_directory(out / recipe.name, pack)
    return failed


def pack_directory(directory: Path, pack: Path) -> Path:
    """pack/NAME.tar with the directory's files under NAME/, without the training state."""
    pack.mkdir(parents=True, exist_ok=True)
    target = pack / f"{directory.name}.tar"
    with tarfile.open(target, "w") as archive:
        for file in sorted(directory.iterdir()):
            if not file.name.startswith(Path(STATE).stem):
                archive.add(file, f"{directory.name}/{file.name}")
    return target
