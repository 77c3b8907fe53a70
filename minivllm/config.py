"""The engine's settings: one plain dataclass, validated where it is made, without torch.

Names are vLLM's where vLLM has one. A value that cannot work is refused here, by name, with what would work; an
option whose piece is not built yet is refused by name until it is. What depends on the model (its longest
context, its cache size) is resolved later, by `resolve_max_model_len` and by the KV cache manager.
"""

from dataclasses import dataclass, field
from typing import Any

from minivllm.speculative_config import SpeculativeConfig, SpeculativeConfigError

SUPPORTED_DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = (None, "fp8", "fp8_block", "int8")
GEMM_BACKENDS = (
    "auto", "deep_gemm", "cublas", "cublas_fp8", "cutlass", "cublas_int8", "triton_bf16", "triton_fp8_block",
    "triton_int8", "reference",
)  # fmt: skip
ATTENTION_BACKENDS = ("auto", "reference", "torch", "triton")
EXECUTOR_BACKENDS = ("auto", "mp", "torchrun", "in_process")
DEFAULT_BLOCK_SIZE = 16
DEFAULT_MLA_BLOCK_SIZE = 64


class ConfigError(ValueError):
    """A setting that cannot work; the message names it and says what would."""


def _speculation(config: "EngineConfig") -> SpeculativeConfig | None:
    """The checked settings, or None where nothing is drafted."""
    if config.speculative_config is None:
        return None
    try:
        settings = SpeculativeConfig.of(config.speculative_config)
    except SpeculativeConfigError as error:
        raise ConfigError(str(error)) from None
    if settings.method == "ngram" and config.async_scheduling and settings.num_speculative_tokens:
        raise ConfigError(
            "async_scheduling=True cannot go with speculative_config method 'ngram', which looks tokens up that the "
            "host does not know yet: use 'draft_model' or 'mtp', or async_scheduling=False"
        )
    return settings if settings.num_speculative_tokens else None


@dataclass
class EngineConfig:
    """Everything an engine is built from.

    Sizes are in tokens unless the name says otherwise. `max_num_batched_tokens` is the token budget of one step,
    `max_num_seqs` the most requests that run at the same time over the whole life of the engine.
    """

    model: str
    load_format: str = "auto"
    """ "auto" reads safetensors; "dummy" fills random weights, so that only a config.json is needed."""
    skip_tokenizer_init: bool = False
    """Take and give token ids only; no tokenizer is loaded."""
    dtype: str = "auto"
    """ "auto": the checkpoint's own dtype on a GPU, float32 on a CPU."""
    device: str = "auto"
    quantization: str | None = None
    """Weights and activations of linear layers in 8 bits, made at load time: "fp8", "fp8_block" or "int8"."""
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    """Tokens in one KV cache block; None means 16, or 64 where the cache holds latents (MLA)."""
    num_gpu_blocks_override: int | None = None
    """Number of KV cache blocks; None measures the free memory (of a CPU too)."""
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Longest prefill chunk of one request in one step; 0 means no limit of its own."""
    scheduling_policy: str = "fcfs"
    """ "fcfs": first come, first served; "priority": requests of lower `priority` first, preempted last."""
    attention_backend: str = "auto"
    gemm_backend: str = "auto"
    """The backend of gemm/dispatch.py that comes first where it serves."""
    speculative_config: dict[str, Any] | None = None
    """See `SpeculativeConfig`; None, or a dict with "num_speculative_tokens" 0, means no speculation."""
    tensor_parallel_size: int = 1
    """Ranks that share out each layer: heads, columns and experts."""
    pipeline_parallel_size: int = 1
    """Stages that the layers are split into; each has a process (and a GPU) of its own, or all share this one."""
    pp_token_feedback: str = "scheduler"
    """How sampled tokens reach the stages that do not sample: by the scheduler, in the next message, or by the last
    stage, which broadcasts them."""
    distributed_executor_backend: str = "auto"
    """ "mp" starts a process a stage on this host; "torchrun" takes those that torchrun has started; "in_process" keeps
    the stages in this process, one after the other, to be looked at; "auto" is "torchrun" under torchrun, else "mp"."""
    async_scheduling: bool = False
    enforce_eager: bool = False
    """Never capture CUDA graphs. None are captured yet, so both values run the same code."""
    seed: int = 0

    speculation: SpeculativeConfig | None = field(default=None, init=False, repr=False)
    """The same, checked; None where nothing is drafted."""
    num_speculative_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.speculation = _speculation(self)
        if self.speculation is not None:
            self.num_speculative_tokens = self.speculation.num_speculative_tokens
        self._check_choices()
        self._check_sizes()
        self._check_parallelism()
        self._refuse_what_is_not_built()

    def _check_choices(self) -> None:
        _check_in("load_format", self.load_format, ("auto", "dummy"))
        _check_in("dtype", self.dtype, SUPPORTED_DTYPES)
        _check_in("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _check_in("quantization", self.quantization, QUANTIZATIONS)
        _check_in("gemm_backend", self.gemm_backend, GEMM_BACKENDS)
        _check_in("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8"))
        _check_in("pp_token_feedback", self.pp_token_feedback, ("scheduler", "broadcast"))
        _check_in("distributed_executor_backend", self.distributed_executor_backend, EXECUTOR_BACKENDS)
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model must be a model's name or the path of its directory, not empty")
        if not (self.device in ("auto", "cpu", "cuda") or str(self.device).startswith("cuda:")):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")

    def _check_sizes(self) -> None:
        _check_positive("max_num_seqs", self.max_num_seqs)
        _check_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _check_positive("pipeline_parallel_size", self.pipeline_parallel_size)
        _check_positive("tensor_parallel_size", self.tensor_parallel_size)
        for name in ("block_size", "num_gpu_blocks_override", "max_model_len"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}")
        if not _is_whole(self.long_prefill_token_threshold) or self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold must be 0 (no limit) or positive, not "
                f"{self.long_prefill_token_threshold!r}"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                "long_prefill_token_threshold cuts prompts into chunks: leave it at 0, or set "
                "enable_chunked_prefill=True"
            )
        if not _is_whole(self.seed) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must be a 64-bit whole number, not {self.seed!r}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("max_model_len must be at least 2: one token of prompt and one of output")
        needed = self.max_num_seqs * (self.num_speculative_tokens + 1)
        if self.max_num_batched_tokens < needed:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than what max_num_seqs "
                f"({self.max_num_seqs}) requests need in one step ({needed} tokens): raise it to {needed}, or "
                f"lower max_num_seqs to {self.max_num_batched_tokens // (self.num_speculative_tokens + 1)}"
            )

    def _check_parallelism(self) -> None:
        if self.pipeline_parallel_size == 1 and self.pp_token_feedback != "scheduler":
            raise ConfigError(
                f"pp_token_feedback={self.pp_token_feedback!r} needs several stages, and pipeline_parallel_size is 1: "
                "raise it, or leave pp_token_feedback at 'scheduler'"
            )
        if self.world_size == 1:
            return
        is_in_process = self.distributed_executor_backend == "in_process"
        if self.tensor_parallel_size > 1 and is_in_process:
            raise ConfigError(
                "distributed_executor_backend='in_process' keeps the stages of a pipeline in one process, but not "
                f"tensor-parallel ranks: use 'mp' or 'torchrun' with tensor_parallel_size={self.tensor_parallel_size}"
            )
        if self.device.startswith("cuda:") and not is_in_process:
            raise ConfigError(
                f"device={self.device!r} names one GPU, but each of the {self.world_size} ranks has its own: use "
                "device='cuda'"
            )

    @property
    def world_size(self) -> int:
        """Ranks: stages times tensor-parallel parts of each."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    def _refuse_what_is_not_built(self) -> None:
        """Options that architecture and command line already name, but that nothing serves yet."""
        not_built = {
            "async_scheduling": self.async_scheduling,
        }
        for name, is_set in not_built.items():
            if is_set:
                default = type(self).__dataclass_fields__[name].default
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not built yet: leave it at its default ({default!r})"
                )
        if self.attention_backend == "hopper":
            raise ConfigError(
                f"attention_backend={self.attention_backend!r} is not built yet: use one of "
                f"{', '.join(ATTENTION_BACKENDS)}"
            )
        _check_in("attention_backend", self.attention_backend, ATTENTION_BACKENDS)

    def resolved_block_size(self, is_mla: bool = False) -> int:
        """Tokens a block holds, in a cache of K and V or of latents."""
        default = DEFAULT_MLA_BLOCK_SIZE if is_mla else DEFAULT_BLOCK_SIZE
        return default if self.block_size is None else self.block_size

    def resolve_max_model_len(self, longest_context: int) -> int:
        """The longest request, prompt and output together, given what the model was trained for.

        Raises:
            ConfigError: `max_model_len` was set to more than the model's own positions.
        """
        if self.max_model_len is None:
            return longest_context
        if self.max_model_len > longest_context:
            raise ConfigError(
                f"max_model_len ({self.max_model_len}) is longer than the model's max_position_embeddings "
                f"({longest_context}): lower it to at most {longest_context}"
            )
        return self.max_model_len


def _check_in(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if not _is_whole(value) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, not {value!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
