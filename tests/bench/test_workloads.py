"""Workloads are the same on every machine, and the yardstick is the one that others publish numbers for."""

import json

from minivllm.bench.workloads import SPECS, draw_workload, model_shape, write_qwen3_config


def test_yardstick_has_the_published_number_of_tokens():
    workload = draw_workload(SPECS["yardstick"])
    assert len(workload.prompts) == len(workload.output_lens) == 256
    assert workload.num_prompt_tokens == 142_827
    assert workload.num_output_tokens == 133_966
    assert workload.temperature == 0.6
    assert max(max(prompt) for prompt in workload.prompts) <= 10_000


def test_mixed_requests_stay_within_their_ranges():
    workload = draw_workload(SPECS["mixed"])
    assert len(workload.prompts) == 32
    assert all(16 <= len(prompt) <= 256 for prompt in workload.prompts)
    assert all(16 <= length <= 128 for length in workload.output_lens)
    assert max(map(len, workload.prompts)) + max(workload.output_lens) <= SPECS["mixed"].max_model_len
    assert workload == draw_workload(SPECS["mixed"])


def test_fewer_requests_and_a_small_vocabulary():
    workload = draw_workload(SPECS["yardstick"], num_requests=3, vocab_size=100)
    assert len(workload.prompts) == 3
    assert all(0 <= token_id < 100 for prompt in workload.prompts for token_id in prompt)


def test_written_config_has_the_shape_of_qwen3_0_6b(tmp_path):
    write_qwen3_config(tmp_path)
    shape = model_shape(json.loads((tmp_path / "config.json").read_text()))
    assert shape["num_hidden_layers"] == 28
    assert shape["hidden_size"] == 1024
    assert shape["vocab_size"] == 151_936
