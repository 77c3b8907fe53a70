"""Sampling parameters that cannot work are refused where they are made; the message names the culprit."""

import math

import pytest

from minivllm.sampling_params import SamplingError, SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n must be 1 or more completions, not 0"),
        ({"n": True}, "n must be 1 or more completions, not True"),
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or positive, not -0.1"),
        ({"temperature": math.nan}, r"temperature must be 0 \(greedy\) or positive, not nan"),
        ({"temperature": math.inf}, r"temperature must be 0 \(greedy\) or positive, not inf"),
        ({"temperature": "hot"}, r"temperature must be 0 \(greedy\) or positive, not 'hot'"),
        ({"top_k": -2}, r"top_k must be 0 or -1 \(no limit\) or positive, not -2"),
        ({"top_k": 1.5}, r"top_k must be 0 or -1 \(no limit\) or positive, not 1.5"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], not 0.0"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\], not 1.01"),
        ({"min_p": -0.01}, r"min_p must be in \[0, 1\], not -0.01"),
        ({"min_p": 1.01}, r"min_p must be in \[0, 1\], not 1.01"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive, not 0.0"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], not 2.1"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty must be in \[-2, 2\], not -2.1"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more, or None for as many as fit, not 0"),
        ({"min_tokens": -1}, "min_tokens must be 0 or positive, not -1"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens \(5\) must not exceed max_tokens \(4\): lower it or raise"),
        ({"logprobs": -1}, "logprobs must be None, 0 .* or a count of alternatives, not -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be None, 0 .* or a count of alternatives, not -1"),
        ({"seed": 0.5}, "seed must be a 64-bit whole number, not 0.5"),
        ({"seed": 2**63}, f"seed must be a 64-bit whole number, not {2**63}"),
        ({"seed": -(2**63) - 1}, "seed must be a 64-bit whole number, not -"),
        ({"stop": ""}, "stop must not hold an empty string: .* remove it"),
        ({"stop": ["end", ""]}, "stop must not hold an empty string"),
        ({"stop": [b"end"]}, "stop must be a string or a list of strings, not b'end'"),
        ({"stop": 7}, "stop must be a string or a list of strings, not 7"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids, each 0 or positive, not -1"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids must be a list of token ids, each 0 or positive, not '</s>'"),
        ({"stop_token_ids": "7"}, "stop_token_ids must be a list of token ids, each 0 or positive, not '7'"),
    ],
)
def test_a_parameter_that_cannot_work_is_refused_by_name(params, message):
    with pytest.raises(SamplingError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1e-9},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1},
        {"top_k": 0},
        {"top_k": 10**9},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"max_tokens": None, "min_tokens": 1000},
        {"min_tokens": 4, "max_tokens": 4},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"stop_token_ids": None},
    ],
)
def test_values_at_the_edge_of_the_legal_are_accepted(params):
    given = SamplingParams(**params)
    assert all(getattr(given, name) == (value if value is not None or name == "max_tokens" else [])
               for name, value in params.items())  # fmt: skip


def test_one_stop_and_a_list_of_one_are_the_same():
    assert SamplingParams(stop="end").stop == SamplingParams(stop=["end"]).stop == ["end"]
    assert SamplingParams(stop_token_ids=7).stop_token_ids == SamplingParams(stop_token_ids=(7,)).stop_token_ids == [7]
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == []


def test_top_k_of_minus_one_means_no_limit():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_the_callers_lists_are_copied():
    stop, stop_token_ids = ["end"], [3]
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids)
    stop.append("more")
    stop_token_ids.append(4)
    assert params.stop == ["end"] and params.stop_token_ids == [3]


def test_greedy_and_penalties_are_told_from_the_numbers():
    assert SamplingParams(temperature=0).is_greedy and not SamplingParams(temperature=0.1).is_greedy
    assert not SamplingParams().has_penalties
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1)):
        assert SamplingParams(**{name: value}).has_penalties
