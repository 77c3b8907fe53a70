"""The models in the package draft well, change no greedy token, and sample from the distribution of plain decoding."""

from collections import Counter

import pytest

from minivllm.bench.speculation_prompts import stories, wide_margin_prompts
from minivllm.engine.spec_stats import SpecDecodeStats
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams

TARGET, MTP_TARGET = "tiny-qwen3", "tiny-deepseek"
DRAFT = {"method": "draft_model", "model": "tiny-qwen3-draft"}
DRAFTERS = {
    "ngram": (TARGET, {"method": "ngram"}, 2.5),
    "draft_model": (TARGET, DRAFT, 2.2),
    "mtp": (MTP_TARGET, {"method": "mtp"}, 2.5),
}
"""Target, settings, and tokens that a verification with three drafts yields at least, on stories."""
SETTINGS = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 512}
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def answers():
    return {
        model: wide_margin_prompts(LLM(model, **SETTINGS), stories()[:40], NUM_TOKENS, 1e-3, 24)
        for model in (TARGET, MTP_TARGET)
    }


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_are_often_right_and_change_no_greedy_token(method, answers):
    model, config, least = DRAFTERS[method]
    llm = LLM(model, speculative_config={**config, "num_speculative_tokens": 3}, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([answer.prompt_token_ids for answer in answers[model]], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [answer.token_ids for answer in answers[model]]
    stats = SpecDecodeStats.total(output.spec_decode for output in outputs if output.spec_decode)
    assert stats.mean_acceptance_length > least
    assert stats.num_accepted < stats.num_drafted
    assert stats.accepted == sorted(stats.accepted, reverse=True)


@pytest.mark.parametrize("sample", ["greedy", "probabilistic"])
def test_a_verified_token_is_sampled_as_without_drafts(sample):
    """Chi-square of two samples of 1,000 second tokens; a second token is the first that can be a draft."""
    num_requests, story = 1000, stories()[0]
    params = [
        SamplingParams(temperature=0.8, top_k=5, max_tokens=3, ignore_eos=True, seed=seed)
        for seed in range(num_requests)
    ]
    tallies, drafts = [], None
    for config in (None, {**DRAFT, "num_speculative_tokens": 2, "draft_sample_method": sample}):
        llm = LLM(TARGET, speculative_config=config, **SETTINGS)
        outputs = llm.generate([story] * num_requests, params, use_tqdm=False)
        tallies.append(Counter(output.outputs[0].token_ids[1] for output in outputs))
        drafts = SpecDecodeStats.total(output.spec_decode for output in outputs if output.spec_decode)
    assert 0.2 < drafts.acceptance_rate < 0.9
    often = [token for token, _ in (tallies[0] + tallies[1]).most_common(8)]
    pairs = [(tallies[0][token], tallies[1][token]) for token in often]
    pairs.append(tuple(num_requests - sum(column) for column in zip(*pairs, strict=True)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    assert statistic < 26.1, "eight degrees of freedom: exceeded by chance once in a thousand"
