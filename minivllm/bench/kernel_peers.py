"""Attention kernels of other projects, for the same tensors as ours: PyTorch's always, vLLM's where it is installed.

Each function takes the case and returns {name: a call without arguments that computes the output}. A peer that is not
installed, or that refuses a shape, is not in the run; nothing here is a dependency.

| name | from | what it is |
|---|---|---|
| sdpa_flash, sdpa_cudnn | PyTorch | FlashAttention-2 and cuDNN behind scaled_dot_product_attention |
| fa3 | vllm.vllm_flash_attn | FlashAttention-3, packed or paged |
| vllm_triton | vllm.v1.attention.ops | vLLM's unified paged attention, and its MLA decode, both in Triton |
| flash_mla | vllm.third_party.flashmla | DeepSeek's FlashMLA |
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Calls = dict[str, Callable[[], Tensor]]


def vllm_function(module: str, name: str) -> Callable | None:
    """A function of an installed vLLM; None if vLLM is not there, or, with a warning that says why, cannot give it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        warnings.warn(f"{module}.{name} is not in this run: {type(error).__name__}: {error}", stacklevel=2)
        return None


def flash_peers(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, batch: int, length: int) -> Calls:
    """Causal attention over `batch` requests of equal length; q [batch length, H, D], k and v with Hkv heads."""
    calls: Calls = {}
    dense = [x.unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v)]
    gqa = q.shape[1] != k.shape[1]

    def sdpa(backend: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=gqa)
            return out.transpose(1, 2).flatten(0, 1)

        return call

    calls["sdpa_flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
    calls["sdpa_cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    fa3 = vllm_function("vllm.vllm_flash_attn", "flash_attn_varlen_func")
    if fa3:
        calls["fa3"] = lambda: fa3(q, k, v, length, cu, length, cu_seqlens_k=cu, causal=True, fa_version=3)
    return calls


def paged_peers(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu: Tensor, seq_lens: Tensor, table: Tensor, longest: int
) -> Calls:
    """One query a request over a paged cache; arguments as of minivllm's paged_attention."""
    calls: Calls = {}
    fa3 = vllm_function("vllm.vllm_flash_attn", "flash_attn_varlen_func")
    if fa3:
        calls["fa3"] = lambda: fa3(
            q, k_cache, v_cache, 1, cu, longest, seqused_k=seq_lens, block_table=table, causal=True, fa_version=3
        )
    unified = vllm_function("vllm.v1.attention.ops.triton_unified_attention", "unified_attention")
    if unified:
        out = torch.empty_like(q)
        one = torch.ones(1, dtype=torch.float32, device=q.device)
        scale = q.shape[-1] ** -0.5

        def call() -> Tensor:
            unified(
                q=q, k=k_cache, v=v_cache, out=out, cu_seqlens_q=cu, max_seqlen_q=1, seqused_k=seq_lens,
                max_seqlen_k=longest, softmax_scale=scale, causal=True, window_size=(-1, -1), block_table=table,
                softcap=0, q_descale=None, k_descale=one, v_descale=one,
            )  # fmt: skip
            return out

        calls["vllm_triton"] = call
    return calls


def mla_peers(q: Tensor, cache: Tensor, table: Tensor, seq_lens: Tensor, scale: float, fp8: bool) -> Calls:
    """Absorbed latent decode; arguments as of minivllm's flash_mla_with_kvcache, d_c = 512."""
    calls: Calls = {}
    module = "vllm.third_party.flashmla.flash_mla_interface"
    attend, plan = vllm_function(module, "flash_mla_with_kvcache"), vllm_function(module, "get_mla_metadata")
    if attend and plan and not fp8:
        metadata, num_splits = plan(seq_lens, q.shape[1] * q.shape[2], 1)
        calls["flash_mla"] = lambda: attend(
            q, cache, table, seq_lens, 512, metadata, num_splits, softmax_scale=scale, causal=q.shape[1] > 1
        )[0]
    decode = vllm_function("vllm.v1.attention.ops.triton_decode_attention", "decode_attention_fwd")
    if decode and not fp8 and q.shape[1] == 1:
        batch, _, heads, _ = q.shape
        splits = 4
        out = torch.empty(batch, heads, 512, dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, heads, dtype=q.dtype, device=q.device)
        logits = torch.empty(batch, heads, splits, 513, dtype=torch.float32, device=q.device)

        def call() -> Tensor:
            decode(
                q[:, 0], cache, cache[..., :512], out, lse, table, seq_lens, logits, splits, scale, cache.shape[1],
                is_mla=True,
            )  # fmt: skip
            return out[:, None]

        calls["vllm_triton"] = call
    return calls
