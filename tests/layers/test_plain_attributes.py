"""The shortcuts of a forward pass that waits for its host change how things are found, not what is found."""

import torch
from torch import nn

from minivllm.layers import Layer, use_plain_attributes
from minivllm.layers.norm import RMSNorm


class Block(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(4, 1e-6)
        self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, x):
        return self.norm(x, None)[0] * self.scale


def test_a_call_is_the_forward_pass():
    block, x = Block(), torch.ones(2, 4)
    torch.testing.assert_close(block(x), torch.full((2, 4), 2.0))


def test_weights_and_modules_are_plain_attributes_and_the_same_objects():
    block, x = Block(), torch.randn(2, 4)
    before = block(x)
    use_plain_attributes(block)
    assert vars(block)["norm"] is block._modules["norm"] and vars(block)["scale"] is block._parameters["scale"]
    assert vars(block.norm)["weight"] is block.norm._parameters["weight"]
    assert torch.equal(block(x), before)
    assert [name for name, _ in block.named_parameters()] == ["scale", "norm.weight"]


def test_a_weight_that_is_replaced_later_is_found():
    block = Block()
    use_plain_attributes(block)
    block.scale = nn.Parameter(torch.zeros(4), requires_grad=False)
    assert block(torch.ones(1, 4)).eq(0).all()
