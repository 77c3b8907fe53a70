"""The model card, README.md of a checkpoint, and its loss curve: made from training.json and evaluation.json alone.

    DIR/training.json     recipe, run, loss curve
    DIR/evaluation.json   what was measured; under "compared", the same of models that stood beside DIR when the card
                          was made, so that a directory which ships alone keeps its comparisons

`python -m minivllm.checkpoints.training.card DIR ...` writes card and curve anew.
"""

import json
import math
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
_COMPARED = {
    "tiny-deepseek": ("tiny-dense", "tiny-deepseek-one-pass"),
    "tiny-qwen3": ("tiny-qwen3-draft",),
    "tiny-qwen3-draft": ("tiny-qwen3",),
}
_LICENCE = (
    "## Licence\n\nApache-2.0, as all of minivllm. The texts it was trained on are in the public domain and are not "
    "part of this directory."
)


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
    """README.md from the directory's numbers; those of compared models that are beside it now are taken over first."""
    training, evaluation = _read(directory / TRAINING), _read(directory / EVALUATION)
    config, name = _read(directory / "config.json"), training["recipe"]["name"]
    if found := _beside(directory, name):
        evaluation["compared"] = evaluation.get("compared", {}) | found
        write_json(directory / EVALUATION, evaluation)
    reports = {name: evaluation} | evaluation.get("compared", {})
    parts = [
        f"# {name}",
        _introduction(training, evaluation),
        _use(name, bool(training["recipe"]["mtp_passes"])),
        _training(training),
        _quality(reports),
        _drafts(reports),
        _experts(evaluation),
        _samples(evaluation),
        _shape(config),
        _LICENCE,
        f"Made by `python -m minivllm.checkpoints.train --config {name}`. This page is written by that program from "
        f"[{TRAINING}]({TRAINING}) and [{EVALUATION}]({EVALUATION}).",
    ]
    (directory / CARD).write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _beside(directory: Path, name: str) -> dict[str, Any]:
    """Of each model that is compared with this one and lies beside it: what it is, and what was measured."""
    found = {}
    for other in _COMPARED.get(name, ()):
        if (directory.parent / other / EVALUATION).is_file():
            evaluation = _read(directory.parent / other / EVALUATION)
            found[other] = {"description": _read(directory.parent / other / TRAINING)["recipe"]["description"]}
            found[other] |= {key: evaluation[key] for key in ("parameters", "held_out", "chains") if key in evaluation}
    return found


def _introduction(training: dict[str, Any], evaluation: dict[str, Any]) -> str:
    description = training["recipe"]["description"]
    return (
        f"{description[0].upper()}{description[1:]}. {evaluation['parameters'] / 1e6:.2f} million parameters, trained "
        "from scratch on English fairy tales in the public domain. It is made for looking into inference engines: it "
        "has the sound of a tale, knows nothing, loses the thread after a sentence, and does not answer questions."
    )


def _use(name: str, has_mtp: bool) -> str:
    target, drafts = name, '{"method": "mtp", "num_speculative_tokens": 3}' if has_mtp else None
    if name in ("tiny-qwen3", "tiny-qwen3-draft"):
        target = "tiny-qwen3"
        drafts = '{"method": "draft_model", "model": "tiny-qwen3-draft", "num_speculative_tokens": 3}'
    arguments = f", speculative_config={drafts}" if drafts else ""
    text = (
        "## Use\n\n```python\nfrom minivllm import LLM, SamplingParams\n\n"
        f'llm = LLM("{target}"{arguments})\n'
        "params = SamplingParams(temperature=0.8, seed=0, max_tokens=100)\n"
        'print(llm.generate("Once upon a time", params)[0].outputs[0].text)\n```\n\n'
        "The directory is in Hugging Face format: transformers' `AutoModelForCausalLM.from_pretrained` loads it as well"
    )
    return text + (", without the MTP layer, whose tensors it names as unexpected." if has_mtp else ".")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _shape(config: dict[str, Any]) -> str:
    rows = [f"| {key} | {config[key]} |" for key in _SHAPE if config.get(key) is not None]
    return "\n".join([f"## Shape\n\n| {config['architectures'][0]}, config.json | |", "|---|---|", *rows])


def _training(training: dict[str, Any]) -> str:
    recipe, run = training["recipe"], training["run"]
    text = (
        f"## Training\n\n{run['steps']} steps of {recipe['batch_size']} x {recipe['sequence_length']} tokens: "
        f"{run['epochs']:.1f} passes over {run['train_tokens'] / 1e6:.2f} million tokens, in {run['seconds']:.0f} "
        f"seconds on {run['device']}. It ended because {run['stopped']}; the weights are those of step "
        f"{run['best_step']}, which had the lowest held-out loss. AdamW, peak learning rate {recipe['learning_rate']}, "
        f"weight decay {recipe['weight_decay']}, dropout {recipe['dropout']}, seed {recipe['seed']}. The tokenizer "
        "(byte-level BPE) was made from the same tales."
    )
    if passes := recipe["mtp_passes"]:
        ahead = "its one draft" if passes == 1 else f"{passes} drafts, each from the output of the one before it"
        text += (
            f"\n\nThe MTP layer was trained for {ahead}; the mean of its losses, times {recipe['mtp_weight']}, is "
            f"added to the main loss. {recipe['mtp_distillation']:.0%} of an MTP loss is against the main model's "
            "distribution, the rest against the text."
        )
    return text + f"\n\n![Loss by step: training and held-out text]({CURVE})"


def _quality(reports: dict[str, dict[str, Any]]) -> str:
    rows, notes = [], []
    for label, report in reports.items():
        loss, bits = report["held_out"]["loss"], report["held_out"]["bits_per_byte"]
        rows.append(
            f"| {label} | {report['parameters'] / 1e6:.2f} M | {loss:.3f} | {math.exp(loss):.1f} | {bits:.3f} |"
        )
        if "description" in report:
            notes.append(f"- {label}: {report['description']}.")
    tokens = next(iter(reports.values()))["held_out"]["tokens"]
    head = (
        f"## Held-out text\n\n{tokens:,} tokens of tales that were not trained on, though they decided which step's "
        "weights were kept; bfloat16 weights, computed in float32. Lower is better; a perplexity of 40 is the "
        "uncertainty of a choice among 40 equally likely tokens. An MTP layer's parameters are counted.\n\n"
    )
    table = ["| model | parameters | loss (nats a token) | perplexity | bits a byte |", "|---|---|---|---|---|", *rows]
    return head + "\n".join(table) + ("\n\n" + "\n".join(notes) if notes else "")


def _drafts(reports: dict[str, dict[str, Any]]) -> str:
    reports = {label: report for label, report in reports.items() if "chains" in report}
    if not reports:
        return ""
    rows = []
    for label, report in reports.items():
        for kind, chain in report["chains"].items():
            rates = " | ".join(f"{100 * rate:.1f} %" for rate in chain["accepted"])
            rows.append(f"| {label}, {kind} | {rates} | {chain['tokens_per_step']:.2f} |")
    first = ", ".join(
        f"{label} {100 * report['held_out']['first_draft_accepted']:.1f} %" for label, report in reports.items()
    )
    table = ["| text | draft 1 | draft 2 | draft 3 | tokens a step |", "|---|---|---|---|---|", *rows]
    text = (
        "## Multi-token prediction\n\nThe MTP layer drafts tokens, which the main model then verifies. How often the "
        f"first draft is the main model's own first choice for the same prefix of held-out text: {first}.\n\n"
        "Three drafts a step, on the models' own continuations of held-out prompts. A draft counts only where those "
        "before it were accepted, so the columns are chances at each link of the chain. Drafts are the MTP layer's "
        "most likely tokens; text is greedy, or sampled at temperature 1. Greedy text of so small a model repeats "
        "itself, which makes it easy to predict.\n\n"
    )
    return text + "\n".join(table) + _one_pass(reports)


def _one_pass(reports: dict[str, dict[str, Any]]) -> str:
    """What training the MTP layer on its own outputs has changed, where there is a model without that."""
    name = next(iter(reports))
    if f"{name}-one-pass" not in reports:
        return ""
    several, one = reports[name], reports[f"{name}-one-pass"]
    last = ", ".join(
        f"{kind} {100 * one['chains'][kind]['accepted'][-1]:.1f} -> {100 * chain['accepted'][-1]:.1f} %"
        for kind, chain in several["chains"].items()
    )
    losses = f"{one['held_out']['loss']:.3f} -> {several['held_out']['loss']:.3f}"
    return (
        "\n\nOne pass trains the layer for the first draft only; later ones read its own outputs, which it never saw. "
        f"From one pass to several, the last draft of a chain went: {last}; the main model's held-out loss: {losses}."
    )


def _experts(evaluation: dict[str, Any]) -> str:
    if not evaluation["experts"]:
        return ""
    rows = [
        f"| `{layer}` | {load['min']:.2f} | {load['max']:.2f} | {load['idle']} |"
        for layer, load in evaluation["experts"].items()
    ]
    head = (
        "## Load of the experts\n\nHow evenly the experts are used: tokens of held-out text at the least and the most "
        "busy expert, relative to the mean; idle are those below a tenth of it. The last row is the MTP layer's.\n\n"
    )
    return head + "\n".join(["| router | least | most | idle |", "|---|---|---|---|", *rows])


def _samples(evaluation: dict[str, Any]) -> str:
    parts = [
        "## Samples\n\nNot selected. transformers' `generate` on a CPU in float32 after `torch.manual_seed(seed)`; the "
        "prompt is in bold."
    ]
    for sample in evaluation["samples"]:
        text = f"**{sample['prompt']}**{sample['text'].removeprefix(sample['prompt'])}"
        quoted = "\n>\n".join(f"> {line}" for line in text.splitlines() if line)
        sampled = f"Temperature {sample['temperature']}, seed {sample['seed']}"
        parts.append(f"{sampled if sample['temperature'] else 'Greedy'}:\n\n{quoted}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write_curve(Path(argument))
        write_card(Path(argument))
