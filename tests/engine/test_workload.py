"""Workloads are what was asked for, the same for the same seed, and share tokens only where they should."""

import statistics

import pytest

from minivllm.engine.workload import SimulatedRequest, engine_request, make_workload, poisson_arrivals


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential():
    arrivals = poisson_arrivals(4000, rate=8.0, seed=1)
    gaps = [later - earlier for earlier, later in zip([0.0, *arrivals], arrivals, strict=False)]
    assert arrivals == sorted(arrivals)
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)


def test_an_infinite_rate_is_all_at_once():
    assert poisson_arrivals(3, float("inf")) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_not_positive_is_refused(rate):
    with pytest.raises(ValueError, match="rate must be positive"):
        poisson_arrivals(3, rate)


def test_lengths_are_given_for_all_for_each_or_drawn():
    requests = make_workload([0.0] * 50, (3, 5), 7)
    assert {request.num_prompt_tokens for request in requests} == {3, 4, 5}
    assert {request.num_output_tokens for request in requests} == {7}
    assert [r.num_prompt_tokens for r in make_workload([0.0, 1.0], [4, 9], 1)] == [4, 9]


def test_the_same_seed_gives_the_same_workload_and_another_one_does_not():
    def make(seed):
        return make_workload(poisson_arrivals(20, 5.0, seed), (1, 99), (1, 99), num_prefixes=3, seed=seed)

    assert make(1) == make(1) != make(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_lengths": [1]}, "prompt_lengths has 1 entries for 2 requests"),
        ({"prompt_lengths": (5, 4)}, "prompt_lengths must be drawn between"),
        ({"output_lengths": (0, 4)}, "output_lengths must be drawn between"),
        ({"output_lengths": 0}, "have at least one token each"),
        ({"num_shared_tokens": 9}, "num_shared_tokens must be 0 to num_prompt_tokens"),
        ({"arrivals": [0.0, -1.0]}, "request '1': arrival and prefix must not be negative"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_workload(**{"arrivals": [0.0, 1.0], "prompt_lengths": 8, "output_lengths": 4, **arguments})


def test_requests_share_the_tokens_of_their_prefix_and_no_others():
    def tokens(prefix, own_text):
        request = SimulatedRequest("r", 0.5, 6, 3, num_shared_tokens=4, prefix=prefix, priority=2)
        return engine_request(request, own_text).prompt_token_ids

    assert tokens(0, 5)[:4] == tokens(0, 6)[:4]
    assert len({*tokens(0, 5), *tokens(0, 6), *tokens(1, 7)}) == 4 + 2 + 2 + 6
    request = engine_request(SimulatedRequest("r", 0.5, 6, 3, priority=2), 1)
    assert (request.arrival_time, request.priority, request.sampling_params.max_tokens) == (0.5, 2, 3)
