"""The proposer that a config asks for, with its weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.checkpoints import CheckpointError, resolve
from minivllm.config import ConfigError
from minivllm.models.registry import load_model, load_mtp
from minivllm.speculate.draft_model import DraftModelProposer, check_vocabularies
from minivllm.speculate.mtp import MTPProposer
from minivllm.speculate.ngram import NgramProposer
from minivllm.speculate.proposer import Proposer
from minivllm.worker.paged_cache import PagedCache

if TYPE_CHECKING:
    from minivllm.worker.model_runner import ModelRunner


def make_proposer(runner: "ModelRunner", model_path: str) -> Proposer | None:
    """None where nothing is drafted. The cache of a drafter is not allocated yet.

    Raises:
        ConfigError: the draft model is missing, or does not share the target's vocabulary.
        CheckpointError: the target has no MTP layers.
    """
    config, settings = runner.config, runner.config.speculation
    if settings is None:
        return None
    k, draws = settings.num_speculative_tokens, settings.draft_sample_method == "probabilistic"
    if settings.method == "ngram":
        return NgramProposer(k, settings.prompt_lookup_min, settings.prompt_lookup_max)
    asked = config, runner.device, runner.dtype, runner.block_size
    if settings.method == "mtp":
        mtp = load_mtp(model_path, runner.model, runner.hf_config, config.load_format, config.seed)
        return MTPProposer(k, mtp, PagedCache(mtp.attention_layers()[:1], *asked), draws)
    try:
        path = resolve(settings.model)
        model, draft_config = load_model(
            path, runner.device, runner.dtype, config.load_format, runner.max_model_len, config.seed
        )
    except CheckpointError as error:
        raise ConfigError(f"speculative_config: the draft model is missing or unusable: {error}") from None
    check_vocabularies(Path(model_path), path, runner.vocab_size, draft_config.vocab_size)
    return DraftModelProposer(k, model, PagedCache(model.attention_layers(), *asked), draws)
