"""Settings of speculation that cannot work are refused where they are given, by name."""

import pytest

from minivllm.config import ConfigError, EngineConfig


def config(speculative, **more) -> EngineConfig:
    return EngineConfig("m", speculative_config=speculative, **more)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("ngram", "speculative_config must be a dict or None, not 'ngram'"),
        ({"method": "ngram"}, "speculative_config needs 'num_speculative_tokens'"),
        ({"num_speculative_tokens": 2}, "speculative_config needs 'method'"),
        ({"method": "oracle", "num_speculative_tokens": 2}, "method must be one of ngram, draft_model, mtp"),
        ({"method": "ngram", "num_speculative_tokens": -1}, r"num_speculative_tokens must be 0 .* not -1"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "num_speculative_tokens must be .* not 2.0"),
        ({"method": "ngram", "num_speculative_tokens": 2, "k": 3}, "has no setting k; known are: method"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "'model' must name the draft model"),
        ({"method": "mtp", "num_speculative_tokens": 2, "model": "x"}, "method 'mtp' has no 'model' of its own"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5}, r"prompt_lookup_min \(5\) must not"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 0},
            "prompt_lookup_max must be positive",
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 1, "draft_sample_method": "lucky"},
            "draft_sample_method must be one of greedy, probabilistic, not 'lucky'",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        config(settings)


def test_no_drafts_mean_no_speculation():
    for speculative in (None, {"method": "mtp", "num_speculative_tokens": 0}):
        assert config(speculative).speculation is None and config(speculative).num_speculative_tokens == 0


def test_a_budget_too_small_for_everybodys_drafts_is_refused_with_both_ways_out():
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(31\) .* raise it to 32,? or .* max_num_seqs to 7"):
        config(ngram, max_num_seqs=8, max_num_batched_tokens=31)
    assert config(ngram, max_num_seqs=8, max_num_batched_tokens=32).num_speculative_tokens == 3


def test_async_scheduling_with_ngram_is_refused_for_its_own_reason():
    with pytest.raises(ConfigError, match="async_scheduling=True cannot go with speculative_config method 'ngram'"):
        config({"method": "ngram", "num_speculative_tokens": 3}, async_scheduling=True)


def test_drafters_with_a_cache_need_slots_ahead():
    lookahead = [
        config({"method": method, "num_speculative_tokens": 3, **more}).speculation.num_lookahead_tokens
        for method, more in (("ngram", {}), ("draft_model", {"model": "x"}), ("mtp", {}))
    ]
    assert lookahead == [0, 3, 3]
