"""Two thousand random histories of the scheduler, and the edges that they must have met."""

from scheduler_histories import run_histories

EDGES = [
    "aborted in flight",
    "drafts accepted",
    "finished while preempted",
    "prefix hits",
    "preempted between steps",
    "preempted in flight",
    "resumed",
    "steps sent while others were in flight",
    "victims",
    "victims undone",
]


def test_two_thousand_histories_keep_every_promise_and_meet_every_edge():
    counts = run_histories(2_000)
    assert counts["histories"] >= 2_000
    assert {edge: counts[edge] for edge in EDGES if counts[edge] < 20} == {}
