"""Set 9 beside the engine: its rules are the scheduler's, and its exhibits do to a real run what the sheet says."""

import random

import pytest
from classroom import checks_and_what_they_load, solved_sheet
from helpers import make_request, make_scheduler, run_step

from minivllm.engine.messages import ModelRunnerOutput
from minivllm.exercises import exercises_of, find
from minivllm.exercises.ps09_step import Row
from minivllm.exercises.ps09_victims import Candidate


@pytest.fixture(scope="module")
def sheet():
    """All that the solved sheet defines."""
    return solved_sheet("ps09_scheduler")


def test_the_checks_of_the_set_load_neither_torch_nor_the_engine():
    checked, loaded = checks_and_what_they_load("ps09")
    assert len(checked) == 6 and loaded == ""


ODD_ANSWERS = [
    1,
    True,
    "a",
    [],
    [None],
    {"a": None},
    (),
    (1, 2, 3),
    ({}, [], []),
    ({"a": "b"}, ["a", "b"], []),
    ({"a": float("nan"), 1: 1}, ["a", "b"], []),
    ({}, ["a"], [["b"], 1]),
    (12, [90, 5, 9], 3),
    (12, "ab", None),
    (None, None, None),
    ([], {}, 0, 0),
    (["b", "c", "d"], {"b": 1}, 7, "1"),
    (["b", "c", "d"], {"b": 1}, 7, None),
    (["b", "c", "d"], {"b": 1}, float("nan"), 1),
    ({"b": 1}, ["b"], None, None),
]


@pytest.mark.parametrize("exercise", exercises_of("ps09"), ids=lambda exercise: exercise.name)
def test_any_wrong_answer_is_answered_with_words(exercise):
    for case in exercise.cases:
        expected, inputs = exercise.oracle(*case.args), dict(zip(exercise.parameters, case.args, strict=True))
        for answer in ODD_ANSWERS:
            if answer != expected:
                assert exercise.judge(expected, answer, inputs), (case.args, answer)


@pytest.mark.parametrize(
    ("budget", "max_model_len", "n", "drafts"),
    [(100, 128, 4, [5, 6, 7]), (2, 128, 2, [5]), (1, 128, 1, []), (100, 13, 2, [5]), (100, 12, 1, [])],
)
def test_the_rules_give_the_numbers_worked_by_hand(budget, max_model_len, n, drafts):
    assert find("ps09.num_new_tokens").oracle(11, 3, 10, budget, 0, max_model_len) == n
    assert find("ps09.scheduled_drafts").oracle(11, 10, n, [5, 6, 7]) == drafts


def test_a_chunk_of_a_prompt_takes_thirty_tokens_and_none_of_the_stale_drafts():
    assert find("ps09.num_new_tokens").oracle(100, 3, 40, 30, 0, 128) == 30
    assert find("ps09.scheduled_drafts").oracle(100, 40, 30, [5, 6, 7]) == []


def test_the_rule_is_the_engines():
    draw, num_new_tokens = random.Random(0), find("ps09.num_new_tokens").oracle
    for _ in range(2_000):
        scheduler = make_scheduler(max_model_len=draw.randint(2, 64), long_prefill_token_threshold=draw.randint(0, 20))
        request = make_request("a", draw.randint(1, 60))
        request.spec_token_ids = [0] * draw.randint(0, 4)
        num_computed, budget = draw.randint(0, request.num_tokens_with_spec), draw.randint(1, 64)
        expected = max(0, scheduler.num_new_tokens(request, num_computed, budget))
        limits = (budget, scheduler.long_prefill_token_threshold, scheduler.max_model_len)
        assert num_new_tokens(request.num_tokens, len(request.spec_token_ids), num_computed, *limits) == expected


def test_drafts_and_booking_are_the_engines():
    draw, booked = random.Random(1), find("ps09.book_tokens").oracle
    for _ in range(500):
        min_tokens = draw.randint(0, 4)
        max_tokens = draw.randint(max(2, min_tokens), 8)
        scheduler = make_scheduler(max_num_batched_tokens=draw.randint(10, 64))
        request = make_request("a", 10, eos=(2,), min_tokens=min_tokens, max_tokens=max_tokens)
        scheduler.add_request(request)
        run_step(scheduler, {"a": [90]})
        drafts = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
        request.spec_token_ids = list(drafts)
        scheduler.max_num_batched_tokens = draw.randint(1, 6)
        output = scheduler.schedule()
        n = output.num_scheduled_tokens["a"]
        drafts = find("ps09.scheduled_drafts").oracle(11, 10, n, drafts)
        assert output.scheduled_spec_decode_tokens.get("a", []) == drafts
        sampled = [*drafts[: draw.randint(0, len(drafts))], draw.randint(1, 4)]
        expected = booked(request.num_computed_tokens, [90], drafts, sampled, 2, min_tokens, max_tokens)
        (result,) = scheduler.update_from_output(output, ModelRunnerOutput({"a": sampled}))
        assert (request.num_computed_tokens, request.output_token_ids, result.finish_reason) == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_planned_step_is_the_engines(seed):
    """Running, waiting and tokens, in every step of crowded runs with random limits; some steps are sent twice as
    fast as results come, so that requests have nothing to compute."""
    draw, plan_step = random.Random(seed), find("ps09.plan_step").oracle
    block_size, max_num_seqs, budget = draw.choice([1, 2, 4, 8]), draw.randint(1, 5), draw.randint(5, 30)
    scheduler = make_scheduler(
        num_blocks=-(-40 // block_size) + draw.randint(0, 2),
        block_size=block_size,
        max_model_len=40,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    for name in "abcdefgh":
        scheduler.add_request(make_request(name, draw.randint(1, 24), max_tokens=draw.randint(1, 16)))
    num_steps = 0
    while scheduler.num_unfinished_requests:
        in_flight = []
        for _ in range(draw.choice([1, 1, 2])):
            before = [
                [Row(r.request_id, r.num_tokens, r.num_computed_tokens) for r in queue]
                for queue in (scheduler.running, scheduler.waiting)
            ]
            free = scheduler.kv_cache_manager.block_pool.num_free_blocks
            # The sheet knows nothing of victims whose last step is still in flight: the engine lets them wait for it.
            is_held_up = any(scheduler._in_flight.hold(request) for request in scheduler.waiting)
            expected = plan_step(*before, budget, max_num_seqs, free, block_size)
            message = scheduler.schedule()
            names = [[request.request_id for request in queue] for queue in (scheduler.running, scheduler.waiting)]
            assert is_held_up or (message.num_scheduled_tokens, *names) == expected
            scheduled = [scheduler.requests[name] for name in message.num_scheduled_tokens]
            in_flight.append((message, {r.request_id: [7] for r in scheduled if r.num_computed_tokens == r.num_tokens}))
            num_steps += 1
        for message, sampled in in_flight:
            scheduler.update_from_output(message, ModelRunnerOutput(sampled))
    assert num_steps > 10


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_victim_is_the_engines(policy):
    draw, choose_victim = random.Random(2), find("ps09.choose_victim").oracle
    for _ in range(200):
        scheduler = make_scheduler(num_blocks=64, block_size=1, scheduling_policy=policy)
        for name, moment in zip("abcd", draw.sample(range(100), 4), strict=True):
            scheduler.add_request(make_request(name, [moment] * 4, arrival_time=float(moment)))
            run_step(scheduler, {name: [7] for name in scheduler.requests})
        for request in scheduler.running:
            request.priority = draw.randint(-1, 1)
        manager = scheduler.kv_cache_manager
        running = [Candidate(r.request_id, r.priority, r.arrival_time, 1) for r in scheduler.running]
        manager.allocate(make_request("hog", 64), manager.block_pool.num_free_blocks)
        victims, preempt = [], scheduler.preempt
        scheduler.preempt = lambda request, to=victims, do=preempt: (to.append(request.request_id), do(request))
        scheduler.schedule()
        assert victims[0] == choose_victim(running, policy)


def test_the_exhibit_that_takes_the_largest_never_ends_and_the_mended_one_does(sheet, capsys):
    sheet["two_long_prompts"](sheet["choose_victim_as_found"], num_steps=5_000)
    told = capsys.readouterr().out
    assert told.count("0 of 4 outputs") == 2 and "5000 steps" in told
    sheet["two_long_prompts"](sheet["choose_victim"], num_steps=5_000)
    told = capsys.readouterr().out
    assert told.count("4 of 4 outputs") == 2 and "\n16 steps, 62 tokens computed" in told


def test_each_fault_of_the_half_undone_step_has_a_symptom_of_its_own(sheet):
    step, undo = sheet["step_with_a_victim"], sheet["withdraw"]

    def without_budget(running, scheduled, budget, cursor, victim):
        after = undo(running, scheduled, budget, cursor, victim)
        return *after[:2], budget, after[3]

    def without_cursor(running, scheduled, budget, cursor, victim):
        return *undo(running, scheduled, budget, cursor, victim)[:3], cursor

    assert step(sheet["withdraw_as_found"]) == {"b": 1, "c": 1, "e": 2}
    assert step(without_budget) == {"b": 1, "c": 1, "d": 1, "e": 1}
    assert step(without_cursor) == {"b": 1, "c": 1, "e": 4}
    assert step(undo) == {"b": 1, "c": 1, "d": 1, "e": 4}
