"""The operators: registered as PyTorch wants them, one node in a graph, and the numbers of the loop."""

import copy
import gc

import pytest
import torch

from minivllm.models.llama import GatedMLP
from minivllm.moe import ops
from minivllm.moe.experts import experts_by_loop
from minivllm.moe.layer import MoE, RoutedExperts
from minivllm.moe.routing import Routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, WIDTH, EXPERTS, TOP_K = 32, 16, 6, 2


def make_moe(shared=True, name="layers.0.mlp"):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        mlp = GatedMLP(HIDDEN, WIDTH, bias=False) if shared else None
        moe = MoE(name, Routing("greedy", TOP_K), EXPERTS, HIDDEN, WIDTH, mlp)
        for parameter in moe.parameters():
            parameter.normal_()
    return moe


def rows(num_tokens=5):
    generator = torch.Generator().manual_seed(1)
    x, logits = (torch.randn(num_tokens, size, generator=generator).to(DEVICE) for size in (HIDDEN, EXPERTS))
    return x, logits


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_the_operator_gives_what_the_loop_gives(num_tokens):
    moe = make_moe()
    x, logits = rows(num_tokens)
    weights, ids = moe.experts.routing(logits, None)
    wanted = experts_by_loop(x, weights, ids, moe.experts.gate_up, moe.experts.down)
    got = torch.ops.minivllm.moe_forward(x, logits, moe.experts.op_name)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    routed, shared = torch.ops.minivllm.moe_forward_shared(x, logits, moe.experts.op_name)
    assert torch.equal(routed, got) and torch.equal(shared, moe.shared_experts(x))


def test_the_operators_pass_opcheck():
    moe = make_moe()
    arguments = (*rows(), moe.experts.op_name)
    torch.library.opcheck(torch.ops.minivllm.moe_forward.default, arguments)
    torch.library.opcheck(torch.ops.minivllm.moe_forward_shared.default, arguments)


def test_the_schema_says_that_nothing_is_changed_and_that_strides_stay():
    for name in ("moe_forward", "moe_forward_shared", "attention", "latent_attention"):
        operator = getattr(torch.ops.minivllm, name).default
        assert not operator._schema.is_mutable
        assert torch.Tag.needs_fixed_stride_order in operator.tags


@pytest.mark.parametrize("shared", [False, True])
def test_a_block_compiles_as_one_graph_in_which_its_experts_are_one_node(shared):
    moe = make_moe(shared)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    x, _ = rows()
    got = torch.compile(moe, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(got, moe(x))
    (graph,) = graphs
    ours = [str(node.target) for node in graph.graph.nodes if "minivllm" in str(node.target)]
    assert ours == ["minivllm.moe_forward_shared" if shared else "minivllm.moe_forward"]


def test_without_a_fake_implementation_the_operator_cannot_be_traced():
    """What the fake implementation is for: the same operator without one stops the trace."""
    library = torch.library.Library("minivllm_test", "FRAGMENT")
    library.define("moe_forward(Tensor hidden_states, Tensor router_logits, str layer_name) -> Tensor")
    library.impl("moe_forward", ops.moe_forward, "CPU")
    moe = make_moe(shared=False)
    x, logits = (tensor.cpu() for tensor in rows())

    def forward(x, logits):
        return torch.ops.minivllm_test.moe_forward(x, logits, moe.experts.op_name)

    with pytest.raises(Exception, match=r"fake impl|FakeTensor|fake"):
        torch.compile(forward, fullgraph=True, backend="eager")(x, logits)


def test_a_compiled_block_serves_other_numbers_of_tokens():
    moe = make_moe()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (5, 2, 9):
        x, _ = rows(num_tokens)
        torch.testing.assert_close(compiled(x), moe(x))


def test_two_models_with_the_same_layer_names_keep_their_own_weights():
    first, second = make_moe(name="twin"), make_moe(name="twin")
    assert (first.experts.op_name, second.experts.op_name) == ("twin", "twin#2")
    second.experts.down.zero_()
    x, logits = rows()
    assert first.experts(x, logits).any() and not second.experts(x, logits).any()


def test_a_copy_of_a_layer_is_a_layer_of_its_own():
    moe = make_moe(name="copied")
    twin = copy.deepcopy(moe)
    twin.experts.down.zero_()
    twin.shared_experts.down_proj.weight.zero_()
    x, _ = rows()
    assert moe(x).any() and not twin(x).any()


def test_a_layer_that_is_gone_is_named():
    layer = RoutedExperts("gone", Routing("greedy", 1), None, 2, 4, 4)
    name = layer.op_name
    del layer
    gc.collect()
    with pytest.raises(ValueError, match="layer_name 'gone' is no living layer's"):
        torch.ops.minivllm.moe_forward(torch.zeros(1, 4), torch.zeros(1, 2), name)
