"""From a scheduler's message to the tensors of one forward pass.

All of it is computed with NumPy on the host from the persistent batch, and travels to the device in one copy.
"""

from dataclasses import dataclass

import numpy as np
import torch

from minivllm.attention.metadata import AttentionMetadata, PagedRows
from minivllm.engine.messages import SchedulerOutput
from minivllm.worker.batch import PersistentBatch, RequestState


@dataclass
class StepInputs:
    """One step. Requests are in the order of their rows in the flat token list: decodes first."""

    states: list[RequestState]
    rows: np.ndarray
    """[B] row of each request in the persistent batch."""
    starts: np.ndarray
    """[B] first flat row of each request."""
    num_scheduled: np.ndarray
    """[B] flat rows of each request."""
    sampled: np.ndarray
    """Indices (into the B requests) of those whose last known token is computed: they get a new token."""
    input_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64."""
    logits_rows: torch.Tensor
    """[S] int64: flat rows whose logits are sampled from."""
    attention: AttentionMetadata


def prepare_inputs(batch: PersistentBatch, scheduler_output: SchedulerOutput, device: torch.device) -> StepInputs:
    """Lay the scheduled tokens out in one flat list and find their slots in the cache."""
    scheduled = list(scheduler_output.num_scheduled_tokens.items())
    scheduled.sort(key=lambda item: item[1] > 1)  # stable: decodes first, each part in the scheduler's order
    states = [batch.states[req_id] for req_id, _ in scheduled]
    rows = np.array([state.row for state in states])
    num_scheduled = np.array([count for _, count in scheduled])
    num_decodes = int((num_scheduled == 1).sum())

    computed = batch.num_computed[rows]
    seq_lens = computed + num_scheduled
    ends = num_scheduled.cumsum()
    starts = ends - num_scheduled
    row_of_token = rows.repeat(num_scheduled)
    positions = np.arange(ends[-1]) + (computed - starts).repeat(num_scheduled)
    block_ids = batch.block_table[row_of_token, positions // batch.block_size].astype(np.int64)
    width = int(-(-seq_lens.max() // batch.block_size))
    sampled = np.nonzero(seq_lens >= batch.num_tokens[rows])[0]

    on_device = copy_to_device(
        {
            "input_ids": batch.token_ids[row_of_token, positions].astype(np.int64),
            "positions": positions,
            "slot_mapping": block_ids * batch.block_size + positions % batch.block_size,
            "logits_rows": ends[sampled] - 1,
            "seq_lens": seq_lens.astype(np.int32),
            "cu_seqlens_decode": np.arange(num_decodes + 1, dtype=np.int32),
            "cu_seqlens_varlen": np.append(starts[num_decodes:], ends[-1]).astype(np.int32) - num_decodes,
            "block_table": batch.block_table[rows, :width],
        },
        device,
    )

    def paged_rows(part: slice, cu_seqlens_q: torch.Tensor) -> PagedRows | None:
        query_lens, context_lens = num_scheduled[part].tolist(), seq_lens[part].tolist()
        if not query_lens:
            return None
        return PagedRows(
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=on_device["seq_lens"][part],
            block_table=on_device["block_table"][part],
            block_size=batch.block_size,
            num_rows=sum(query_lens),
            max_seqlen_q=max(query_lens),
            max_seqlen_k=max(context_lens),
            query_lens=query_lens,
            context_lens=context_lens,
        )

    return StepInputs(
        states=states,
        rows=rows,
        starts=starts,
        num_scheduled=num_scheduled,
        sampled=sampled,
        input_ids=on_device["input_ids"],
        positions=on_device["positions"],
        logits_rows=on_device["logits_rows"],
        attention=AttentionMetadata(
            slot_mapping=on_device["slot_mapping"],
            decode=paged_rows(slice(0, num_decodes), on_device["cu_seqlens_decode"]),
            varlen=paged_rows(slice(num_decodes, None), on_device["cu_seqlens_varlen"]),
        ),
    )


def copy_to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Move arrays of different shapes and types to the device in a single copy, through pinned memory.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for pointers that do not. On a CPU the tensors
    share the arrays' memory.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    ends = np.cumsum([-(-array.nbytes // 16) * 16 for array in arrays.values()]).tolist()
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    host = staged.numpy()
    for array, start in zip(arrays.values(), [0, *ends], strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = staged.to(device, non_blocking=True)
    return {
        name: packed[start : start + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .view(array.shape)
        for (name, array), start in zip(arrays.items(), [0, *ends], strict=False)
    }
