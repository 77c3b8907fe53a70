"""Trains the tiny models that ship with the package.

    python -m minivllm.checkpoints.train --config tiny-deepseek --text tales.txt --out checkpoints/tiny-deepseek
    python -m minivllm.checkpoints.train --config all --text tales.txt --out checkpoints --max-minutes 12

A GPU is used if there is one. Interrupted runs continue with --resume. Several configs, separated by commas, or
"all", go to one directory each under --out and share one tokenizer.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

OVERRIDES = (
    "steps",
    "batch_size",
    "sequence_length",
    "learning_rate",
    "weight_decay",
    "dropout",
    "mtp_passes",
    "mtp_distillation",
    "seed",
)


def parser() -> argparse.ArgumentParser:
    """The command line; the options of OVERRIDES replace values of the recipe."""
    from minivllm.checkpoints.training.recipes import RECIPES, VOCAB_SIZE, Recipe

    result = argparse.ArgumentParser(
        prog="python -m minivllm.checkpoints.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--config", required=True, help=f"{', '.join(RECIPES)}, several with commas, or all")
    result.add_argument("--text", required=True, type=Path, help="UTF-8 text to train on; blank lines part documents")
    result.add_argument("--valid", type=Path, help="held-out text (default: the last twentieth of --text)")
    result.add_argument("--out", required=True, type=Path, help="directory of the checkpoint, or of several")
    result.add_argument("--resume", action="store_true", help="continue what is in --out")
    result.add_argument("--tokenizer", type=Path, help="directory with a tokenizer.json to reuse")
    result.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    result.add_argument("--max-minutes", type=float, help="end by then, with the learning rate planned accordingly")
    result.add_argument("--pack", type=Path, help="also write each directory as NAME.tar here")
    result.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    types = {field.name: field.type for field in fields(Recipe)}
    for name in OVERRIDES:
        result.add_argument(f"--{name.replace('_', '-')}", type=types[name], help="instead of the config's value")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 with a message if something was refused or failed."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """Trains what the options say. Raises ValueError for options that cannot work."""
    import torch

    from minivllm.checkpoints.training.driver import check_directory, pack_directory, prepare_corpus, train_all
    from minivllm.checkpoints.training.driver import train_model as train_one
    from minivllm.checkpoints.training.recipes import RECIPES, find_recipe

    names = list(RECIPES) if options.config == "all" else options.config.split(",")
    changed = {name: getattr(options, name) for name in OVERRIDES if getattr(options, name) is not None}
    recipes = [replace(find_recipe(name), **changed) for name in names]
    several = options.config == "all" or len(recipes) > 1
    for recipe in recipes:
        check_directory(recipe, options.out / recipe.name if several else options.out, options.resume)
    if options.max_minutes is not None and options.max_minutes <= 0:
        raise ValueError(f"--max-minutes {options.max_minutes}: give more than 0")
    begin = time.monotonic()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    corpus = prepare_corpus(options.text, options.valid, options.tokenizer, options.vocab_size, device)
    print(f"{len(corpus.train)} tokens to train on, {len(corpus.held_out)} held out, on {device}", file=sys.stderr)
    minutes = None if options.max_minutes is None else options.max_minutes - (time.monotonic() - begin) / 60
    if not several:
        train_one(recipes[0], corpus, options.out, options.resume, minutes)
        if options.pack is not None:
            pack_directory(options.out, options.pack)
        return 0
    failed = train_all(recipes, corpus, options.out, options.resume, minutes, options.pack)
    if failed:
        print(f"error: {', '.join(failed)} failed; the others are in {options.out}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
