"""The worker's copy of each request follows the messages, row by row."""

import numpy as np
import pytest
from helpers import make_request, make_scheduler

from minivllm.engine.messages import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.worker.batch import PersistentBatch


def batch(max_num_seqs=3, max_model_len=16, block_size=4) -> PersistentBatch:
    return PersistentBatch(max_num_seqs, max_model_len, block_size)


def new(req_id, prompt, block_ids, num_computed=0, **params) -> NewRequestData:
    return NewRequestData(req_id, prompt, SamplingParams(**params), frozenset(), block_ids, num_computed)


def message(new_reqs=(), cached=(), finished=(), preempted=(), resumed=()) -> SchedulerOutput:
    """`cached`: (req_id, new block ids, num_computed_tokens)."""
    columns = [list(column) for column in zip(*cached, strict=True)] or [[], [], []]
    return SchedulerOutput(
        scheduled_new_reqs=list(new_reqs),
        scheduled_cached_reqs=CachedRequestData(*columns, resumed_req_ids=set(resumed)),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


def tokens_of(b: PersistentBatch, req_id: str) -> list[int]:
    row = b.states[req_id].row
    return b.token_ids[row, : b.num_tokens[row]].tolist()


def table_of(b: PersistentBatch, req_id: str) -> list[int]:
    row = b.states[req_id].row
    return b.block_table[row, : b.num_blocks[row]].tolist()


def emit(batch: PersistentBatch, **tokens: int) -> None:
    rows = np.array([batch.states[req_id].row for req_id in tokens])
    batch.append_token(rows, np.array(list(tokens.values())))


def test_a_new_request_takes_a_row_with_all_that_the_message_says():
    b = batch()
    params = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": -3}
    b.update_states(message([new("a", [5, 6, 7, 8, 9], [3, 1], num_computed=4, **params)]))
    row = b.states["a"].row
    assert tokens_of(b, "a") == [5, 6, 7, 8, 9] and table_of(b, "a") == [3, 1]
    assert (b.num_prompt_tokens[row], b.num_computed[row]) == (5, 4)
    assert (b.temperature[row], b.top_k[row], b.seeds[row]) == (0.5, 7, -3)
    assert (b.top_p[row], b.min_p[row]) == pytest.approx((0.9, 0.1))


def test_a_cached_request_grows_in_place():
    b = batch()
    b.update_states(message([new("a", [5, 6, 7, 8], [3])]))
    emit(b, a=9)
    b.update_states(message(cached=[("a", [1], 4)]))
    row = b.states["a"].row
    assert tokens_of(b, "a") == [5, 6, 7, 8, 9] and table_of(b, "a") == [3, 1] and b.num_computed[row] == 4
    b.update_states(message(cached=[("a", [], 5)]))
    assert table_of(b, "a") == [3, 1] and b.num_computed[row] == 5 and b.states["a"].row == row


def test_tokens_go_to_the_rows_they_are_for():
    b = batch()
    b.update_states(message([new("a", [1], [0]), new("b", [2, 2], [1]), new("c", [3, 3, 3], [2])]))
    emit(b, c=30, a=10)
    assert [tokens_of(b, name) for name in "abc"] == [[1, 10], [2, 2], [3, 3, 3, 30]]


def test_the_last_token_of_a_request_of_max_model_len_has_a_place():
    b = batch(max_model_len=4)
    b.update_states(message([new("a", [1, 2, 3], [0])]))
    emit(b, a=4)
    assert tokens_of(b, "a") == [1, 2, 3, 4]


def test_rows_of_finished_requests_are_used_again_without_their_past():
    b = batch(max_num_seqs=1)
    b.update_states(message([new("a", [5] * 9, [3, 1, 2], temperature=0.3, top_k=4, seed=9)]))
    b.update_states(message([new("b", [6], [0])], finished=["a"]))
    assert "a" not in b.states
    assert tokens_of(b, "b") == [6] and table_of(b, "b") == [0]
    row = b.states["b"].row
    assert (b.temperature[row], b.top_k[row], b.seeds[row], b.num_computed[row]) == (1.0, 0, 0, 0)


def test_a_finished_id_may_come_back_in_the_same_message():
    b = batch(max_num_seqs=1)
    b.update_states(message([new("a", [5] * 9, [3, 1, 2])]))
    b.update_states(message([new("a", [6, 7], [0])], finished=["a"]))
    assert tokens_of(b, "a") == [6, 7] and table_of(b, "a") == [0]


def test_a_preempted_request_frees_its_row_and_comes_back_with_its_tokens_and_a_new_table():
    b = batch(max_num_seqs=2)
    b.update_states(message([new("a", [1], [0]), new("b", [5, 6, 7], [3], seed=4)]))
    emit(b, b=8)
    b.update_states(message(cached=[("a", [], 1)], preempted=["b"]))
    assert b.states["b"].row == -1
    b.update_states(message([new("c", [9] * 12, [1, 2, 3])], cached=[("a", [], 2)]))
    b.update_states(message(cached=[("b", [2, 0], 0)], finished=["c"], resumed=["b"]))
    assert tokens_of(b, "b") == [5, 6, 7, 8] and table_of(b, "b") == [2, 0]
    row = b.states["b"].row
    assert (b.num_prompt_tokens[row], b.num_computed[row], b.seeds[row]) == (3, 0, 4)
    assert b.states["b"].parked_token_ids is None


@pytest.mark.parametrize("while_parked", [True, False])
def test_a_preempted_request_may_end_before_it_comes_back(while_parked):
    b = batch(max_num_seqs=1)
    b.update_states(message([new("a", [5], [0])]))
    if while_parked:
        b.update_states(message(preempted=["a"]))
        b.update_states(message(finished=["a"]))
    else:
        b.update_states(message(preempted=["a"], finished=["a"]))
    assert b.states == {} and b._free_rows == [0]
    b.update_states(message([new("b", [6], [0])]))
    assert tokens_of(b, "b") == [6]


def test_the_end_of_a_request_that_was_never_scheduled_is_no_news():
    b = batch(max_num_seqs=1)
    b.update_states(message(finished=["stranger"]))
    b.update_states(message([new("a", [5], [0])]))
    assert tokens_of(b, "a") == [5]


def test_no_row_is_lost_and_tokens_equal_the_schedulers_over_a_long_crowded_life():
    scheduler = make_scheduler(num_blocks=6, max_model_len=24, max_num_seqs=3)
    b = batch(max_num_seqs=3, max_model_len=24)
    requests = [make_request(str(index), [index] * (1 + index % 5), max_tokens=3 + index % 17) for index in range(30)]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.num_unfinished_requests:
        output = scheduler.schedule()
        b.update_states(output)
        live = {request.request_id: request for request in scheduler.running}
        for name, count in output.num_scheduled_tokens.items():
            assert tokens_of(b, name) == live[name].all_token_ids
            assert table_of(b, name) == scheduler.kv_cache_manager.block_ids(live[name])
            assert b.num_computed[b.states[name].row] == live[name].num_computed_tokens - count
        emitting = [n for n in output.num_scheduled_tokens if live[n].num_computed_tokens == live[n].num_tokens]
        emit(b, **dict.fromkeys(emitting, 7))
        scheduler.update_from_output(output, ModelRunnerOutput({name: [7] for name in emitting}))
    assert sum(request.num_preemptions for request in requests) > 5
    b.update_states(scheduler.schedule())
    assert b.states == {} and sorted(b._free_rows) == [0, 1, 2]
