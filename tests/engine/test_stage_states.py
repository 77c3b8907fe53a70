"""The two rules by which a stage learns of tokens: the table of the design, and what the classic rule loses."""

import pytest
from helpers import make_request, make_scheduler, run_step

from minivllm.engine.stage_states import StageStates, classic_new_token_ids_for, classic_rule, exact_rule


@pytest.mark.parametrize(
    ("num_known", "num_computed", "ids", "appended"),
    [
        pytest.param(10, 4, [4, 5, 6, 7], [], id="second chunk of a prompt of 10"),
        pytest.param(10, 8, [8, 9], [], id="third chunk"),
        pytest.param(10, 10, [70], [70], id="first decode"),
        pytest.param(7, 0, [1, 2, 3, 4, 5, 6, 7, 8], [8], id="resumed after preemption, the third output unknown"),
        pytest.param(11, 13, [70], [70], id="two drafts accepted: three are news, one came"),
    ],
)
def test_classic_rule(num_known, num_computed, ids, appended):
    assert classic_rule(num_known, num_computed, ids) == appended


def test_what_the_classic_rule_loses_the_exact_rule_brings():
    prompt, outputs = list(range(10)), [50, 51, 52, 53]  # 50 was known, 51 and 52 are accepted drafts, 53 is sampled
    all_token_ids, num_known, num_computed = prompt + outputs, 11, 13
    sent = classic_new_token_ids_for(all_token_ids, num_computed, num_scheduled=3, num_drafts=2)
    assert prompt + outputs[:1] + classic_rule(num_known, num_computed, sent) == [*prompt, 50, 53]
    assert prompt + outputs[:1] + exact_rule(num_known, num_computed, all_token_ids[11:]) == all_token_ids


def new_token_ids_of(message):
    cached = message.scheduled_cached_reqs
    return dict(zip(cached.req_ids, cached.new_token_ids, strict=True))


def test_chunks_bring_nothing_and_accepted_drafts_come_along():
    scheduler = make_scheduler(pipeline_parallel_size=2, long_prefill_token_threshold=4, num_speculative_tokens=2)
    scheduler.add_request(make_request("a", 10))
    run_step(scheduler, {})
    assert new_token_ids_of(run_step(scheduler, {})) == {"a": []}
    assert new_token_ids_of(run_step(scheduler, {"a": [70]}, {"a": [71, 72]})) == {"a": []}
    assert new_token_ids_of(run_step(scheduler, {"a": [71, 72, 73]}, {"a": [74, 75]})) == {"a": [70]}
    assert new_token_ids_of(run_step(scheduler, {"a": [99]})) == {"a": [71, 72, 73]}
    assert new_token_ids_of(run_step(scheduler, {"a": [98]})) == {"a": [99]}


def test_a_resumed_request_brings_what_came_while_it_was_away():
    scheduler = make_scheduler(pipeline_parallel_size=2)
    request = make_request("a", 5)
    scheduler.add_request(request)
    run_step(scheduler, {"a": [70]})
    run_step(scheduler, {"a": [71]})
    scheduler.preempt(request)
    message = run_step(scheduler, {"a": [72]})
    assert message.scheduled_cached_reqs.resumed_req_ids == {"a"} and new_token_ids_of(message) == {"a": [71]}


def test_an_id_that_is_used_again_begins_anew():
    scheduler = make_scheduler(pipeline_parallel_size=2)
    scheduler.add_request(make_request("a", 5))
    run_step(scheduler, {"a": [70]})
    scheduler.abort(["a"])
    scheduler.add_request(make_request("a", 3))
    run_step(scheduler, {"a": [80]})
    assert new_token_ids_of(run_step(scheduler, {"a": [81]})) == {"a": [80]}


def test_with_one_stage_or_broadcasts_nothing_is_sent():
    for options in ({}, {"pipeline_parallel_size": 2, "pp_token_feedback": "broadcast"}):
        scheduler = make_scheduler(**options)
        scheduler.add_request(make_request("a", 5))
        run_step(scheduler, {"a": [70]})
        assert run_step(scheduler, {"a": [71]}).scheduled_cached_reqs.new_token_ids == []
        assert scheduler.stage_states is None


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule must be one of exact, classic, not 'other'"):
        StageStates("other")
