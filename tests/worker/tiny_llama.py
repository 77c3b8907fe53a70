"""A random Llama of two layers as transformers saves it, and what transformers itself does with it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.worker.model_runner import ModelRunner

VOCAB_SIZE = 160
MAX_POSITIONS = 512


@dataclass
class TinyLlama:
    """A checkpoint directory, and transformers' own answers in float32."""

    path: Path

    @classmethod
    def save(cls, path: Path) -> "TinyLlama":
        """Weights are larger than usual, so that the best token stands out and depends on the whole context."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(path)
        return cls(path)

    @cached_property
    def _model(self):
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), V] float32."""
        return self._model(torch.tensor([token_ids])).logits[0]

    @torch.no_grad()
    def greedy(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        """transformers' greedy continuation and its smallest margin between the best two logits."""
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best_two = torch.cat(out.logits).topk(2).values
        return out.sequences[0, len(prompt) :].tolist(), (best_two[:, 0] - best_two[:, 1]).min().item()

    def engine(self, **settings) -> EngineCore:
        config = EngineConfig(str(self.path), **{"dtype": "float32", "device": "cpu", "max_num_seqs": 16, **settings})
        runner = ModelRunner(config, str(self.path))
        return EngineCore(config, runner, runner.num_blocks, runner.max_model_len)


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
