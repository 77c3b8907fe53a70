"""What an engine is asked to do in a benchmark: prompts, output lengths, and the model they are meant for.

| workload  | requests | prompts      | outputs      | model                                | meant for |
|-----------|----------|--------------|--------------|--------------------------------------|-----------|
| mixed     | 32       | 16 to 256    | 16 to 128    | smollm2-135m, float32, greedy        | CPUs      |
| yardstick | 256      | 100 to 1024  | 100 to 1024  | Qwen3-0.6B's shape, random, bfloat16 | GPUs      |

The yardstick is that of nano-vllm (https://github.com/GeeeekExplorer/nano-vllm), and its numbers can be compared with
published ones: Python's `random` with seed 0 draws each prompt's length and ids, then all output lengths. Every
request runs to its full length (`ignore_eos`), so that all engines do the same work whatever they sample.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST_TOKEN_ID = 10_000

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class WorkloadSpec:
    """How requests are drawn; ranges include both ends. `model` None means a config of Qwen3-0.6B's shape."""

    name: str
    num_requests: int
    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]
    temperature: float
    model: str | None
    load_format: str
    dtype: str
    max_model_len: int


SPECS = {
    spec.name: spec
    for spec in (
        WorkloadSpec("mixed", 32, (16, 256), (16, 128), 0.0, "smollm2-135m", "auto", "float32", 512),
        WorkloadSpec("yardstick", 256, (100, 1024), (100, 1024), 0.6, None, "dummy", "bfloat16", 4096),
    )
}


@dataclass(frozen=True)
class Workload:
    """Requests: prompt i gets exactly output_lens[i] tokens."""

    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def draw_workload(spec: WorkloadSpec, num_requests: int | None = None, vocab_size: int | None = None) -> Workload:
    """The requests of a workload, the same on every machine.

    Args:
        num_requests: fewer (or more) than the spec says.
        vocab_size: of a model with less than 10,001 tokens, whose ids the prompts must not exceed.
    """
    generator = random.Random(0)
    count = num_requests or spec.num_requests
    largest = min(LARGEST_TOKEN_ID, (vocab_size or LARGEST_TOKEN_ID + 1) - 1)
    prompts = [
        [generator.randint(0, largest) for _ in range(generator.randint(*spec.prompt_lens))] for _ in range(count)
    ]
    output_lens = [generator.randint(*spec.output_lens) for _ in range(count)]
    return Workload(prompts, output_lens, spec.temperature)


def write_qwen3_config(directory: Path) -> None:
    """A config.json of Qwen3-0.6B's shape: all that a model with random weights needs."""
    (directory / "config.json").write_text(json.dumps(QWEN3_0_6B, indent=1) + "\n")


def model_shape(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a Hugging Face config that decide what a step costs."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    )
    return {name: config[name] for name in names if name in config}
