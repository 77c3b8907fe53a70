"""The model card, README.md of a checkpoint, and its loss curve: made from training.json and evaluation.json alone.

`python -m minivllm.checkpoints.training.card DIR ...` writes them anew.
"""

import json
import sys
from pathlib import Path
from typing import Any

TRAINING, EVALUATION, CURVE, CARD = "training.json", "evaluation.json", "loss_curve.png", "README.md"
_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "first_k_dense_replace",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "n_shared_experts",
    "moe_intermediate_size",
    "num_nextn_predict_layers",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)
_COMPARED = {"tiny-deepseek": ("tiny-dense", "tiny-deepseek-one-pass"), "tiny-qwen3": ("tiny-qwen3-draft",)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One line a top-level entry and a row of a list: small, and readable in a diff."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in value)
            lines.append(f"  {json.dumps(key)}: [\n    {rows}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write_curve(directory: Path) -> None:
    """loss_curve.png; without a recent matplotlib there is none, and the numbers are in training.json."""
    try:
        from minivllm.plotting.training import loss_curve
    except (ImportError, KeyError) as error:  # a KeyError for a colour sequence that older versions lack
        print(f"no {CURVE}: {error}; the numbers are in {directory / TRAINING}")
        return
    import matplotlib.pyplot as plt

    figure, _ = loss_curve(_read(directory / TRAINING))
    figure.savefig(directory / CURVE)
    plt.close(figure)


def write_card(directory: Path) -> None:
    """README.md from the directory's numbers, and from those of models beside it that it is compared with."""
    training, evaluation = _read(directory / TRAINING), _read(directory / EVALUATION)
    config, name = _read(directory / "config.json"), training["recipe"]["name"]
    beside = [
        (other, _read(directory.parent / other / EVALUATION))
        for other in _COMPARED.get(name, ())
        if (directory.parent / other / EVALUATION).is_file()
    ]
    parts = [
        f"# {name}",
        f"{training['recipe']['description'][0].upper()}{training['recipe']['description'][1:]}. "
        f"{evaluation['parameters'] / 1e6:.2f} million parameters, trained from scratch on public-domain English fairy "
        "tales. It is made for looking into inference engines, and knows nothing but the sound of a tale.",
        _shape(config),
        _training(training),
        _quality(name, evaluation, beside),
        _drafts(name, evaluation, beside),
        _experts(evaluation),
        _samples(evaluation),
        f"Made by `python -m minivllm.checkpoints.train --config {name}`. This page is written by that program from "
        f"`{TRAINING}` and `{EVALUATION}`.",
    ]
    (directory / CARD).write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _shape(config: dict[str, Any]) -> str:
    rows = [f"| {key} | {config[key]} |" for key in _SHAPE if config.get(key) is not None]
    return "\n".join([f"## Shape\n\n| {config['architectures'][0]} | |", "|---|---|", *rows])


def _training(training: dict[str, Any]) -> str:
    recipe, run = training["recipe"], training["run"]
    text = (
        f"## Training\n\n{run['steps']} steps of {recipe['batch_size']} x {recipe['sequence_length']} tokens: "
        f"{run['epochs']:.1f} passes over {run['train_tokens'] / 1e6:.2f} million tokens, in {run['seconds']:.0f} "
        f"seconds on {run['device']}. It ended because {run['stopped']}; the weights are those of step "
        f"{run['best_step']}, which had the lowest held-out loss. AdamW, peak learning rate {recipe['learning_rate']}, "
        f"weight decay {recipe['weight_decay']}, dropout {recipe['dropout']}, seed {recipe['seed']}."
    )
    if recipe["mtp_passes"]:
        text += (
            f" The MTP layer was trained over {recipe['mtp_passes']} pass(es), its mean loss times "
            f"{recipe['mtp_weight']} added to the main loss; {recipe['mtp_distillation']:.0%} of it is against the "
            "main model's distribution, the rest against the text."
        )
    return text + f"\n\n![Loss by step]({CURVE})"


def _quality(name: str, evaluation: dict[str, Any], beside: list[tuple[str, dict[str, Any]]]) -> str:
    rows = [
        f"| {label} | {report['parameters'] / 1e6:.2f} M | {report['held_out']['loss']:.3f} | "
        f"{report['held_out']['bits_per_byte']:.3f} |"
        for label, report in [(name, evaluation), *beside]
    ]
    head = f"## Held-out text\n\n{evaluation['held_out']['tokens']} tokens, bfloat16 weights, computed in float32.\n\n"
    return head + "\n".join(["| model | parameters | nats a token | bits a byte |", "|---|---|---|---|", *rows])


def _drafts(name: str, evaluation: dict[str, Any], beside: list[tuple[str, dict[str, Any]]]) -> str:
    reports = [(label, report) for label, report in [(name, evaluation), *beside] if "chains" in report]
    if not reports:
        return ""
    rows = []
    for label, report in reports:
        for kind, chain in report["chains"].items():
            rates = " | ".join(f"{100 * rate:.1f} %" for rate in chain["accepted"])
            rows.append(f"| {label}, {kind} | {rates} | {chain['tokens_per_step']:.2f} |")
    first = "; ".join(f"{label} {100 * report['held_out']['first_draft_accepted']:.1f} %" for label, report in reports)
    return (
        "## Multi-token prediction\n\nThe MTP layer's first draft is the target's own choice, given the same prefix of "
        f"held-out text: {first}.\n\nOn the models' own continuations of held-out prompts, three drafts a step, each "
        "draft counted where those before it were accepted (greedy drafts; sampled: temperature 1):\n\n"
    ) + "\n".join(["| text | draft 1 | draft 2 | draft 3 | tokens a step |", "|---|---|---|---|---|", *rows])


def _experts(evaluation: dict[str, Any]) -> str:
    if not evaluation["experts"]:
        return ""
    rows = [
        f"| `{layer}` | {load['min']:.2f} | {load['max']:.2f} | {load['idle']} |"
        for layer, load in evaluation["experts"].items()
    ]
    head = "## Load of the experts\n\nTokens of held-out text relative to the mean; idle: below a tenth of it.\n\n"
    return head + "\n".join(["| router | least | most | idle |", "|---|---|---|---|", *rows])


def _samples(evaluation: dict[str, Any]) -> str:
    parts = ["## Samples\n\ntransformers' `generate` on a CPU after `torch.manual_seed(seed)`."]
    for sample in evaluation["samples"]:
        quoted = "\n".join(f"> {line}" if line else ">" for line in sample["text"].splitlines())
        kind = f"temperature {sample['temperature']}, seed {sample['seed']}" if sample["temperature"] else "greedy"
        parts.append(f"{kind}:\n\n{quoted}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write_curve(Path(argument))
        write_card(Path(argument))
