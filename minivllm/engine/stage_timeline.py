"""When each stage of a pipeline works, on which step, and when it waits: stage x time.

    stage 0   |000|111|222|333|            a stage starts a step when it is done with the one before it,
    stage 1       |000|111|222|333|        and when the stage before it has sent the hidden states
    stage 2           |000|111|222|333|

Stages that share a process run one after the other. Their timeline is that of stages side by side: what each takes is
measured (or given), and put where it would have run. Time that a stage waits, between its first and last step of all,
is a *bubble* (Huang et al. 2019, GPipe).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageRun:
    """One step on one stage; times in seconds on the timeline's clock."""

    stage: int
    step: int
    start: float
    end: float
    num_tokens: int


class StageTimeline:
    """Runs of `num_stages` stages.

    Attributes:
        now: the engine's clock, which moves on when a result reaches it.
        runs: in the order in which they were entered.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.now = 0.0
        self.runs: list[StageRun] = []
        self._free_at = [0.0] * num_stages
        self._ready_at: dict[int, float] = {}

    def submit(self, step: int) -> None:
        """The engine sends a step to the first stage, now."""
        self._ready_at[step] = self.now

    def run(self, stage: int, step: int, seconds: float, num_tokens: int) -> None:
        """A stage has taken so many seconds for a step; the stages before it have been entered already."""
        start = max(self._free_at[stage], self._ready_at[step])
        self._free_at[stage] = self._ready_at[step] = start + seconds
        self.runs.append(StageRun(stage, step, start, start + seconds, num_tokens))

    def collect(self, step: int) -> None:
        """The engine has the result of a step, and goes on from there."""
        self.now = max(self.now, self._ready_at.pop(step))

    def clear_waiting(self) -> None:
        """Steps on their way are given up."""
        self._ready_at.clear()

    @property
    def duration(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.runs:
            return 0.0
        return max(run.end for run in self.runs) - min(run.start for run in self.runs)

    def busy(self, stage: int, since: float = 0.0, until: float = float("inf")) -> float:
        """Seconds that a stage works in a span of time."""
        return sum(max(0.0, min(run.end, until) - max(run.start, since)) for run in self.runs if run.stage == stage)

    def bubble_fraction(self, since: float | None = None, until: float | None = None) -> float:
        """The part of all stages' time in a span (None: from the first start, to the last end) that they wait."""
        since = min(run.start for run in self.runs) if since is None else since
        until = max(run.end for run in self.runs) if until is None else until
        busy = sum(self.busy(stage, since, until) for stage in range(self.num_stages))
        return 1.0 - busy / (self.num_stages * (until - since))

    def num_in_flight(self, time: float) -> int:
        """Steps that have begun on the first stage and not ended on the last."""
        starts = {run.step: run.start for run in self.runs if run.stage == 0}
        ends = {run.step: run.end for run in self.runs if run.stage == self.num_stages - 1}
        return sum(start <= time < ends.get(step, float("inf")) for step, start in starts.items())

    def as_text(self, seconds_per_column: float) -> str:
        """A line a stage, a column a slice of time: the step that runs there (its last digit); a dot for a bubble."""
        width = round(max((run.end for run in self.runs), default=0.0) / seconds_per_column)
        lines = [["."] * width for _ in range(self.num_stages)]
        for run in self.runs:
            for column in range(round(run.start / seconds_per_column), round(run.end / seconds_per_column)):
                lines[run.stage][column] = str(run.step % 10)
        return "\n".join(f"stage {stage}  {''.join(line)}" for stage, line in enumerate(lines))


def steady_bubble_fraction(stage_seconds: Sequence[float], num_in_flight: int) -> float:
    """Bubbles of a pipeline that decodes, once it is full.

    A batch comes round after sum(stage_seconds) at best; and the slowest stage has `num_in_flight` batches to serve
    each time round: round = max(sum, num_in_flight * max). Of num_stages * round, num_in_flight * sum is work.
    """
    total, slowest = sum(stage_seconds), max(stage_seconds)
    round_seconds = max(total, num_in_flight * slowest)
    return 1.0 - num_in_flight * total / (len(stage_seconds) * round_seconds)


def fill_and_drain_bubble_fraction(num_stages: int, num_steps: int) -> float:
    """Bubbles of `num_steps` equal steps that follow each other with nothing to wait for, such as chunks of one prompt.

    (p - 1) / (m + p - 1): the last stage waits for p - 1 steps at the start, the first one at the end.
    """
    return (num_stages - 1) / (num_steps + num_stages - 1)
