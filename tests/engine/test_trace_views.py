"""Timelines, block spans and prefix trees say what the trace says."""

from trace_samples import busy_trace, hand_made_trace

from minivllm.engine.trace_views import BlockSpan, Wait, block_spans, prefix_tree, timeline


def test_a_timeline_has_a_cell_for_each_scheduled_request():
    view = timeline(hand_made_trace())
    assert view.req_ids == ["A", "B"] and (view.first, view.end) == (0, 4)
    places = [(cell.row, cell.step, cell.tokens.kind) for cell in view.cells]
    assert places == [
        (0, 0, "prefill"), (1, 0, "prefill"), (0, 1, "verify"), (1, 1, "prefill"), (0, 2, "decode"), (1, 3, "recompute")
    ]  # fmt: skip


def test_a_preempted_request_waits_from_its_preemption_to_its_return():
    assert timeline(hand_made_trace()).waits == [Wait(1, 2, 3, after_preemption=True)]


def test_a_request_waits_from_the_first_step_after_its_arrival():
    trace = hand_made_trace()
    trace.requests["B"].arrival = 0.5
    trace.steps[0].scheduled.pop()
    trace.steps[1].scheduled.pop()
    trace.steps[2].preempted = []
    assert timeline(trace).waits == [Wait(1, 1, 3, after_preemption=False)]


def test_a_request_that_never_comes_back_waits_to_the_end():
    trace = hand_made_trace()
    trace.steps[3].scheduled = []
    assert timeline(trace).waits == [Wait(1, 2, 4, after_preemption=True)]


def test_an_abort_ends_the_wait():
    trace = hand_made_trace()
    trace.steps[3].scheduled, trace.steps[3].aborted = [], ["B"]
    assert timeline(trace).waits == [Wait(1, 2, 3, after_preemption=True)]


def test_a_request_that_ends_with_a_late_result_does_not_wait():
    trace = hand_made_trace()
    trace.steps[3].scheduled, trace.steps[1].finished = [], {"B": "stop"}
    assert timeline(trace).waits == []


def test_a_range_of_steps_shows_only_who_was_there():
    view = timeline(hand_made_trace(), first=3)
    assert view.req_ids == ["B"] and [cell.step for cell in view.cells] == [3] and view.waits == []


def test_spans_of_blocks_change_with_their_owners():
    spans = block_spans(hand_made_trace())
    assert [span for span in spans if span.block_id < 3] == [
        BlockSpan(0, 0, 2, ("A", "B")),
        BlockSpan(0, 2, 3, ("A",)),
        BlockSpan(0, 3, 4, ("B",)),
        BlockSpan(1, 0, 3, ("A",)),
        BlockSpan(2, 0, 2, ("B",)),
    ]


def test_spans_cover_exactly_what_the_tables_hold():
    trace = busy_trace()
    held = {(event.step, block) for event in trace.steps for t in trace.tables_at(event.step).values() for block in t}
    covered = [(step, span.block_id) for span in block_spans(trace) for step in range(span.first, span.end)]
    assert len(covered) == len(set(covered)) and set(covered) == held


def test_a_prefix_tree_branches_where_tables_part():
    root = prefix_tree({"A": [0, 1, 2], "B": [0, 1, 3, 4], "C": [0, 5], "D": [0, 1, 3, 6]})
    assert (root.items, root.req_ids, root.num_leaves) == ([0], ["A", "B", "C", "D"], 4)
    left, right = root.children
    assert (left.items, left.req_ids) == ([1], ["A", "B", "D"]) and (right.items, right.req_ids) == ([5], ["C"])
    assert [(node.items, node.req_ids) for node in left.children] == [([2], ["A"]), ([3], ["B", "D"])]
    assert [node.items for node in left.children[1].children] == [[4], [6]]


def test_a_table_that_is_the_beginning_of_another_ends_inside_the_tree():
    root = prefix_tree({"A": [0, 1], "B": [0, 1, 2]})
    assert root.items == [0, 1] and [(child.items, child.req_ids) for child in root.children] == [([2], ["B"])]


def test_tables_with_nothing_in_common_part_at_the_root():
    root = prefix_tree({"A": [0], "B": [1]})
    assert root.items == [] and [child.items for child in root.children] == [[0], [1]]


def test_the_tree_of_nothing_is_one_empty_node():
    assert (prefix_tree({}).items, prefix_tree({}).children, prefix_tree({}).num_leaves) == ([], [], 1)
