"""Who waits, and who goes first: the two orders in which the scheduler admits requests.

    fcfs      first come, first served; who comes back after a preemption goes to the front
    priority  the lowest `(priority, arrival)` first, also among those who come back

A queue iterates in the order in which its requests will be admitted.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, MutableSequence

from minivllm.engine.request import Request


def urgency(request: Request) -> tuple[int, float, int]:
    """What the priority policy sorts by: the lower, the sooner admitted and the later chosen as a victim.

    Requests of one priority and one arrival time go in the order in which the scheduler got them.
    """
    return request.priority, request.arrival_time, request.arrival_index


class RequestQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: MutableSequence[Request] = deque()

    def append(self, request: Request) -> None:
        """A new request queues up."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """A request that had been admitted returns."""
        self._requests.insert(0, request)

    def peek(self) -> Request:
        """The request that is next; the queue must not be empty."""
        return self._requests[0]

    def pop(self) -> Request:
        """Take the request that is next; the queue must not be empty."""
        request = self._requests[0]
        del self._requests[0]
        return request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands; raises ValueError where it does not."""
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue(RequestQueue):
    """The most urgent first: a sorted list, in which places are found by bisection."""

    def __init__(self) -> None:
        self._requests = []

    def append(self, request: Request) -> None:
        insort(self._requests, request, key=urgency)

    def put_back(self, request: Request) -> None:
        self.append(request)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, urgency(request), key=urgency)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id!r} is not in the queue")
        del self._requests[index]


def make_queue(scheduling_policy: str) -> RequestQueue:
    """The queue of a policy, "fcfs" or "priority"."""
    return PriorityQueue() if scheduling_policy == "priority" else RequestQueue()
