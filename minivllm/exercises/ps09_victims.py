"""The bug museum of set 9: who gives way when the pool is full, and what it takes to undo a victim's part in a step.

running    a  b  c  d            the step so far: a and b have tokens, c is at the cursor and needs a block
                 ^ cursor
victim a   b  c  d               a's tokens leave the step, its budget comes back,
              ^ cursor           and the cursor moves along with c
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from minivllm.exercises.checking import Case, Exercise


class Candidate(NamedTuple):
    """A running request, as far as it matters when somebody has to give way."""

    name: str
    priority: int
    """The lower, the more urgent."""
    arrival: float
    """Seconds; no two requests arrive at the same moment."""
    num_blocks: int
    """Blocks that it holds."""


def choose_victim(running: list[Candidate], policy: str) -> str:
    """The name of the running request that gives its blocks up; policy is "fcfs" or "priority"."""
    if policy == "fcfs":
        return running[-1].name
    return max(running, key=lambda candidate: (candidate.priority, candidate.arrival)).name


def judge_victim(expected: str, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Say who would have to give way, and why the one that was chosen must not."""
    if not isinstance(got, str):
        return f"the answer is a {type(got).__name__} ({got!r}), not the name of a request"
    if got == expected:
        return None
    running = {candidate.name: candidate for candidate in inputs["running"]}
    if got not in running:
        return f"{got!r} is not among those that run"
    if inputs["policy"] == "fcfs":
        return f"{expected} was admitted last and gives way; {got} was admitted before it"
    chosen, worst = running[got], running[expected]
    if chosen.priority != worst.priority:
        return f"{expected} (priority {worst.priority}) is less urgent than {got} (priority {chosen.priority})"
    return f"{expected} and {got} are equally urgent (priority {worst.priority}), and {expected} arrived later"


CHOOSE_VICTIM = Exercise(
    name="ps09.choose_victim",
    oracle=choose_victim,
    judge=judge_victim,
    hint='"fcfs": the last of the list; "priority": the largest (priority, arrival). Blocks don\'t matter',
    cases=(
        Case(([Candidate("a", 0, 1.0, 5), Candidate("b", 0, 2.0, 1)], "fcfs"), hint="b was admitted last"),
        Case(
            ([Candidate("a", 0, 1.0, 2), Candidate("b", 9, 2.0, 1), Candidate("c", 1, 3.0, 4)], "priority"),
            hint="b is the least urgent, wherever it stands and however little it holds",
        ),
        Case(
            ([Candidate("a", 3, 1.0, 1), Candidate("b", 3, 2.0, 1), Candidate("c", 0, 3.0, 7)], "priority"),
            hint="among equals the one that arrived last",
        ),
        Case(
            ([Candidate("a", 9, 1.0, 1), Candidate("b", 0, 2.0, 1)], "fcfs"),
            hidden=True,
            hint="under fcfs priorities go unheard",
        ),
        Case(
            ([Candidate("b", 0, 2.0, 3), Candidate("a", 0, 1.0, 3)], "fcfs"),
            hidden=True,
            hint="a came back after a preemption: it was admitted last, though it arrived first",
        ),
        Case(
            ([Candidate("b", 5, 2.0, 3), Candidate("a", 5, 1.0, 3)], "priority"),
            hidden=True,
            hint="the order in which they run is that of admission, not that of arrival",
        ),
        Case(
            ([Candidate("a", -3, 1.0, 1), Candidate("b", -7, 2.0, 1)], "priority"),
            hidden=True,
            hint="-7 is more urgent than -3",
        ),
        Case(([Candidate("a", 0, 1.0, 4)], "fcfs"), hidden=True, hint="alone: then it is the one itself"),
        Case(([Candidate("a", 0, 1.0, 4)], "priority"), hidden=True, hint="alone: then it is the one itself"),
        Case(
            ([Candidate("a", 1, 9.0, 1), Candidate("b", 2, 1.0, 1)], "priority"),
            hidden=True,
            hint="priority first, arrival only among equals",
        ),
    ),
)

Plan = tuple[list[str], dict[str, int], int, int]
PARTS = ("running", "scheduled", "budget", "cursor")


def withdraw(running: list[str], scheduled: dict[str, int], budget: int, cursor: int, victim: str) -> Plan:
    """(running, scheduled, budget, cursor) of a step in the making once `victim` has given way."""
    if running.index(victim) < cursor:
        cursor -= 1
    running = [name for name in running if name != victim]
    rest = {name: count for name, count in scheduled.items() if name != victim}
    return running, rest, budget + scheduled.get(victim, 0), cursor


def judge_plan(expected: Plan, got: Any, inputs: Mapping[str, Any]) -> str | None:
    """Name the first part that is wrong, and what the step would do with it."""
    if not isinstance(got, tuple) or len(got) != 4:
        return f"the answer is a {type(got).__name__}, not the tuple ({', '.join(PARTS)})"
    for part, kind, value in zip(PARTS, (list, dict, int, int), got, strict=True):
        if type(value) is not kind:
            return f"{part} is a {type(value).__name__} ({value!r}), not of type {kind.__name__}"
    victim, running, scheduled = inputs["victim"], inputs["running"], inputs["scheduled"]
    wrong = next((part for part, want, have in zip(PARTS, expected, got, strict=True) if want != have), None)
    if wrong is None:
        return None
    want, have = dict(zip(PARTS, expected, strict=True)), dict(zip(PARTS, got, strict=True))
    if wrong == "running":
        return f"{victim} does not run any more, and the others keep their order: {want[wrong]}, got {have[wrong]}"
    if wrong == "scheduled":
        return f"{victim} has no blocks to compute in, and nothing changes for the others: {want[wrong]}"
    if wrong == "budget":
        taken = scheduled.get(victim, 0)
        return f"the step had given {victim} {taken} of its budget: {want[wrong]} is left now, got {have[wrong]}"
    cursor, place = inputs["cursor"], running.index(victim)
    at = running[cursor]
    side = "before" if place < cursor else "at" if place == cursor else "behind"
    if at == victim:
        return f"{victim} itself stood at the cursor: nobody before it has moved, the cursor stays {cursor}"
    return (
        f"the cursor stood at {at}, and {victim} {side} it: {at} is now at {want[wrong]}, but the cursor is "
        f"{have[wrong]}, so that somebody would be {'passed over' if have[wrong] > want[wrong] else 'served twice'}"
    )


def show_plan(plan: Plan) -> str:
    return "\n".join(f"{part} = {value}" for part, value in zip(PARTS, plan, strict=True))


WITHDRAW = Exercise(
    name="ps09.withdraw",
    oracle=withdraw,
    judge=judge_plan,
    show=show_plan,
    hint="four things change hands: the place in running, the entry in scheduled, its tokens, and maybe the cursor",
    cases=(
        Case((["a", "b", "c", "d"], {"a": 4, "b": 1}, 3, 2, "a"), hint="a had 4 tokens, and stood before c"),
        Case((["a", "b", "c", "d"], {"a": 1, "b": 4}, 0, 2, "b"), hint="its 4 tokens serve others now"),
        Case((["a", "b", "c", "d"], {"a": 1}, 7, 1, "d"), hint="d is not in the step yet: only running changes"),
        Case(
            (["a", "b", "c", "d"], {"b": 1}, 7, 2, "a"),
            hidden=True,
            hint="a has no tokens in this step (its last one is still in flight), but stands before the cursor",
        ),
        Case((["a", "b", "c"], {"a": 1, "b": 1}, 6, 2, "c"), hidden=True, hint="c itself is the one at the cursor"),
        Case((["a"], {}, 8, 0, "a"), hidden=True, hint="alone, and its own victim: an empty step is left"),
        Case((["a", "b", "c"], {"a": 1}, 7, 1, "c"), hidden=True, hint="a victim behind the cursor moves nothing"),
        Case((["a", "b", "c", "d", "e"], {"a": 2, "b": 2, "c": 2, "d": 2}, 0, 4, "c"), hidden=True),
    ),
)
