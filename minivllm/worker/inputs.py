"""From a scheduler's message to the tensors of one forward pass.

All of it is computed with NumPy on the host from the persistent batch, and travels to the device in one copy.
`lay_out` does it for any ranges of positions: a drafter's passes use it too.
"""

from dataclasses import dataclass

import numpy as np
import torch

from minivllm.attention.metadata import AttentionMetadata, PagedRows
from minivllm.engine.messages import SchedulerOutput
from minivllm.worker.batch import PersistentBatch, RequestState


@dataclass
class Layout:
    """Token ranges of several requests in one flat list: those with few tokens first, padded in front."""

    rows: np.ndarray
    """[B] row of each request in the persistent batch."""
    starts: np.ndarray
    """[B] first flat row of each request, padding not counted."""
    num_scheduled: np.ndarray
    """[B] flat rows of each request, padding not counted."""
    input_ids: torch.Tensor
    """[T] int64; 0 for padding."""
    positions: torch.Tensor
    """[T] int64; 0 for padding."""
    attention: AttentionMetadata


@dataclass
class StepInputs(Layout):
    """One step. Requests are in the order of their rows in the flat token list: decodes first.

    A request with s drafts to verify has s + 1 rows of logits, its last ones: row j is what the target says after
    draft j (after its newest token, for j = 0).
    """

    states: list[RequestState]
    num_computed: np.ndarray
    """[B] tokens of each request in the cache before the step."""
    sampled: np.ndarray
    """Indices (into the B requests) of those whose last known token is computed: they get new tokens."""
    num_drafts: np.ndarray
    """[S] drafts to verify, for each of `sampled`."""
    logits_rows: torch.Tensor
    """[N] int64: flat rows whose logits are sampled from, num_drafts + 1 for each of `sampled`."""


def prepare_inputs(
    batch: PersistentBatch, scheduler_output: SchedulerOutput, device: torch.device, num_speculative_tokens: int = 0
) -> StepInputs:
    """Lay the scheduled tokens out in one flat list and find their slots in the cache."""
    max_decode_len = num_speculative_tokens + 1
    scheduled = list(scheduler_output.num_scheduled_tokens.items())
    # stable: decodes first, each part in the scheduler's order
    scheduled.sort(key=lambda item: item[1] > max_decode_len)
    states = [batch.states[req_id] for req_id, _ in scheduled]
    rows = np.array([state.row for state in states])
    num_scheduled = np.array([count for _, count in scheduled])
    for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
        row = batch.states[req_id].row
        batch.token_ids[row, batch.num_tokens[row] : batch.num_tokens[row] + len(drafts)] = drafts

    computed = batch.num_computed[rows]
    num_beyond = computed + num_scheduled - batch.num_tokens[rows]
    sampled = np.nonzero(num_beyond >= 0)[0]
    num_drafts = num_beyond[sampled]
    starts = flat_starts(num_scheduled, max_decode_len)
    ends = starts[sampled] + num_scheduled[sampled]
    logits_rows = ranges(ends - num_drafts - 1, num_drafts + 1)
    layout, extra = lay_out(
        batch, rows, computed, num_scheduled, max_decode_len, device, extra={"logits_rows": logits_rows}
    )
    return StepInputs(
        **vars(layout),
        states=states,
        num_computed=computed,
        sampled=sampled,
        num_drafts=num_drafts,
        logits_rows=extra["logits_rows"],
    )


def lay_out(
    batch: PersistentBatch,
    rows: np.ndarray,
    first: np.ndarray,
    counts: np.ndarray,
    max_decode_len: int,
    device: torch.device,
    shift: int = 0,
    extra: dict[str, np.ndarray] | None = None,
) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Positions first .. first + count - 1 of each request, as the rows of one forward pass.

    Args:
        rows, first, counts: [B] row in the batch, first position and number of positions; those of at most
            max_decode_len positions come first.
        max_decode_len: longest run that is served as a decode. Decodes are padded in front to the longest of them.
        shift: each position reads the token so many places further on.
        extra: arrays that travel along in the same copy, and come back as tensors.
    """
    num_decodes, width = _decode_part(counts, max_decode_len)
    padded = counts.copy()
    padded[:num_decodes] = width
    seq_lens = first + counts
    ends = padded.cumsum()
    starts = ends - counts
    row_of_token = rows.repeat(padded)
    positions = np.arange(ends[-1]) + (first - starts).repeat(padded)
    is_padding = positions < first.repeat(padded)
    positions[is_padding] = 0
    block_ids = batch.block_table[row_of_token, positions // batch.block_size].astype(np.int64)
    slot_mapping = block_ids * batch.block_size + positions % batch.block_size
    slot_mapping[is_padding] = -1
    input_ids = batch.token_ids[row_of_token, positions + shift].astype(np.int64)
    input_ids[is_padding] = 0
    table_width = int(-(-seq_lens.max() // batch.block_size))

    on_device = copy_to_device(
        {
            "input_ids": input_ids,
            "positions": positions,
            "slot_mapping": slot_mapping,
            "seq_lens": seq_lens.astype(np.int32),
            "cu_seqlens_decode": np.arange(num_decodes + 1, dtype=np.int32) * np.int32(width),
            "cu_seqlens_varlen": np.append(starts[num_decodes:], ends[-1]).astype(np.int32) - num_decodes * width,
            "block_table": batch.block_table[rows, :table_width],
            **(extra or {}),
        },
        device,
    )

    def paged_rows(part: slice, cu_seqlens_q: torch.Tensor) -> PagedRows | None:
        query_lens, context_lens = padded[part].tolist(), seq_lens[part].tolist()
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

    layout = Layout(
        rows=rows,
        starts=starts,
        num_scheduled=counts,
        input_ids=on_device["input_ids"],
        positions=on_device["positions"],
        attention=AttentionMetadata(
            slot_mapping=on_device["slot_mapping"],
            decode=paged_rows(slice(0, num_decodes), on_device["cu_seqlens_decode"]),
            varlen=paged_rows(slice(num_decodes, None), on_device["cu_seqlens_varlen"]),
        ),
    )
    return layout, {name: on_device[name] for name in extra or {}}


def flat_starts(counts: np.ndarray, max_decode_len: int) -> np.ndarray:
    """[B] where `lay_out` puts the first token of each request."""
    num_decodes, width = _decode_part(counts, max_decode_len)
    padded = counts.copy()
    padded[:num_decodes] = width
    return padded.cumsum() - counts


def _decode_part(counts: np.ndarray, max_decode_len: int) -> tuple[int, int]:
    """How many requests are served as decodes, and how many queries each of them gets."""
    num_decodes = int((counts <= max_decode_len).sum())
    return num_decodes, int(counts[:num_decodes].max(initial=0))


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, … (counts[0] numbers), then the same for the others: [counts.sum()] int64."""
    ends = counts.cumsum()
    return np.arange(counts.sum()) + (starts - ends + counts).repeat(counts)


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
