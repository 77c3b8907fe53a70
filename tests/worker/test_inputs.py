"""From message to tensors, with the numbers worked out by hand."""

import numpy as np
import pytest
import torch

from minivllm.engine.messages import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.worker.batch import PersistentBatch
from minivllm.worker.inputs import copy_to_device, prepare_inputs

CPU = torch.device("cpu")


def new(req_id, prompt, block_ids, num_computed=0) -> NewRequestData:
    return NewRequestData(req_id, prompt, SamplingParams(), frozenset(), block_ids, num_computed)


@pytest.fixture
def mixed():
    """A chunk in the middle of a prompt, two decodes, and a prompt behind a prefix hit; blocks of 4 tokens."""
    batch = PersistentBatch(4, 16, 4)
    batch.update_states(
        SchedulerOutput(
            scheduled_new_reqs=[
                new("chunk", list(range(10, 22)), [9, 2, 5]),
                new("first", [30, 31, 32], [7]),
                new("second", [40, 41, 42, 43], [1]),
            ]
        )
    )
    batch.append_token(np.array([batch.states["first"].row, batch.states["second"].row]), np.array([33, 44]))
    message = SchedulerOutput(
        scheduled_new_reqs=[new("hit", list(range(50, 57)), [3, 8], num_computed=4)],
        scheduled_cached_reqs=CachedRequestData(["chunk", "first", "second"], [[], [], [6]], [3, 3, 4]),
        num_scheduled_tokens={"chunk": 6, "first": 1, "second": 1, "hit": 3},
    )
    batch.update_states(message)
    return batch, prepare_inputs(batch, message, CPU)


def test_decodes_come_first_and_each_part_keeps_the_schedulers_order(mixed):
    _, inputs = mixed
    assert [state.req_id for state in inputs.states] == ["first", "second", "chunk", "hit"]
    assert inputs.num_scheduled.tolist() == [1, 1, 6, 3]
    assert inputs.starts.tolist() == [0, 1, 2, 8]


def test_tokens_positions_and_slots_are_those_of_the_scheduled_range(mixed):
    _, inputs = mixed
    assert inputs.input_ids.tolist() == [33, 44, 13, 14, 15, 16, 17, 18, 54, 55, 56]
    assert inputs.positions.tolist() == [3, 4, 3, 4, 5, 6, 7, 8, 4, 5, 6]
    # slot = block * 4 + offset: first in block 7, second in its new block 6, the chunk in 9, 2 and 5, the hit in 8
    assert inputs.attention.slot_mapping.tolist() == [31, 24, 39, 8, 9, 10, 11, 20, 32, 33, 34]
    assert inputs.input_ids.dtype == inputs.positions.dtype == inputs.attention.slot_mapping.dtype == torch.int64


def test_only_requests_whose_last_token_is_computed_get_a_new_one(mixed):
    _, inputs = mixed
    assert [inputs.states[index].req_id for index in inputs.sampled] == ["first", "second", "hit"]
    assert inputs.logits_rows.tolist() == [0, 1, 10]


def test_both_parts_know_their_lengths_on_host_and_device(mixed):
    _, inputs = mixed
    decode, varlen = inputs.attention.decode, inputs.attention.varlen
    assert (decode.query_lens, decode.context_lens) == ([1, 1], [4, 5])
    assert (varlen.query_lens, varlen.context_lens) == ([6, 3], [9, 7])
    assert (decode.num_rows, decode.max_seqlen_q, decode.max_seqlen_k) == (2, 1, 5)
    assert (varlen.num_rows, varlen.max_seqlen_q, varlen.max_seqlen_k) == (9, 6, 9)
    assert decode.cu_seqlens_q.tolist() == [0, 1, 2] and varlen.cu_seqlens_q.tolist() == [0, 6, 9]
    assert decode.seq_lens.tolist() == [4, 5] and varlen.seq_lens.tolist() == [9, 7]
    assert decode.block_table[:, :1].tolist() == [[7], [1]] and decode.block_table[1, 1] == 6
    assert varlen.block_table[0].tolist() == [9, 2, 5] and varlen.block_table[1, :2].tolist() == [3, 8]
    assert all(t.dtype == torch.int32 for t in (decode.cu_seqlens_q, decode.seq_lens, decode.block_table))


def test_a_step_of_decodes_alone_or_chunks_alone_has_one_part():
    batch = PersistentBatch(2, 16, 4)
    message = SchedulerOutput(scheduled_new_reqs=[new("a", [1, 2], [0])], num_scheduled_tokens={"a": 2})
    batch.update_states(message)
    inputs = prepare_inputs(batch, message, CPU)
    assert inputs.attention.decode is None and inputs.attention.varlen.num_rows == 2
    message = SchedulerOutput(scheduled_new_reqs=[new("b", [3], [1])], num_scheduled_tokens={"b": 1})
    batch.update_states(message)
    inputs = prepare_inputs(batch, message, CPU)
    assert inputs.attention.varlen is None and inputs.attention.decode.num_rows == 1
    assert inputs.sampled.tolist() == [0]


def arrays():
    return {
        "odd": np.arange(3, dtype=np.int32),
        "matrix": np.arange(12, dtype=np.int32).reshape(3, 4)[:, :3],
        "wide": np.array([2**40, -1]),
        "real": np.array([0.5], dtype=np.float32),
        "empty": np.array([], dtype=np.int64),
    }


def check_copy(device):
    given = arrays()
    copied = copy_to_device(given, device)
    assert list(copied) == list(given)
    for name, array in given.items():
        assert copied[name].device.type == device.type
        assert np.array_equal(copied[name].cpu().numpy(), array)
        assert copied[name].cpu().numpy().dtype == array.dtype


def test_arrays_arrive_on_a_cpu_as_they_are():
    check_copy(CPU)


@pytest.mark.gpu
def test_arrays_arrive_on_a_gpu_as_they_are():
    check_copy(torch.device("cuda"))
