"""The engine's settings reach the layers: quantised models run through scheduler, cache and sampler."""

import pytest
from tiny_deepseek import TinyDeepseek, random_prompt

from minivllm.engine.request import Request
from minivllm.layers.linear import Linear
from minivllm.sampling_params import SamplingParams

WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128,
        "kv_lora_rank": 128, "num_hidden_layers": 2}  # fmt: skip


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block", "int8"])
def test_a_quantised_model_generates_the_same_tokens_in_chunks_and_at_once(tmp_path, quantization):
    tiny = TinyDeepseek.save(tmp_path, std=0.08, **WIDE)
    outputs = []
    for budget in (16, 8192):
        engine = tiny.engine(quantization=quantization, gemm_backend="reference", max_num_batched_tokens=budget)
        layers = [m for m in engine.worker.model.modules() if isinstance(m, Linear) and m.scaled is not None]
        assert layers and all(layer.scaled.backend == "reference" for layer in layers)
        request = Request("r", random_prompt(40, seed=5), SamplingParams(max_tokens=8))
        engine.add_request(request)
        while engine.has_unfinished_requests():
            engine.step()
        outputs.append(list(request.output_token_ids))
    assert outputs[0] == outputs[1] and len(outputs[0]) == 8
