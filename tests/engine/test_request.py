"""A request's own rules: when it ends, and how its blocks are named."""

import pytest
from helpers import make_request

from minivllm.engine.request import RequestStatus


def append(request, *tokens, max_model_len=100):
    return [request.append_output_token(token, max_model_len) for token in tokens]


def test_counters_follow_the_tokens():
    request = make_request("a", [5, 6, 7])
    append(request, 8, 9)
    request.spec_token_ids = [1, 2]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
    assert request.num_tokens_with_spec == 7
    assert request.output_token_ids == [8, 9]
    assert request.prompt_token_ids == [5, 6, 7] and request.all_token_ids == [5, 6, 7, 8, 9]


def test_max_tokens_ends_a_request_with_reason_length():
    request = make_request("a", 3, max_tokens=2)
    assert append(request, 8, 9) == [False, True]
    assert request.status is RequestStatus.FINISHED_LENGTH and request.status.value == "length"
    assert request.stop_reason is None


def test_max_model_len_ends_a_request_with_reason_length():
    request = make_request("a", 3)
    assert append(request, 8, 9, max_model_len=5) == [False, True]
    assert request.status is RequestStatus.FINISHED_LENGTH


def test_end_of_sequence_ends_a_request_with_reason_stop():
    request = make_request("a", 3, eos=(9,))
    assert append(request, 8, 9) == [False, True]
    assert request.status is RequestStatus.FINISHED_STOPPED and request.status.value == "stop"
    assert request.stop_reason is None
    assert request.output_token_ids == [8, 9]


def test_a_stop_token_id_ends_a_request_and_is_its_stop_reason():
    request = make_request("a", 3, eos=(9,), stop_token_ids=[9, 7])
    assert append(request, 9) == [True]
    assert request.stop_reason == 9


def test_ignore_eos_goes_on_after_eos_but_not_after_a_stop_token():
    request = make_request("a", 3, eos=(9,), stop_token_ids=[7], ignore_eos=True)
    assert append(request, 9, 7) == [False, True]


def test_a_stop_on_the_very_last_token_is_a_stop():
    request = make_request("a", 3, eos=(9,), max_tokens=2)
    append(request, 8, 9)
    assert request.status is RequestStatus.FINISHED_STOPPED


@pytest.mark.parametrize(("min_tokens", "ends"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_nothing_stops_a_request_before_min_tokens(min_tokens, ends):
    request = make_request("a", 3, eos=(9,), stop_token_ids=[7], min_tokens=min_tokens)
    assert append(request, *[9] * ends) == [False] * (ends - 1) + [True]


def hashes(prompt, num_blocks=2, salt=None, block_size=2):
    return make_request("a", prompt, salt=salt).block_hashes(num_blocks, block_size)


def test_the_name_of_a_block_depends_on_its_tokens_and_on_all_before_it():
    first, second = hashes([1, 2, 3, 4])
    assert hashes([1, 2, 3, 4, 5]) == [first, second]
    assert hashes([1, 2, 3, 5])[0] == first and hashes([1, 2, 3, 5])[1] != second
    assert hashes([9, 2, 3, 4])[1] != second
    assert first != second
    assert hashes([1, 2, 1, 2])[0] != hashes([1, 2, 1, 2])[1]


def test_a_salt_renames_all_blocks():
    plain, salted, other = hashes([1, 2, 3, 4]), hashes([1, 2, 3, 4], salt="x"), hashes([1, 2, 3, 4], salt="y")
    assert len({*plain, *salted, *other}) == 6
    assert salted == hashes([1, 2, 3, 4], salt="x")


@pytest.mark.parametrize("salt", ["None", ""])
def test_a_salt_that_looks_like_none_is_a_salt(salt):
    assert hashes([1, 2, 3, 4], salt=salt)[0] != hashes([1, 2, 3, 4])[0]


def test_names_made_early_are_those_made_late():
    request = make_request("a", [1, 2])
    early = request.block_hashes(1, 2)
    append(request, 3, 4)
    assert request.block_hashes(2, 2) == hashes([1, 2, 3, 4])
    assert request.block_hashes(1, 2) == early
    assert request.block_hashes(0, 2) == []
