"""Who goes first, under either policy."""

import pytest
from helpers import make_request

from minivllm.engine.request_queue import make_queue


def filled(policy, *requests):
    queue = make_queue(policy)
    for index, request in enumerate(requests):
        request.arrival_index = index
        queue.append(request)
    return queue


def names(queue) -> str:
    return "".join(request.request_id for request in queue)


def test_fcfs_goes_by_the_order_of_arrival_and_whoever_comes_back_is_next():
    a, b, c = (make_request(name, 3, priority=-index) for index, name in enumerate("abc"))
    queue = filled("fcfs", a, b)
    assert queue.peek() is queue.pop() is a
    queue.append(c)
    queue.put_back(a)
    assert names(queue) == "abc" and len(queue) == 3


def test_priority_goes_by_priority_then_arrival_also_for_whoever_comes_back():
    a = make_request("a", 3, priority=1, arrival_time=1.0)
    b = make_request("b", 3, priority=0, arrival_time=9.0)
    c = make_request("c", 3, priority=1, arrival_time=0.5)
    d = make_request("d", 3, priority=-1, arrival_time=99.0)
    queue = filled("priority", a, b, c, d)
    assert names(queue) == "dbca"
    assert queue.peek() is queue.pop() is d
    queue.remove(c)
    queue.put_back(c)
    assert names(queue) == "bca"


def test_requests_of_one_priority_and_one_moment_keep_their_order_when_they_come_back():
    queue = filled("priority", *(make_request(name, 3) for name in "abcd"))
    b = list(queue)[1]
    queue.remove(b)
    queue.put_back(b)
    assert names(queue) == "abcd"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_is_taken_out_wherever_it_stands_and_a_stranger_is_told_apart_from_its_double(policy):
    requests = [make_request(name, 3) for name in "abc"]
    queue = filled(policy, *requests)
    queue.remove(requests[1])
    assert names(queue) == "ac"
    double = make_request("c", 3)
    double.arrival_index = 2
    for stranger in (requests[1], double):
        with pytest.raises(ValueError):
            queue.remove(stranger)
    assert names(queue) == "ac"
