"""Traces survive the way to a file and back; what is no trace is refused; Perfetto gets what its format asks for."""

import json

import pytest
from trace_samples import busy_trace, hand_made_trace

from minivllm.engine.trace import Trace, TraceError
from minivllm.engine.trace_file import chrome_events, load_trace, save_chrome_trace, save_trace


@pytest.mark.parametrize("make", [hand_made_trace, busy_trace])
def test_what_is_written_is_read_again(make, tmp_path):
    save_trace(make(), tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == make()


def test_each_step_is_a_line_of_the_file(tmp_path):
    save_trace(hand_made_trace(), tmp_path / "trace.json")
    assert len((tmp_path / "trace.json").read_text().splitlines()) == 4 + 2


def test_a_trace_without_steps_can_be_kept(tmp_path):
    trace = Trace("nothing", 8, 4, 16, 4, 10)
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == trace


def test_a_trace_that_contradicts_itself_is_not_written(tmp_path):
    trace = hand_made_trace()
    trace.steps[0].num_used_blocks = 1
    with pytest.raises(TraceError, match="tables hold 3 blocks"):
        save_trace(trace, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format="else"), "is no trace: it has no format"),
        (lambda data: data.pop("block_size"), r"the trace: missing fields \['block_size'\]"),
        (lambda data: data.update(colour="red"), r"unknown fields \['colour'\]"),
        (lambda data: data.update(num_blocks="8"), "the trace, num_blocks must be int, not '8'"),
        (lambda data: data.update(num_blocks=True), "num_blocks must be int, not True"),
        (lambda data: data.update(steps={}), "the trace, steps must be list"),
        (lambda data: data["steps"][1].pop("end"), r"the trace, steps 1: missing fields \['end'\]"),
        (lambda data: data["steps"][1].update(scheduled=[3]), "steps 1, scheduled 0 is not an object"),
        (lambda data: data["steps"][0]["new_blocks"].update(A=[0, 1.5]), "new_blocks 'A' 1 must be int, not 1.5"),
        (lambda data: data["steps"][1].update(num_used_blocks=4), "step 1: tables hold 5 blocks, 4 in use"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(change, message, tmp_path):
    path = tmp_path / "trace.json"
    save_trace(hand_made_trace(), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(TraceError, match=message) as error:
        load_trace(path)
    assert str(path) in str(error.value)


def test_whole_numbers_are_good_times(tmp_path):
    path = tmp_path / "trace.json"
    save_trace(hand_made_trace(), path)
    path.write_text(path.read_text().replace('"start":0.0', '"start":0'))
    assert isinstance(load_trace(path).steps[0].start, float)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read .*No such file"), (b"{", "is not JSON"), (b"[]", "is no trace"), (b"\xff", "cannot read")],
)
def test_a_file_that_is_no_trace_is_refused(content, message, tmp_path):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        load_trace(path)


def test_chrome_events_are_microseconds_on_a_track_for_each_request():
    events = chrome_events(hand_made_trace())
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    assert tracks == {1: "request A", 2: "request B"}
    spans = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert spans[:3] == [(1, "prefill", 0.0, 1e6), (2, "prefill", 0.0, 1e6), (1, "verify", 1e6, 1e6)]
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [e["args"]["tokens"] for e in steps] == [8, 6, 1, 6]


def test_chrome_events_tell_what_happened_to_requests_as_instants():
    instants = [(e["name"], e["tid"], e["ts"], e["s"]) for e in chrome_events(hand_made_trace()) if e["ph"] == "i"]
    assert instants == [
        ("preempted", 2, 2e6, "t"),
        ("finished: length", 1, 3e6, "t"),
        ("finished: stop", 2, 4e6, "t"),
    ]


def test_chrome_counters_follow_the_budget_and_the_cache():
    counters = [e for e in chrome_events(hand_made_trace()) if e["ph"] == "C"]
    blocks = [(e["ts"], e["args"]["value"]) for e in counters if e["name"] == "blocks used"]
    assert blocks == [(0.0, 3), (1e6, 5), (2e6, 3), (3e6, 3)]


def test_the_chrome_file_has_the_fields_that_every_event_needs(tmp_path):
    save_chrome_trace(busy_trace(), tmp_path / "chrome.json")
    data = json.loads((tmp_path / "chrome.json").read_text())
    needed = {"X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "i": {"ts", "tid", "s"}, "M": {"args"}}
    assert {event["ph"] for event in data["traceEvents"]} == set(needed)
    for event in data["traceEvents"]:
        assert {"name", "pid", *needed[event["ph"]]} <= set(event)
