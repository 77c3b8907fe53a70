"""The promise of the token's way back, over random histories of in-process stages without a model.

Once a stage has applied a message, its token ids and num_computed_tokens of each request in it are the scheduler's at
the moment when the message was made: under chunks, drafts, prefix hits, preemption in flight, aborts, ids used again.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from helpers import VOCAB_SIZE, Finished, make_request, next_token, output_alone
from hypothesis import given, settings
from hypothesis import strategies as st

import minivllm.worker.pipeline as pipeline_module
from minivllm.config import EngineConfig
from minivllm.engine.batch_queue import PipelineCore
from minivllm.engine.messages import ModelRunnerOutput
from minivllm.engine.stages import split_layers
from minivllm.worker.batch import PersistentBatch
from minivllm.worker.inputs import prepare_inputs
from minivllm.worker.pipeline import InProcessPipeline, use_classic_rule
from minivllm.worker.stage_batch import StageBatch

MAX_MODEL_LEN, BLOCK_SIZE, MAX_NUM_SEQS = 24, 4, 4
COUNTS: Counter[str] = Counter()


class FakeRunner:
    """A runner whose model says `next_token`; every input is laid out as for a real one."""

    def __init__(self, config, model_path, stage=(0, 1), **_):
        self.config, self.num_blocks = config, config.num_gpu_blocks_override
        self.max_model_len, self.block_size = MAX_MODEL_LEN, BLOCK_SIZE
        self.stage = split_layers(8, stage[1])[stage[0]]
        self.hf_config, self.vocab_size = None, VOCAB_SIZE
        self.snapshots = {}

    def allocate_kv_cache(self, num_blocks):
        self.reset()

    def reset(self):
        make = PersistentBatch if self.stage.is_last else StageBatch
        self.batch = make(self.config.max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE)

    def begin(self, message):
        self.batch.update_states(message)
        for req_id, (token_ids, num_computed) in self.snapshots[message.step].items():
            assert self.batch.token_ids_of(req_id).tolist() == token_ids, f"stage {self.stage.index}, {req_id}"
            assert self.batch.num_computed[self.batch.states[req_id].row] == num_computed
            COUNTS["compared"] += 1
        if not message.num_scheduled_tokens:
            return None
        inputs = prepare_inputs(self.batch, message, torch.device("cpu"), self.config.num_speculative_tokens)
        COUNTS["steps of chunks only"] += not len(inputs.sampled)
        return inputs

    def empty_hidden(self, num_tokens):
        return torch.zeros(num_tokens)

    def forward(self, inputs, received=None):
        return torch.zeros(len(inputs.input_ids))

    def finish(self, inputs, hidden):
        output = ModelRunnerOutput()
        for index, num_drafts in zip(inputs.sampled, inputs.num_drafts, strict=True):
            state = inputs.states[index]
            row, known = state.row, self.batch.token_ids_of(state.req_id).tolist()
            drafts = self.batch.token_ids[row, len(known) : len(known) + num_drafts].tolist()
            emitted = [next_token(known)]
            while len(emitted) <= len(drafts) and drafts[len(emitted) - 1] == emitted[-1]:
                emitted.append(next_token(known + emitted))
            COUNTS["accepted"] += len(emitted) - 1
            counts = np.array([len(emitted)])
            self.batch.append_tokens(np.array([row]), np.array([emitted]), counts)
            output.sampled_token_ids[state.req_id] = emitted
            proposed, known = [], known + emitted
            for _ in range(min(self.config.num_speculative_tokens, MAX_MODEL_LEN - 1 - len(known))):
                right = next_token(known + proposed)
                proposed.append(right if sum(known) % 3 else (right + 1) % VOCAB_SIZE)
            if proposed:
                output.draft_token_ids[state.req_id] = proposed
        return output


def make_core(monkeypatch, num_stages, k, **options):
    monkeypatch.setattr(pipeline_module, "ModelRunner", FakeRunner)
    config = EngineConfig(
        "fake", device="cpu", block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN,
        pipeline_parallel_size=num_stages, distributed_executor_backend="in_process",
        speculative_config={"method": "ngram", "num_speculative_tokens": k} if k else None, **options,
    )  # fmt: skip
    worker = InProcessPipeline(config, "fake")
    core = PipelineCore(config, worker, worker.num_blocks, MAX_MODEL_LEN, BLOCK_SIZE)
    schedule = core.scheduler.schedule

    def watched():
        message = schedule()
        snapshot = {}
        for req_id, count in message.num_scheduled_tokens.items():
            request = core.scheduler.requests[req_id]
            snapshot[req_id] = (list(request.all_token_ids), request.num_computed_tokens - count)
        for stage in worker.stages:
            stage.snapshots[message.step] = snapshot
        COUNTS["resumed"] += len(message.scheduled_cached_reqs.resumed_req_ids)
        COUNTS["news without tokens"] += bool(message.finished_req_ids and not message.num_scheduled_tokens)
        return message

    core.scheduler.schedule = watched
    return core


class History:
    """Requests of one core, and what came of them so far."""

    def __init__(self, core):
        self.core, self.live, self.results = core, {}, {}

    def add(self, name, length, max_tokens):
        if name not in self.live:
            self.live[name] = make_request(name, [1 + length % 2] * length, max_tokens=max_tokens)
            self.results[name] = Finished()
            self.core.add_request(self.live[name])

    def abort(self, which):
        if self.live:
            name = sorted(self.live)[which % len(self.live)]
            COUNTS["aborted in flight"] += self.core.scheduler._in_flight.hold(self.live[name])
            del self.live[name]
            self.core.abort_requests([name])

    def preempt(self, which):
        running = self.core.scheduler.running
        if running:
            request = running[which % len(running)]
            COUNTS["preempted in flight"] += self.core.scheduler._in_flight.hold(request)
            self.core.scheduler.preempt(request)

    def step(self, count):
        for _ in range(count):
            for output in self.core.step():
                result = self.results[output.req_id]
                result.token_ids += output.new_token_ids
                if output.finish_reason is not None:
                    request = self.live.pop(output.req_id)
                    assert (result.token_ids, output.finish_reason) == output_alone(request, MAX_MODEL_LEN)
            COUNTS["several in flight"] += len(self.core.queue) > 0  # beside the one just booked
            self.core.scheduler.kv_cache_manager.check_invariants()

    def end(self):
        for _ in range(2000):
            if not self.live:
                return
            self.step(1)
        raise AssertionError("livelock")


rules = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("abcd"), st.integers(1, 20), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 3)),
    st.tuples(st.just("preempt"), st.integers(0, 3)),
)


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("feedback", ["scheduler", "broadcast"])
def test_what_a_stage_knows_is_what_the_scheduler_knew(monkeypatch, num_stages, k, feedback):
    if num_stages == 1 and feedback == "broadcast":
        with pytest.raises(ValueError, match="pp_token_feedback='broadcast' needs several stages"):
            make_core(monkeypatch, 1, k, num_gpu_blocks_override=9, pp_token_feedback="broadcast")
        return
    COUNTS.clear()

    @settings(max_examples=30, derandomize=True, deadline=None, database=None)
    @given(
        history=st.lists(rules, min_size=8, max_size=25),
        chunk=st.sampled_from([0, 3]),
        num_blocks=st.sampled_from([6, 8, 40]),
        caching=st.booleans(),
    )
    def run(history, chunk, num_blocks, caching):
        core = make_core(
            monkeypatch, num_stages, k, num_gpu_blocks_override=num_blocks, long_prefill_token_threshold=chunk,
            enable_prefix_caching=caching, pp_token_feedback=feedback,
        )  # fmt: skip
        told = History(core)
        for length in (3, 9, 15):
            told.add("abc"[length // 6], length, 9)
        for name, *arguments in history:
            getattr(told, name)(*arguments)
        told.end()

    run()
    expected = ["compared", "resumed", "aborted in flight", "preempted in flight", "steps of chunks only"]
    if num_stages == 1:
        expected.remove("aborted in flight"), expected.remove("preempted in flight")
    else:
        expected.append("several in flight")
    missing = [name for name in expected + ["accepted"] * (k > 0) if not COUNTS[name]]
    assert not missing, f"the histories never met: {missing}"


def test_the_classic_rule_breaks_the_promise_where_drafts_are_accepted(monkeypatch):
    core = make_core(monkeypatch, 2, 3, num_gpu_blocks_override=40)
    use_classic_rule(core)
    told = History(core)
    told.add("a", 4, 12)
    with pytest.raises(AssertionError, match="stage 0, a"):
        told.end()


def test_the_classic_rule_keeps_it_without_drafts(monkeypatch):
    core = make_core(monkeypatch, 3, 0, num_gpu_blocks_override=40, long_prefill_token_threshold=3)
    use_classic_rule(core)
    told = History(core)
    for name, length in (("a", 4), ("b", 11), ("c", 7)):
        told.add(name, length, 8)
    told.step(6)
    told.preempt(1)
    told.end()


def test_a_stage_with_an_empty_batch_applies_the_news(monkeypatch):
    core = make_core(monkeypatch, 2, 0, num_gpu_blocks_override=40)
    told = History(core)
    told.add("a", 4, 12)
    told.add("b", 5, 12)
    told.step(3)
    told.abort(0)
    told.end()
    told.add("c", 4, 1)
    told.end()
    core.worker.tick()
    core.worker.tick()
    states = [set(stage.batch.states) for stage in core.worker.stages]
    assert states == [{"c"}, {"c"}], "the end of c is told with the next message"
    assert core.scheduler.kv_cache_manager.usage == 0.0
