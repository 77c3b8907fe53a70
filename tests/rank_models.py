"""All ranks' parts of a model in one process, and their logits."""

import torch
from cached_forward import STEPS, logits_in_steps

from minivllm.models.registry import load_model
from minivllm.worker.tensor_parallel import ThreadGroup

NUM_TOKENS = sum(STEPS)


def ids_below(vocab_size):
    return torch.randint(vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def load_ranks(path, size, **settings):
    """All ranks' models, and their groups."""
    groups = ThreadGroup.create(size)
    settings = {"dtype": "float32", **settings}
    return [load_model(path, tensor_parallel=group, **settings)[0] for group in groups], groups


@torch.inference_mode()
def logits_of(group, model, ids):
    return logits_in_steps(model, ids)
