"""Random histories of the scheduler: requests come, are stepped, preempted and aborted in any order.

Around the scheduler stand a worker that notices every slot with wrong contents, and a queue of steps whose results the
host does not know yet. After each step everything that must always hold is checked; every request gets what it would
get alone; and at the end nothing is left behind. `COUNTS` says what all the histories together went through, so that
a run which never met an edge cannot pass for one that did.
"""

from collections import Counter, deque

import pytest
from helpers import VOCAB_SIZE, FakeWorker, make_request, make_scheduler, next_token, output_alone
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minivllm.engine.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.engine.request import Request, RequestStatus
from minivllm.engine.request_queue import urgency

MAX_MODEL_LEN = 24
COUNTS: Counter[str] = Counter()


def sometimes_right(tokens):
    """A drafter that is right two times out of three."""
    return next_token(tokens) if sum(tokens) % 3 else (next_token(tokens) + 1) % VOCAB_SIZE


@st.composite
def scheduler_options(draw):
    block_size = draw(st.sampled_from([2, 1, 4, 8, 32]))
    max_num_seqs = draw(st.sampled_from([4, 3, 5, 2, 1]))
    num_drafts = draw(st.sampled_from([0, 0, 1, 3]))
    return {
        "block_size": block_size,
        "num_blocks": -(-MAX_MODEL_LEN // block_size) + draw(st.sampled_from([0, 1, 3, 100])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs * (num_drafts + 1) + draw(st.sampled_from([0, 1, 5, 100])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "drop_last_hit_block": draw(st.sampled_from([False, False, True])),
        "num_speculative_tokens": num_drafts,
        "num_lookahead_tokens": draw(st.sampled_from([0, num_drafts])),
        "scheduling_policy": draw(st.sampled_from(["priority", "fcfs"])),
        "async_scheduling": draw(st.booleans()),
        "pipeline_parallel_size": draw(st.sampled_from([1, 1, 2, 3])),
    }


prompts = st.builds(
    lambda letter, length, tail: [letter] * length + tail,
    st.integers(1, 2),
    st.integers(1, 8) | st.integers(1, MAX_MODEL_LEN - 4),
    st.lists(st.integers(1, 2), max_size=3),
)
"""Few different beginnings, so that many requests find theirs in the cache."""

requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.just(MAX_MODEL_LEN) | st.integers(1, MAX_MODEL_LEN),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "eos": st.sampled_from([(), (), (), (3,), (3, 4, 5)]),
        "stop_token_ids": st.sampled_from([[], [], [], [7]]),
        "salt": st.sampled_from([None, None, None, "salt"]),
        "priority": st.integers(-2, 2),
        "arrival_time": st.sampled_from([0.0, 1.0]),
    }
)


class SchedulerHistory(RuleBasedStateMachine):
    """The rules of a history, and what is checked after each."""

    @initialize(
        options=scheduler_options(),
        depth=st.integers(1, 3),
        first=st.lists(requests, min_size=2, max_size=5),
        arrivals=st.sampled_from(["least urgent first", "one by one", "at once"]),
    )
    def start(self, options, depth, first, arrivals):
        self.scheduler = make_scheduler(max_model_len=MAX_MODEL_LEN, **options)
        self.manager = self.scheduler.kv_cache_manager
        self.worker = FakeWorker(
            options["num_blocks"],
            options["block_size"],
            options["num_speculative_tokens"],
            sometimes_right,
            runs_behind=options["async_scheduling"],
        )
        self.depth = max(depth, options["pipeline_parallel_size"])
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, dict[str, Request]]] = deque()
        self.live: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.gave_way: Request | None = None
        self.made_room: Request | None = None
        self._watch_victims()
        COUNTS["histories"] += 1
        if arrivals == "least urgent first":
            first.sort(key=lambda params: -params["priority"])
        for name, params in zip("hijkl", first, strict=False):
            self.add(name, params)
            if arrivals != "at once":
                self.step(1)

    def _watch_victims(self):
        forget, allocate = self.manager.forget_last_names, self.scheduler._allocate_or_preempt

        def counting_forget(request):
            COUNTS["victims undone"] += 1
            forget(request)

        def watched_allocate(plan, request, num_new):
            num_running = len(self.scheduler.running)
            block_ids = allocate(plan, request, num_new)
            if block_ids is None:
                self.gave_way = request
            if len(self.scheduler.running) < num_running:
                self.made_room = request
            return block_ids

        self.manager.forget_last_names = counting_forget
        self.scheduler._allocate_or_preempt = watched_allocate

    @rule(name=st.sampled_from("abcdeh"), params=requests)
    def add(self, name, params):
        if name in self.live:
            with pytest.raises(ValueError, match="in use"):
                self.scheduler.add_request(make_request(name, params["prompt"]))
            return
        self.live[name] = make_request(name, **params)
        self.outputs[name] = []
        self.scheduler.add_request(self.live[name])
        COUNTS["requests"] += 1

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def abort(self, which):
        name = list(self.live)[which % len(self.live)]
        request = self.live.pop(name)
        COUNTS["aborted"] += 1
        COUNTS["aborted in flight"] += self.steps_of(request) > 0
        self.scheduler.abort([name, "nobody", name])
        alone, _ = output_alone(request, MAX_MODEL_LEN)
        assert self.outputs[name] == alone[: len(self.outputs[name])]

    @precondition(lambda self: self.scheduler.running)
    @rule(which=st.integers(0, 4))
    def preempt(self, which):
        request = self.scheduler.running[which % len(self.scheduler.running)]
        COUNTS["preempted in flight"] += self.steps_of(request) > 0
        COUNTS["preempted between steps"] += 1
        self.scheduler.preempt(request)

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def submit(self):
        """Plan a step and send it; its results are not known yet."""
        scheduler, self.gave_way, self.made_room = self.scheduler, None, None
        before = [(request, self.could_compute(request), request.is_decode) for request in scheduler.running]
        fits_decodes = -(-len(before) // scheduler.pipeline_parallel_size)
        drafted = {request.request_id: request.spec_token_ids for request in scheduler.running}
        message = scheduler.schedule()
        scheduled = message.num_scheduled_tokens
        self.check_message(message, drafted)
        victims = [request for request, _, _ in before if request.status is RequestStatus.PREEMPTED]
        num_decodes = sum(is_decode and request.request_id in scheduled for request, _, is_decode in before)
        assert num_decodes <= fits_decodes
        self.check_nobody_starves(before, scheduled, fits_decodes, has_victims=bool(victims))
        assert not victims or not message.scheduled_new_reqs, "somebody was admitted in a step that preempts"
        self.check_victims([request for request, _, _ in before], victims)
        COUNTS["victims"] += len(victims)
        COUNTS["preempted in flight"] += sum(self.steps_of(request) > 0 for request in victims)
        output = self.worker.execute_model(message)
        self.in_flight.append((message, output, {name: scheduler.requests[name] for name in scheduled}))
        COUNTS["steps"] += 1
        COUNTS["steps sent while others were in flight"] += bool(scheduled) and len(self.in_flight) > 1

    @precondition(lambda self: self.in_flight)
    @rule()
    def receive(self):
        """Book the oldest step that is on its way."""
        message, output, _ = self.in_flight.popleft()
        was_preempted = {request for request in self.scheduler.waiting if request.num_preemptions}
        for core_output in self.scheduler.update_from_output(message, output):
            name = core_output.req_id
            self.outputs[name] += core_output.new_token_ids
            COUNTS["tokens"] += len(core_output.new_token_ids)
            if core_output.finish_reason is not None:
                request = self.live.pop(name)
                COUNTS["finished while preempted"] += request in was_preempted
                assert (self.outputs[name], core_output.finish_reason) == output_alone(request, MAX_MODEL_LEN)
        for name, drafts in message.scheduled_spec_decode_tokens.items():
            COUNTS["drafts verified"] += len(drafts)
            COUNTS["drafts accepted"] += len(output.sampled_token_ids[name]) - 1

    @rule(count=st.integers(1, 5))
    def step(self, count):
        """Fill the queue, then wait for the oldest: what an engine does."""
        for _ in range(count):
            while len(self.in_flight) < self.depth:
                self.submit()
            self.receive()

    def steps_of(self, request: Request) -> int:
        return sum(requests.get(request.request_id) is request for _, _, requests in self.in_flight)

    def most_tokens_on_the_way(self, request: Request) -> int:
        """What the steps in flight would bring a request if all drafts were accepted."""
        name = request.request_id
        return sum(
            1 + len(message.scheduled_spec_decode_tokens.get(name, []))
            for message, output, requests in self.in_flight
            if requests.get(name) is request and name in output.sampled_token_ids
        )

    def could_compute(self, request: Request) -> int:
        """Tokens that the request would compute with all the budget; none once its end is certain."""
        num_new = self.scheduler.num_new_tokens(request, request.num_computed_tokens, MAX_MODEL_LEN)
        return 0 if self.is_sure_to_end(request) else max(0, num_new)

    def is_sure_to_end(self, request: Request) -> bool:
        """Whether steps ahead of the host bring the last token that the request may have, whatever it is."""
        return self.fewest_tokens(request) >= request.sampling_params.max_tokens

    def fewest_tokens(self, request: Request) -> int:
        """Outputs that a request has, and one from each step on its way that samples for it."""
        name = request.request_id
        return request.num_output_tokens + sum(
            requests.get(name) is request and name in output.sampled_token_ids for _, output, requests in self.in_flight
        )

    def check_message(self, message: SchedulerOutput, drafted: dict[str, list[int]]) -> None:
        scheduler, scheduled = self.scheduler, message.num_scheduled_tokens
        cached = message.scheduled_cached_reqs
        named = [*(new.req_id for new in message.scheduled_new_reqs), *cached.req_ids]
        assert sorted(named) == sorted(scheduled) and len(set(named)) == len(named)
        assert message.total_num_scheduled_tokens <= scheduler.max_num_batched_tokens
        assert all(count > 0 for count in scheduled.values())
        for name in scheduled:
            request = scheduler.requests[name]
            assert request.status is RequestStatus.RUNNING and not self.is_sure_to_end(request)
        assert set(message.scheduled_spec_decode_tokens) <= set(scheduled)
        for name, drafts in message.scheduled_spec_decode_tokens.items():
            assert drafts and drafts == drafted[name][: len(drafts)], f"{name}: stale drafts"
        for name in [*(new.req_id for new in message.scheduled_new_reqs), *cached.resumed_req_ids]:
            request = scheduler.requests[name]
            assert self.steps_of(request) == 0, f"{name} is admitted while tokens of it are on their way"
            COUNTS["resumed"] += name in cached.resumed_req_ids
        COUNTS["prefix hits"] += sum(new.num_computed_tokens > 0 for new in message.scheduled_new_reqs)

    def check_victims(self, before: list[Request], victims: list[Request]) -> None:
        """Who gave way is worse than all who still run: less urgent, or admitted later."""
        if self.scheduler.scheduling_policy == "priority":
            before = sorted(before, key=urgency)
        assert set(before[len(before) - len(victims) :]) == set(victims)

    def check_nobody_starves(self, before, scheduled, fits_decodes, has_victims) -> None:
        """Who runs gets on whenever those before it leave something of the budget, and as far as that goes."""
        budget, num_decodes = self.scheduler.max_num_batched_tokens, 0
        budget_is_known = self.made_room is None
        for request, wanted, is_decode in before:
            if request is self.gave_way:
                break  # nobody had blocks left to give it: those behind wait a step
            if request.status is RequestStatus.PREEMPTED:
                continue
            count = scheduled.get(request.request_id, 0)
            # A victim's place among the decodes can come free after others were left out for lack of it.
            others_turn = is_decode and (num_decodes >= fits_decodes or (has_victims and fits_decodes < len(before)))
            assert count or not wanted or budget < 1 or others_turn, f"{request.request_id} starves"
            # Until the last victim had gone, some of the budget may have been its own.
            if budget_is_known and not others_turn:
                assert count == min(wanted, budget), f"{request.request_id} gets {count} of {wanted}, {budget} are left"
                COUNTS["served after somebody gave way"] += bool(count) and self.made_room is not None
            budget -= count
            num_decodes += is_decode and count > 0
            budget_is_known |= request is self.made_room

    @invariant()
    def everything_that_always_holds(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        self.manager.check_invariants()
        assert scheduler.requests == self.live
        assert {*scheduler.running, *scheduler.waiting} == set(self.live.values())
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.live)
        assert len(scheduler.running) <= scheduler.max_num_seqs
        for request in scheduler.running:
            assert request.status is RequestStatus.RUNNING and self.manager.holds(request)
            most = self.most_tokens_on_the_way(request)
            assert request.num_output_placeholders == (most if scheduler.async_scheduling else 0)
            assert 0 <= request.num_computed_tokens <= request.num_tokens + most - 1
        for request in scheduler.waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert not self.manager.holds(request)
            assert (request.num_computed_tokens, request.num_output_placeholders, request.spec_token_ids) == (0, 0, [])
        if scheduler.scheduling_policy == "priority":
            order = [(request.priority, request.arrival_time) for request in scheduler.waiting]
            assert order == sorted(order)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # The most urgent of those that run is never preempted for another, and computes at least one token each time
        # its last step has returned: so many steps are enough for everyone in turn, with all that preemption throws
        # away.
        for _ in range(2 * MAX_MODEL_LEN * len(self.live) * self.depth):
            if not self.live:
                break
            self.step(1)
            self.everything_that_always_holds()
        assert not self.live, "livelock"
        while self.in_flight:
            self.receive()
        self.submit()
        assert self.manager.usage == 0.0 and len(self.scheduler._in_flight) == 0
        assert self.worker.tokens == {} and self.worker.tables == {}, "the worker was not told of an end"
        self.everything_that_always_holds()


NUM_RULES = 14


def run_histories(num_histories: int, num_rules: int = NUM_RULES, derandomize: bool = True) -> Counter[str]:
    """Run so many histories of so many rules each; returns what they went through."""
    COUNTS.clear()
    chosen = settings(
        max_examples=num_histories, stateful_step_count=num_rules, derandomize=derandomize, deadline=None, database=None
    )
    run_state_machine_as_test(SchedulerHistory, settings=chosen)
    return Counter(COUNTS)
