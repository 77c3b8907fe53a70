"""Two thousand random histories of the scheduler, and the edges that they must have met; and what was recorded once."""

from scheduler_histories import NUM_RULES, run_histories

from minivllm.bench.result_file import RESULTS, load

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
    edges = [*EDGES, "served after somebody gave way"]
    assert {edge: counts[edge] for edge in edges if counts[edge] < 20} == {}


def test_the_recorded_run_of_twenty_thousand_histories_is_whole():
    measured = load(RESULTS / "scheduler_histories.json").measurement("histories")
    assert measured.shapes == {"histories": 20_000, "rules": NUM_RULES}
    assert measured.extra["histories"] >= 20_000
    assert {edge: measured.extra[edge] for edge in EDGES if measured.extra[edge] < 200} == {}


def test_the_recorded_cost_of_a_step_hardly_depends_on_the_context():
    result = load(RESULTS / "scheduler_cost.json")
    short, long = (result.measurement(f"256 decodes at context {context}") for context in (64, 4096))
    assert short.unit == long.unit == "ms" and short.repeats >= 100
    assert result.extra["ratio"] == long.median / short.median <= 1.2
