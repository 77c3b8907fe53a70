"""8-bit weights in a pipeline: each stage quantises its own layers, and the tokens are those of one process."""

import pytest

from minivllm import LLM, SamplingParams
from minivllm.layers.quantization import ScaledWeight

PROMPTS = ["Once upon a time there was a king who", "The old woman said to the fox", "Deep in the forest"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
STAGES = {"pipeline_parallel_size": 3, "distributed_executor_backend": "in_process"}


def make(model, **config):
    return LLM(model, device="cpu", dtype="float32", max_model_len=128, num_gpu_blocks_override=64, **config)


def ids_of(model, **config):
    """Prompts one by one: company changes a float's last bit, and rounding to 8 bits makes more of it."""
    llm = make(model, **config)
    return [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]


def scaled_weights(model):
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, ScaledWeight)]


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8"])
@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-deepseek"])
def test_a_quantised_pipeline_gives_the_tokens_of_one_process(model, scheme):
    alone = ids_of(model, quantization=scheme)
    assert ids_of(model, quantization=scheme, **STAGES) == alone
    assert any(len(set(ids)) > 3 for ids in alone)


def test_each_stage_quantises_its_own_layers():
    whole = len(scaled_weights(make("tiny-qwen3", quantization="int8").model_runner.model))
    stages = make("tiny-qwen3", quantization="int8", **STAGES).engine.worker.stages
    shares = [len(scaled_weights(stage.model)) for stage in stages]
    assert sum(shares) == whole > 0 and all(shares)
