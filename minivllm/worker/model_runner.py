"""One step on the device: update_states -> prepare inputs -> forward -> sample.

The runner owns the model, the paged KV cache and the persistent batch. It learns about requests from
`SchedulerOutput` alone, and tells in `ModelRunnerOutput` what came of the step.
"""

import numpy as np
import torch

from minivllm.attention.backend import choose_backend
from minivllm.attention.latent import choose_latent_backend, resolve_latent_cache
from minivllm.attention.latent_backend import SkippedLatentAttention
from minivllm.attention.metadata import AttentionMetadata
from minivllm.config import ConfigError, EngineConfig
from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from minivllm.forward_context import ForwardContext, set_forward_context
from minivllm.layers.mla import MLAttention
from minivllm.models.registry import load_model, resolve_dtype
from minivllm.sample.logprobs import gather_logprobs
from minivllm.sample.sampler import PenaltyRow, Sampler, SamplingMetadata
from minivllm.worker.batch import PersistentBatch, RequestState
from minivllm.worker.inputs import StepInputs, copy_to_device, prepare_inputs
from minivllm.worker.kv_memory import KVCacheSpec, LatentCacheSpec, count_blocks

_PROMPT_LOGPROBS_ROWS = 256
"""Logits of so many prompt rows at a time: all rows of a long prompt times a large vocabulary would not fit."""


class ModelRunner:
    """Runs the steps that the scheduler plans.

    Args:
        config: the engine's settings.
        model_path: directory with the checkpoint, in Hugging Face layout.

    Attributes:
        max_model_len: longest request in tokens; lowered to what the cache holds where the config left it open.
        num_blocks: KV cache blocks.
        kv_caches: for each attention layer [2, num_blocks, block_size, num_kv_heads, head_dim], or the latents of MLA
            [num_blocks, block_size, 1, d_c + d_r].
    """

    def __init__(self, config: EngineConfig, model_path: str) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        self.model, self.hf_config = load_model(
            model_path, self.device, config.dtype, config.load_format, config.max_model_len, config.seed,
            config.quantization, config.gemm_backend,
        )  # fmt: skip
        self.dtype = resolve_dtype(config.dtype, self.device, self.hf_config)
        self.vocab_size = self.hf_config.vocab_size
        self.max_model_len = config.resolve_max_model_len(self.hf_config.max_position_embeddings)
        first = self.model.attention_layers()[0]
        self.is_mla = isinstance(first, MLAttention)
        self.block_size = config.resolved_block_size(self.is_mla)
        asked = config.attention_backend, self.device
        if self.is_mla:
            self.attention_backend = choose_latent_backend(*asked, first, self.block_size)
        else:
            self.attention_backend = choose_backend(*asked, first.head_dim, self.block_size)
        self.sampler = Sampler()
        self.kv_caches: dict[str, torch.Tensor] = {}
        self._allocate_kv_cache()
        self._caches_by_layer = {name: cache if self.is_mla else tuple(cache) for name, cache in self.kv_caches.items()}
        self.reset()

    def reset(self) -> None:
        """Forget all requests."""
        self.batch = PersistentBatch(self.config.max_num_seqs, self.max_model_len, self.block_size)

    def _allocate_kv_cache(self) -> None:
        layers = self.model.attention_layers()
        asked = self.config.kv_cache_dtype, self.dtype, self.attention_backend.name
        spec: KVCacheSpec | LatentCacheSpec
        if self.is_mla:
            self.kv_cache_dtype, row_size = resolve_latent_cache(*asked, layers[0])
            spec = LatentCacheSpec(len(layers), self.block_size, row_size, self.kv_cache_dtype.itemsize)
        else:
            self.kv_cache_dtype = resolve_kv_cache_dtype(*asked)
            spec = KVCacheSpec(
                num_layers=len(layers),
                block_size=self.block_size,
                num_kv_heads=layers[0].num_kv_heads,
                head_dim=layers[0].head_dim,
                bytes_per_element=self.kv_cache_dtype.itemsize,
            )
        self.kv_cache_spec = spec
        self.num_blocks = count_blocks(self.config, spec, self.max_model_len, self.device, self._measure_activations)
        capacity = self.num_blocks * self.block_size
        if self.config.max_model_len is None:
            self.max_model_len = min(self.max_model_len, capacity)
        for layer in layers:
            # Not zeroed: nothing may ever read a slot that was not written, and tests poison them to prove it.
            self.kv_caches[layer.layer_name] = torch.empty(
                spec.layer_shape(self.num_blocks), dtype=self.kv_cache_dtype, device=self.device
            )

    def _measure_activations(self) -> int:
        """Bytes that the largest step takes beyond weights and cache: a trial run without attention or cache."""
        num_tokens = self.config.max_num_batched_tokens
        num_requests = min(self.config.max_num_seqs, num_tokens)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        context = ForwardContext(
            AttentionMetadata(torch.empty(0), None, None),
            SkippedLatentAttention() if self.is_mla else _SkippedAttention(),
        )
        context.kv_caches = dict.fromkeys((layer.layer_name for layer in self.model.attention_layers()), None)
        with torch.inference_mode(), set_forward_context(context):
            input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
            hidden = self.model(input_ids, input_ids % self.max_model_len)
            logits = self.model.compute_logits(hidden[:num_requests]).float()
            # A row that samples holds a few copies of its logits at a time (scaled, sorted, softmax, chunks).
            del hidden
            peak = torch.cuda.max_memory_allocated(self.device) - before + 6 * logits.nbytes
        del logits
        torch.cuda.empty_cache()
        return peak

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; a message without tokens only updates the batch."""
        self.batch.update_states(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return ModelRunnerOutput()
        inputs = prepare_inputs(self.batch, scheduler_output, self.device)
        hidden = self.forward(inputs)
        output = ModelRunnerOutput(prompt_logprobs=self._prompt_logprobs(inputs, hidden))
        if len(inputs.sampled):
            self.sample(inputs, hidden, output)
        return output

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Run the model over the step's tokens; their K and V are in the cache afterwards. Returns hidden [T, H]."""
        with set_forward_context(ForwardContext(inputs.attention, self.attention_backend, self._caches_by_layer)):
            return self.model(inputs.input_ids, inputs.positions)

    @torch.inference_mode()
    def sample(self, inputs: StepInputs, hidden: torch.Tensor, output: ModelRunnerOutput) -> None:
        """Choose a token for each request whose last known token was computed: into the batch and the output."""
        states = [inputs.states[index] for index in inputs.sampled]
        rows = inputs.rows[inputs.sampled]
        raw_logits = self.model.compute_logits(hidden[inputs.logits_rows])
        wanted = [index for index, state in enumerate(states) if state.sampling_params.logprobs is not None]
        # Processors work in place, and log-probabilities are those of the raw logits.
        logits = raw_logits.clone() if wanted else raw_logits
        token_ids = self.sampler(logits, self._sampling_metadata(states, rows))
        for index, state in enumerate(states):
            if state.output_counts is not None:
                state.output_counts[token_ids[index]] += 1
        if wanted:
            entries = gather_logprobs(
                raw_logits[wanted], token_ids[wanted], [states[i].sampling_params.logprobs for i in wanted]
            )
            output.logprobs = {states[i].req_id: [entry] for i, entry in zip(wanted, entries, strict=True)}
        on_host = token_ids.tolist()
        self.batch.append_token(rows, np.array(on_host))
        output.sampled_token_ids = {state.req_id: [token_id] for state, token_id in zip(states, on_host, strict=True)}

    def _sampling_metadata(self, states: list[RequestState], rows: np.ndarray) -> SamplingMetadata:
        batch = self.batch
        temperature, top_k = batch.temperature[rows], batch.top_k[rows]
        is_random = temperature > 0
        random_top_k = top_k[is_random]
        tensors = copy_to_device(
            {
                "temperature": temperature,
                "top_k": top_k,
                "top_p": batch.top_p[rows],
                "min_p": batch.min_p[rows],
                "seeds": batch.seeds[rows],
                "positions": batch.num_tokens[rows],
            },
            self.device,
        )
        return SamplingMetadata(
            **tensors,
            all_greedy=not is_random.any(),
            all_random=bool(is_random.all()),
            max_top_k=int(random_top_k.max()) if random_top_k.size and random_top_k.all() else 0,
            any_top_k=bool(random_top_k.any()),
            any_top_p=bool((batch.top_p[rows] < 1)[is_random].any()),
            any_min_p=bool((batch.min_p[rows] > 0)[is_random].any()),
            penalties=[
                self._penalty_row(index, state)
                for index, state in enumerate(states)
                if state.sampling_params.has_penalties
            ],
            banned_token_ids=[
                (index, sorted(state.stop_token_ids))
                for index, state in enumerate(states)
                if state.stop_token_ids and self._num_outputs(state) < state.sampling_params.min_tokens
            ],
        )

    def _num_outputs(self, state: RequestState) -> int:
        return int(self.batch.num_tokens[state.row]) - state.num_prompt_tokens

    def _penalty_row(self, index: int, state: RequestState) -> PenaltyRow:
        """Counts are made once from the tokens and then kept up to date, also while a request is preempted."""
        if state.output_counts is None:
            tokens = self.batch.token_ids[state.row, : self.batch.num_tokens[state.row]].astype(np.int64)
            prompt, outputs = np.split(tokens, [state.num_prompt_tokens])
            counts = np.bincount(outputs, minlength=self.vocab_size).astype(np.float32)
            mask = np.bincount(prompt, minlength=self.vocab_size) > 0
            state.prompt_mask = torch.from_numpy(mask).to(self.device)
            state.output_counts = torch.from_numpy(counts).to(self.device)
        params = state.sampling_params
        return PenaltyRow(
            index,
            state.prompt_mask,
            state.output_counts,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )

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


def resolve_kv_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype, backend: str) -> torch.dtype:
    """The model's own dtype, or float8_e4m3fn for "fp8"; raises ConfigError where the backend cannot read that."""
    if kv_cache_dtype == "auto":
        return dtype
    if backend != "triton":
        raise ConfigError(
            f"kv_cache_dtype='fp8' needs attention_backend='triton', not {backend!r}: the other backends read only a "
            "cache of the model's own dtype"
        )
    return torch.float8_e4m3fn


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
