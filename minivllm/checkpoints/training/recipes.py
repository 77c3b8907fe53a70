"""The models and how each is trained.

A recipe is written to the checkpoint (training.json) and compared when a run is resumed. Sizes: all widths are
multiples of 128 except single heads, which are multiples of 16; heads and experts are even in number; embedding
and head are tied, which saves a fifth of the parameters and regularises. Five million tokens are few: dropout and
weight decay are on, and the weights kept are those with the lowest held-out loss.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

VOCAB_SIZE = 4096

_MLA = {
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which weights come out, apart from the text and the tokenizer.

    steps is the planned number of optimizer steps; the learning rate warms up linearly over warmup_steps, then falls
    to a tenth by a cosine. mtp_passes is how often the MTP layer is unrolled (0 for a model without one) and
    mtp_weight the factor of its mean loss, of which the share mtp_distillation is against the target's distribution and
    the rest against the text. bias_update_speed is DeepSeek-V3's gamma, sequence_balance its alpha.
    patience counts evaluations without a lower held-out loss before training ends. minutes is the model's share when
    several are trained in one budget.
    """

    name: str
    description: str
    architecture: dict[str, Any] = field(hash=False)
    steps: int = 3000
    batch_size: int = 32
    sequence_length: int = 1024
    learning_rate: float = 2e-3
    warmup_steps: int = 150
    weight_decay: float = 0.3
    dropout: float = 0.2
    clip_norm: float = 1.0
    mtp_passes: int = 0
    mtp_weight: float = 0.3
    mtp_distillation: float = 0.5
    bias_update_speed: float = 1e-3
    sequence_balance: float = 1e-4
    eval_every: int = 150
    patience: int = 6
    seed: int = 0
    minutes: float = 2.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length", "eval_every", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}, must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout}, must be in [0, 1)")
        if not 0 <= self.mtp_distillation <= 1:
            raise ValueError(f"mtp_distillation = {self.mtp_distillation}, must be in [0, 1]")
        if self.mtp_passes < 0:
            raise ValueError(f"mtp_passes = {self.mtp_passes}, must be 0 (no MTP layer) or more")
        if self.mtp_passes and self.architecture["model_type"] != "deepseek_v3":
            raise ValueError(f"{self.name} is a {self.architecture['model_type']}; only deepseek_v3 has an MTP layer")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="tiny-deepseek",
            description="DeepSeek-V3 in small: MLA, 16 routed experts and a shared one, one MTP layer",
            architecture=_MLA | {"intermediate_size": 384, "first_k_dense_replace": 1},
            mtp_passes=3,
            minutes=5.0,
        ),
        Recipe(
            name="tiny-qwen3",
            description="Qwen3 in small, the target of a draft model",
            architecture=_QWEN3
            | {
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 8,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            learning_rate=1.5e-3,
            minutes=2.5,
        ),
        Recipe(
            name="tiny-qwen3-draft",
            description="a two-layer Qwen3 that drafts for tiny-qwen3",
            architecture=_QWEN3
            | {
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
            },
            steps=5000,
            weight_decay=0.1,
            dropout=0.05,
            minutes=1.5,
        ),
        Recipe(
            name="tiny-dense",
            description="the plain baseline of tiny-deepseek: the same size and attention, no experts, no MTP",
            architecture=_MLA | {"intermediate_size": 1920, "first_k_dense_replace": 6},
            minutes=2.0,
        ),
    )
}
ONE_PASS = replace(
    RECIPES["tiny-deepseek"],
    name="tiny-deepseek-one-pass",
    description="tiny-deepseek with its MTP layer trained on the first pass only, for comparison",
    mtp_passes=1,
    minutes=3.0,
)
RECIPES[ONE_PASS.name] = ONE_PASS


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError, which lists the names."""
    if name not in RECIPES:
        raise ValueError(f"unknown config {name!r}; known: {', '.join(RECIPES)}, and all")
    return RECIPES[name]
