"""Books of drafts, worked out by hand."""

from minivllm.engine.spec_stats import SpecDecodeStats


def test_counts_are_kept_by_position_and_add_up():
    stats = SpecDecodeStats()
    stats.record(num_drafts=3, num_accepted=1, num_emitted=2)
    stats.record(num_drafts=3, num_accepted=3, num_emitted=4)
    stats.record(num_drafts=1, num_accepted=1, num_emitted=1)  # a stop token was the first draft
    assert (stats.drafted, stats.accepted, stats.emitted) == ([3, 2, 2, 0], [3, 1, 1, 0], [3, 2, 1, 1])
    assert (stats.num_drafted, stats.num_accepted) == (7, 5)
    assert stats.acceptance_rate == 5 / 7
    assert stats.mean_acceptance_length == 1 + 5 / 3
    total = SpecDecodeStats.total([stats, SpecDecodeStats(), stats])
    assert total.accepted == [6, 2, 2, 0] and total.num_verifications == 6
    assert total.mean_acceptance_length == stats.mean_acceptance_length


def test_without_drafts_a_step_yields_one_token():
    empty = SpecDecodeStats()
    assert (empty.acceptance_rate, empty.mean_acceptance_length) == (0.0, 1.0)
