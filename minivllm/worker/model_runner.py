"""One step on the device: update_states -> prepare inputs -> forward -> sample -> propose drafts.

The runner owns the model, the paged KV cache and the persistent batch. It learns about requests from
`SchedulerOutput` alone, and tells in `ModelRunnerOutput` what came of the step. As a stage of a pipeline it owns a part
of the model and the cache of those layers; `begin`, `forward` and `finish` are then called one by one.
"""

import itertools

import numpy as np
import torch

from minivllm.attention.latent_backend import SkippedLatentAttention
from minivllm.attention.metadata import AttentionMetadata
from minivllm.config import ConfigError, EngineConfig
from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from minivllm.forward_context import ForwardContext, set_forward_context
from minivllm.layers.mla import MLAttention
from minivllm.models.registry import load_model, resolve_dtype
from minivllm.sample.logprobs import gather_logprobs
from minivllm.sample.rejection import RejectionSampler
from minivllm.sample.sampler import Sampler
from minivllm.speculate.choose import make_proposer
from minivllm.speculate.drafter import CachedProposer
from minivllm.speculate.proposer import VerifiedStep
from minivllm.worker.batch import PersistentBatch
from minivllm.worker.inputs import StepInputs, prepare_inputs, ranges
from minivllm.worker.kv_memory import JointCacheSpec, count_blocks
from minivllm.worker.paged_cache import PagedCache
from minivllm.worker.sampling_inputs import SamplingInputs
from minivllm.worker.stage_batch import StageBatch
from minivllm.worker.tensor_parallel import TensorParallelGroup

_PROMPT_LOGPROBS_ROWS = 256
"""Logits of so many prompt rows at a time: all rows of a long prompt times a large vocabulary would not fit."""


class ModelRunner:
    """Runs the steps that the scheduler plans.

    Args:
        config: the engine's settings.
        model_path: directory with the checkpoint, in Hugging Face layout.
        stage: index and number of the pipeline's stages; (0, 1) is a model in one piece.
        device: None: as the config says.
        num_sharing: runners that share the memory of this device, or of this host where it is a CPU.
        allocate: whether the cache is allocated at once; else somebody calls `allocate_kv_cache` with the number of
            blocks that all stages have room for.
        tensor_parallel: this rank's group; all of its ranks run the same steps, and choose the same tokens.

    Attributes:
        max_model_len: longest request in tokens; lowered to what the cache holds where the config left it open.
        num_blocks: KV cache blocks.
        kv_caches: for each attention layer [2, num_blocks, block_size, num_kv_heads, head_dim], or the latents of MLA
            [num_blocks, block_size, 1, d_c + d_r].
        bytes_per_block: of a block in all layers, those of a drafter included.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        stage: tuple[int, int] = (0, 1),
        device: str | None = None,
        num_sharing: int = 1,
        allocate: bool = True,
        tensor_parallel: TensorParallelGroup | None = None,
    ) -> None:
        self.config = config
        self.device = resolve_device(device or config.device)
        self.model, self.hf_config = load_model(
            model_path, self.device, config.dtype, config.load_format, config.max_model_len, config.seed,
            config.quantization, config.gemm_backend, stage, tensor_parallel,
        )  # fmt: skip
        self.stage = self.model.stage
        self.dtype = resolve_dtype(config.dtype, self.device, self.hf_config)
        self.vocab_size = self.hf_config.vocab_size
        self.max_model_len = config.resolve_max_model_len(self.hf_config.max_position_embeddings)
        layers = self.model.attention_layers()
        self.is_mla = isinstance(layers[0], MLAttention)
        self.block_size = config.resolved_block_size(self.is_mla)
        self.cache = PagedCache(layers, config, self.device, self.dtype, self.block_size)
        self.attention_backend = self.cache.backend
        self.sampler, self.rejection_sampler = Sampler(), RejectionSampler()
        self.proposer = make_proposer(self, model_path) if self.stage.is_last else None
        self._caches = [self.cache]
        if isinstance(self.proposer, CachedProposer):
            self._caches.append(self.proposer.cache)
        self.kv_cache_spec, self.kv_cache_dtype = self.cache.spec, self.cache.dtype
        spec = JointCacheSpec(tuple(cache.spec for cache in self._caches))
        self.bytes_per_block = spec.bytes_per_block
        self.num_blocks = count_blocks(
            config, spec, self.max_model_len, self.device, self._measure_activations, num_sharing
        )
        if allocate:
            self.allocate_kv_cache(self.num_blocks)

    def reset(self) -> None:
        """Forget all requests."""
        make_batch = PersistentBatch if self.stage.is_last else StageBatch
        self.batch = make_batch(self.config.max_num_seqs, self.max_model_len, self.block_size)
        self.sampling_inputs = SamplingInputs(self.batch, self.vocab_size, self.device)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks in every layer of this stage, and be ready for requests."""
        self.num_blocks = num_blocks
        if self.config.max_model_len is None:
            self.max_model_len = min(self.max_model_len, num_blocks * self.block_size)
        for cache in self._caches:
            cache.allocate(num_blocks)
        self.kv_caches = self.cache.tensors
        self.reset()

    def _measure_activations(self) -> int:
        """Bytes that the largest step takes beyond weights and cache: a trial run without attention or cache."""
        num_tokens = self.config.max_num_batched_tokens
        num_requests = min(self.config.max_num_seqs * (self.config.num_speculative_tokens + 1), num_tokens)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        context = ForwardContext(
            AttentionMetadata(torch.empty(0), None, None),
            SkippedLatentAttention() if self.is_mla else _SkippedAttention(),
        )
        context.kv_caches = dict.fromkeys((layer.layer_name for layer in self.model.attention_layers()), None)
        with torch.inference_mode(), set_forward_context(context):
            input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
            received = None if self.stage.is_first else self.empty_hidden(num_tokens).zero_()
            hidden = self.model(input_ids, input_ids % self.max_model_len, received)
            logits_bytes = 0
            if self.stage.is_last:
                # A row that samples holds a few copies of its logits at a time (scaled, sorted, softmax, chunks).
                logits_bytes = 6 * self.model.compute_logits(hidden[:num_requests]).float().nbytes
            del hidden, received
            peak = torch.cuda.max_memory_allocated(self.device) - before + logits_bytes
        torch.cuda.empty_cache()
        return peak

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step of a model in one piece; a message without tokens only updates the batch."""
        inputs = self.begin(scheduler_output)
        return ModelRunnerOutput() if inputs is None else self.finish(inputs, self.forward(inputs))

    def begin(self, scheduler_output: SchedulerOutput) -> StepInputs | None:
        """Apply a message to the batch, and lay the step out; None where there is nothing to compute."""
        self.batch.update_states(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return None
        return prepare_inputs(self.batch, scheduler_output, self.device, self.config.num_speculative_tokens)

    @torch.inference_mode()
    def finish(self, inputs: StepInputs, hidden: torch.Tensor) -> ModelRunnerOutput:
        """What the last stage does with what `forward` returned: sample, and draft."""
        output = ModelRunnerOutput(prompt_logprobs=self._prompt_logprobs(inputs, hidden))
        num_emitted = np.zeros(0, dtype=np.int64)
        if len(inputs.sampled):
            num_emitted = self.sample(inputs, hidden, output)
        if self.proposer is not None:
            self.propose(inputs, hidden, num_emitted, output)
        return output

    @torch.inference_mode()
    def propose(
        self, inputs: StepInputs, hidden: torch.Tensor, num_emitted: np.ndarray, output: ModelRunnerOutput
    ) -> None:
        """Draft what may follow the emitted tokens; num_emitted [S] as `sample` returned it."""
        num_accepted_rows = inputs.num_scheduled.copy()
        num_accepted_rows[inputs.sampled] -= inputs.num_drafts + 1 - num_emitted
        drafts = self.proposer.propose(VerifiedStep(self.batch, inputs, hidden, num_accepted_rows, self.max_model_len))
        output.draft_token_ids = drafts.token_ids
        for index in inputs.sampled:
            state = inputs.states[index]
            state.draft_probs = drafts.probabilities.get(state.req_id)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, received: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model over the step's tokens; their K and V are in the cache afterwards. Returns hidden [T, H].

        Between stages travels [2, T, H], which a stage that is not the first takes as `received`.
        """
        with set_forward_context(self.cache.context(inputs.attention)):
            return self.model(inputs.input_ids, inputs.positions, received)

    def empty_hidden(self, num_tokens: int) -> torch.Tensor:
        """[2, num_tokens, hidden_size], for what the stage before sends."""
        return torch.empty(2, num_tokens, self.hf_config.hidden_size, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def sample(self, inputs: StepInputs, hidden: torch.Tensor, output: ModelRunnerOutput) -> np.ndarray:
        """Choose tokens for each request whose last known token was computed: into the batch and the output.

        Returns:
            [S] how many each of them got: one, and one more for each draft that was accepted.
        """
        states = [inputs.states[index] for index in inputs.sampled]
        rows = inputs.rows[inputs.sampled]
        raw_logits = self.model.compute_logits(hidden[inputs.logits_rows])
        wanted = [index for index, state in enumerate(states) if state.sampling_params.logprobs is not None]
        # Processors work in place, and log-probabilities are those of the raw logits.
        logits = raw_logits.clone() if wanted else raw_logits
        cu_rows = np.append(0, (inputs.num_drafts + 1).cumsum())
        if inputs.num_drafts.any():
            draft_rows = self.sampling_inputs.draft_rows(states, rows, inputs.num_drafts, cu_rows)
            token_ids = self.rejection_sampler(logits.float(), **vars(draft_rows))
        else:
            token_ids = self.sampler(logits, self.sampling_inputs.metadata(states, rows))[:, None]
        on_host = token_ids.cpu().numpy()
        num_emitted = (on_host >= 0).sum(axis=1)
        for index, state in enumerate(states):
            if state.output_counts is not None:
                emitted = token_ids[index, : num_emitted[index]]
                state.output_counts.index_add_(0, emitted, torch.ones_like(emitted, dtype=torch.float32))
        if wanted:
            counts = num_emitted[wanted]
            logits_rows = torch.from_numpy(ranges(cu_rows[wanted], counts)).to(self.device)
            chosen = torch.from_numpy(on_host[wanted][on_host[wanted] >= 0]).to(self.device)
            num_top = np.repeat([states[index].sampling_params.logprobs for index in wanted], counts).tolist()
            entries = iter(gather_logprobs(raw_logits[logits_rows], chosen, num_top))
            for index in wanted:
                output.logprobs[states[index].req_id] = list(itertools.islice(entries, int(num_emitted[index])))
        self.batch.append_tokens(rows, on_host, num_emitted)
        output.sampled_token_ids = {
            state.req_id: tokens[:count].tolist()
            for state, tokens, count in zip(states, on_host, num_emitted, strict=True)
        }
        return num_emitted

    def _prompt_logprobs(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[str, list[TokenLogprobs]]:
        """Row p of a prompt predicts token p + 1; rows that were returned before a preemption are left out."""
        result = {}
        for index, state in enumerate(inputs.states):
            num_top = state.sampling_params.prompt_logprobs
            if num_top is None:
                continue
            computed = int(self.batch.num_computed[state.row])
            first = max(computed, state.num_prompt_logprobs)
            last = min(computed + int(inputs.num_scheduled[index]), state.num_prompt_tokens - 1)
            entries: list[TokenLogprobs] = []
            for start in range(first, last, _PROMPT_LOGPROBS_ROWS):
                end = min(start + _PROMPT_LOGPROBS_ROWS, last)
                offset = int(inputs.starts[index]) - computed
                logits = self.model.compute_logits(hidden[offset + start : offset + end])
                next_ids = self.batch.token_ids[state.row, start + 1 : end + 1].astype(np.int64)
                targets = torch.from_numpy(next_ids).to(self.device)
                entries += gather_logprobs(logits, targets, [num_top] * (end - start))
            state.num_prompt_logprobs = max(state.num_prompt_logprobs, last)
            if entries:
                result[state.req_id] = entries
        return result


class _SkippedAttention:
    """Stands in for a backend while memory is measured and there is no cache yet."""

    name = "skipped"

    def store(self, *_: object) -> None:
        pass

    def attend(self, q: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros_like(q)


def resolve_device(device: str) -> torch.device:
    """ "auto" is the GPU if there is one; raises ConfigError where the named device does not exist."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} needs a CUDA GPU, and PyTorch sees none: use device='cpu'")
    found = torch.device(device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={device!r}: PyTorch sees {torch.cuda.device_count()} GPU(s), counted from cuda:0")
    return found
