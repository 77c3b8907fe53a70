"""A real model through our engine gives transformers' tokens. The whole matrix is run once, and its result is kept."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.bench.equality import (
    BFLOAT16_MARGIN,
    BLOCK_SIZES,
    CHUNK_SIZES,
    COMPANIES,
    FLOAT32_MARGIN,
    prompts,
    run_configuration,
    transformers_reference,
)
from minivllm.bench.result_file import RESULTS, load
from minivllm.checkpoints import fetch

NUM_TOKENS = 32
# Every block size, chunk size and company, in pairs that are far apart.
CONFIGURATIONS = [
    (1, 0, "crowded"),
    (8, 1, "batch"),
    (16, 7, "alone"),
    (16, 16, "crowded"),
    (64, 16, "batch"),
    (256, 0, "batch"),
]


@pytest.fixture(scope="module")
def model_path():
    return fetch("smollm2-135m")


@pytest.fixture(scope="module")
def references(model_path):
    chosen = prompts()
    found = transformers_reference(model_path, [*chosen[:4], chosen[-1]], NUM_TOKENS, "float32")
    for reference in found:
        assert min(reference.margins) > FLOAT32_MARGIN, "a close call: choose another prompt"
    return found


@pytest.mark.parametrize(("block_size", "chunk_size", "company"), CONFIGURATIONS)
def test_smollm2_gives_the_tokens_of_transformers(model_path, references, block_size, chunk_size, company):
    outcome = run_configuration(model_path, references, block_size, chunk_size, company, dtype="float32", device="cpu")
    assert outcome.num_equal == len(references)
    assert (outcome.num_preemptions > 0) == (company == "crowded")
    if company == "alone":
        assert outcome.max_logit_difference < 1e-3


def test_the_recorded_float32_matrix_is_whole_and_all_tokens_are_equal():
    result = load(RESULTS / "equality_smollm2_float32.json")
    wanted = {
        f"float32 block {b} chunk {c or 'whole'} {who}" for b in BLOCK_SIZES for c in CHUNK_SIZES for who in COMPANIES
    }
    assert {m.name for m in result.measurements} == wanted
    for m in result.measurements:
        assert (m.shapes["prompts"], m.shapes["output_tokens"]) == (20, 64)
        assert m.median == m.extra["num_outputs"] == 20
        assert (m.extra["num_preemptions"] > 0) == ("crowded" in m.name)
        assert ("alone" in m.name) == (m.extra["max_logit_difference"] is not None)
        assert (m.extra["max_logit_difference"] or 0) < 1e-3


def test_recorded_bfloat16_outputs_part_where_rounding_can_decide():
    """Both implementations' bfloat16 logits lie about 0.15 (root mean square) from the float32 ones, see below."""
    result = load(RESULTS / "equality_smollm2_bfloat16.json")
    assert len(result.measurements) == 4
    for m in result.measurements:
        assert (m.shapes["prompts"], m.shapes["output_tokens"]) == (20, 64)
        assert len(m.extra["first_differences"]) == 20 - m.median
        assert all(margin < 0.25 for margin in m.extra["first_differences"])
        assert m.extra["holds"] == all(margin < BFLOAT16_MARGIN for margin in m.extra["first_differences"])


def test_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(model_path):
    llm = LLM(str(model_path), dtype="bfloat16", device="cpu", max_model_len=64, num_gpu_blocks_override=4)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    errors = {"ours": 0.0, "theirs": 0.0}
    for text in prompts()[:6]:
        ids = llm.tokenizer.encode(text)
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        entries = llm.generate(ids, asked, use_tqdm=False)[0].prompt_logprobs[1:]
        own = torch.tensor([entry[token_id].logprob for token_id, entry in zip(ids[1:], entries, strict=True)])
        with torch.inference_mode():
            wanted, other = (
                model(torch.tensor([ids]))
                .logits[0, :-1]
                .float()
                .log_softmax(-1)
                .gather(1, torch.tensor(ids[1:])[:, None])
                for model in (exact, rounded)
            )
        errors["ours"] += float((own - wanted[:, 0]).square().sum())
        errors["theirs"] += float((other - wanted)[:, 0].square().sum())
    assert errors["ours"] < 2 * errors["theirs"]
