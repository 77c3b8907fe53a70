"""A whole model as one graph of torch.compile: attention and experts are nodes in it, and the logits are the same."""

import pytest
import torch
from cached_forward import CachedForward
from tiny_deepseek import random_prompt, save_deepseek

from minivllm.models.registry import load_model


@pytest.mark.parametrize("version", [2, 3])
def test_a_deepseek_model_compiles_with_fullgraph_and_gives_the_same_hidden_states(tmp_path, monkeypatch, version):
    # Weights packed for the CPU's matrix units are opaque to the tracer; a GPU has none of them.
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    save_deepseek(tmp_path, version)
    model, _ = load_model(tmp_path, dtype="float32")
    ids = torch.tensor(random_prompt(23, seed=1))
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    wanted, got = [], []
    for forward, found in ((model, wanted), (compiled, got)):
        cached = CachedForward(model.attention_layers())
        for start, count in ((0, 20), (20, 3)):
            rows = ids[start : start + count]
            found.append(
                cached.run(lambda positions, forward=forward, rows=rows: forward(rows, positions), start, count)
            )
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("minivllm.latent_attention" in target for target in targets) == len(model.layers)
    assert sum("minivllm.moe_forward" in target for target in targets) == len(model.layers) - 1
