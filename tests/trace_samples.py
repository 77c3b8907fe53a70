"""Traces to test with: one made by hand, whose every number can be checked in the head, and a busy one."""

from minivllm.engine.simulate import CostModel, simulate
from minivllm.engine.trace import (
    DECODE,
    PREFILL,
    RECOMPUTE,
    VERIFY,
    ScheduledTokens,
    StepEvent,
    Trace,
    TracedRequest,
)
from minivllm.engine.workload import make_workload


def hand_made_trace() -> Trace:
    """Blocks of 4 tokens, a second a step. A and B share block 0; B loses its blocks in step 2 and comes back in 3.

    A: prompt of 6, then a verification (one draft right, one wrong), then a decode, then it is done.
    B: prompt of 9, of which 4 are found in the cache.
    """
    rows = [
        [ScheduledTokens("A", PREFILL, 0, 6, num_output=1), ScheduledTokens("B", PREFILL, 4, 2)],
        [
            ScheduledTokens("A", VERIFY, 6, 3, num_drafts=2, num_accepted=1, num_output=2),
            ScheduledTokens("B", PREFILL, 6, 3, num_output=1),
        ],
        [ScheduledTokens("A", DECODE, 8, 1, num_output=1)],
        [ScheduledTokens("B", RECOMPUTE, 4, 6, num_recomputed=5, num_output=1)],
    ]
    steps = [StepEvent(number, float(number), number + 1.0, scheduled) for number, scheduled in enumerate(rows)]
    steps[0].new_blocks = {"A": [0, 1], "B": [0, 2]}
    steps[0].prefix_hits = {"A": [0, 6], "B": [4, 9]}
    steps[1].new_blocks = {"A": [3], "B": [4]}
    steps[2].freed = steps[2].preempted = ["B"]
    steps[2].finished = {"A": "length"}
    steps[3].freed = ["A"]
    steps[3].new_blocks = {"B": [0, 5, 6]}
    steps[3].prefix_hits = {"B": [4, 10]}
    steps[3].finished = {"B": "stop"}
    for event, used, stored, running, waiting in zip(
        steps, (3, 5, 3, 3), (8, 14, 9, 10), (2, 2, 1, 1), (0, 0, 1, 0), strict=True
    ):
        event.num_used_blocks, event.num_stored_tokens = used, stored
        event.num_running, event.num_waiting = running, waiting
    requests = {"A": TracedRequest(6, 0.0), "B": TracedRequest(9, 0.0)}
    return Trace("made by hand", 8, 4, 16, 4, 10, requests, steps)


def busy_trace(**settings) -> Trace:
    """Shared prefixes, chunks, drafts and a pool too small for everybody: everything happens."""
    workload = make_workload([0.0, 0.0, 0.01, 0.01, 0.03, 0.05], (14, 30), (4, 14), num_shared_tokens=8, seed=2)
    defaults = {"num_blocks": 16, "block_size": 4, "max_model_len": 60, "max_num_seqs": 4, "num_drafts": 2}
    return simulate(workload, CostModel(), max_num_batched_tokens=24, seed=1, **{**defaults, **settings})
