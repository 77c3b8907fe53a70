"""Traces as files: JSON to keep and to plot from, and Chrome's trace format to look at in ui.perfetto.dev.

The JSON is the dataclasses of trace.py, field by field; each step is a line of its own. What is read is checked field
by field, and then as a whole by `Trace.check`: whoever holds a trace may rely on it.

Chrome's format (the "Trace Event Format") is a list of events: `ph` is the phase ("X" complete, "C" counter, "i"
instant, "M" metadata), `ts` and `dur` are microseconds, `pid` and `tid` choose the track. Here the engine is one
process with a track of steps and counters, and the requests are another with a track each.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from minivllm.engine.trace import ScheduledTokens, StepEvent, Trace, TracedRequest, TraceError

FORMAT = "minivllm-trace-1"
ENGINE_PID, REQUESTS_PID = 1, 2
_MICROSECONDS = 1e6


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as JSON; it is checked first."""
    trace.check()
    header = {name: value for name, value in _record(trace).items() if name not in ("requests", "steps")}
    requests = {req_id: _record(request) for req_id, request in trace.requests.items()}
    lines = [
        json.dumps({**_record(event), "scheduled": [_record(row) for row in event.scheduled]}, separators=(",", ":"))
        for event in trace.steps
    ]
    head = json.dumps({"format": FORMAT, **header, "requests": requests})
    Path(path).write_text(f'{head[:-1]}, "steps": [\n' + ",\n".join(lines) + "\n]}\n")


def load_trace(path: str | Path) -> Trace:
    """Read a trace that `save_trace` wrote.

    Raises:
        TraceError: there is no such file, it is no trace, or it contradicts itself; the message says where.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except json.JSONDecodeError as error:
        raise TraceError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise TraceError(f"{path} is no trace: it has no format {FORMAT!r}")
    try:
        trace = _read(Trace, data, "the trace")
        trace.check()
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    return trace


def _record(item: Trace | TracedRequest | StepEvent | ScheduledTokens) -> dict[str, Any]:
    return {name: getattr(item, name) for name in _HINTS[type(item)]}


def _read(cls: type, data: Any, where: str) -> Any:
    """An instance of a dataclass from a JSON object with just its fields, each of the type it is declared with."""
    if not isinstance(data, dict):
        raise TraceError(f"{where} is not an object")
    hints = _HINTS[cls]
    if data.keys() != hints.keys():
        missing, unknown = sorted(hints.keys() - data.keys()), sorted(data.keys() - hints.keys())
        raise TraceError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    return cls(**{name: _convert(hint, data[name], f"{where}, {name}") for name, hint in hints.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _read(hint, value, where)
    container, arguments = typing.get_origin(hint), typing.get_args(hint)
    if container is list and isinstance(value, list):
        return [_convert(arguments[0], item, f"{where} {index}") for index, item in enumerate(value)]
    if container is dict and isinstance(value, dict):
        return {key: _convert(arguments[1], item, f"{where} {key!r}") for key, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    name = str(hint) if isinstance(hint, types.GenericAlias) else hint.__name__
    raise TraceError(f"{where} must be {name}, not {value!r:.60}")


_HINTS = {cls: typing.get_type_hints(cls) for cls in (Trace, TracedRequest, StepEvent, ScheduledTokens)}


def save_chrome_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace in Chrome's format; open it in ui.perfetto.dev or chrome://tracing."""
    Path(path).write_text(json.dumps({"traceEvents": chrome_events(trace), "displayTimeUnit": "ms"}))


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """The events of a trace in Chrome's format: tracks, steps with their counters, and what each request did."""
    threads = {req_id: number for number, req_id in enumerate(trace.requests, start=1)}
    events = [
        _metadata("process_name", ENGINE_PID, 0, {"name": f"minivllm {trace.source}"}),
        _metadata("thread_name", ENGINE_PID, 1, {"name": "steps"}),
        _metadata("process_name", REQUESTS_PID, 0, {"name": "requests"}),
    ]
    for req_id, thread in threads.items():
        events.append(_metadata("thread_name", REQUESTS_PID, thread, {"name": f"request {req_id}"}))
        events.append(_metadata("thread_sort_index", REQUESTS_PID, thread, {"sort_index": thread}))
    for event in trace.steps:
        start, duration = event.start * _MICROSECONDS, event.duration * _MICROSECONDS
        span = {"ph": "X", "ts": start, "dur": duration}
        arguments = {"tokens": event.num_scheduled_tokens, "requests": len(event.scheduled)}
        events.append(
            {"name": f"step {event.step}", "cat": "step", "pid": ENGINE_PID, "tid": 1, **span, "args": arguments}
        )
        events.extend(_counters(event, start))
        for row in event.scheduled:
            details = {name: value for name, value in _record(row).items() if name not in ("req_id", "kind")}
            track = {"pid": REQUESTS_PID, "tid": threads[row.req_id]}
            events.append({"name": row.kind, "cat": "request", **track, **span, "args": details})
        for name, req_ids in (("preempted", event.preempted), ("aborted", event.aborted)):
            events.extend(_instant(name, threads[req_id], start) for req_id in req_ids)
        events.extend(_instant(f"finished: {why}", threads[r], start + duration) for r, why in event.finished.items())
    return events


def _metadata(name: str, process: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _counters(event: StepEvent, start: float) -> list[dict[str, Any]]:
    values = {
        "budget used (tokens)": event.num_scheduled_tokens,
        "blocks used": event.num_used_blocks,
        "tokens stored": event.num_stored_tokens,
        "running requests": event.num_running,
        "waiting requests": event.num_waiting,
    }
    return [
        {"name": name, "ph": "C", "pid": ENGINE_PID, "ts": start, "args": {"value": value}}
        for name, value in values.items()
    ]


def _instant(name: str, thread: int, moment: float) -> dict[str, Any]:
    return {"name": name, "cat": "request", "ph": "i", "s": "t", "pid": REQUESTS_PID, "tid": thread, "ts": moment}
