"""Shares of a dimension: together they are all of it, and a rank reads its own and no more."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.layers.linear import Linear, MergedLinear
from minivllm.layers.sharding import Shard, Share, slot, split, split_or_replicate, split_padded, whole
from minivllm.models.loader import load_weights
from minivllm.worker.tensor_parallel import ThreadGroup, building_for


def on_each_rank(size, function, *arguments):
    results = []
    for group in ThreadGroup.create(size):
        with building_for(group):
            results.append(function(*arguments))
    return results


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 5))
def test_even_shares_follow_each_other_and_are_all_of_it(size, each, count):
    shares = [share.times(count) for share in on_each_rank(size, split, "heads", size * each)]
    held = [row for share in shares for row in range(share.whole)[share.stored]]
    assert held == list(range(size * each * count))
    assert all(share.size == each * count for share in shares)


@given(st.integers(1, 8), st.integers(1, 40))
def test_padded_shares_have_one_size_and_store_every_row_once(size, count):
    shares = on_each_rank(size, split_padded, count)
    assert [row for share in shares for row in range(count)[share.stored]] == list(range(count))
    assert {share.size for share in shares} == {-(-count // size)}


@given(st.sampled_from([(1, 1), (2, 1), (8, 1), (4, 2), (8, 2), (8, 4), (2, 4), (4, 8)]), st.integers(1, 4))
def test_a_query_head_meets_its_own_kv_head(sizes, groups):
    """Query head h reads KV head h // (heads / kv_heads) of the whole model; on a rank both count from 0."""
    size, kv_heads = sizes
    heads = max(size, kv_heads) * groups
    for q, kv in zip(
        on_each_rank(size, split, "heads", heads), on_each_rank(size, split_or_replicate, "kv", kv_heads), strict=True
    ):
        for head in range(q.size):
            here = kv.start + head // (q.size // kv.size)
            assert here == (q.start + head) // (heads // kv_heads)


def test_one_rank_has_plain_slots():
    layer = MergedLinear(4, {"gate": 2, "up": 2}, bias=True)
    assert all(isinstance(tensor, torch.Tensor) for _, tensor in layer.slots("mlp"))
    assert split("heads", 4) == whole(4) and whole(4).is_whole
    assert not Share(1, 1, 1).is_whole  # padding only


def test_merged_parts_are_divided_one_by_one():
    """Rank 1 of 2 has the second half of gate and of up, and not all of up."""
    gate, up = torch.arange(8.0).view(4, 2), 100 + torch.arange(8.0).view(4, 2)
    layer = MergedLinear(2, {"gate": Share(4, 2, 2), "up": Share(4, 2, 2)})
    slots = dict(layer.slots("mlp"))
    for name, tensor in (("mlp.gate.weight", gate), ("mlp.up.weight", up)):
        slots[name].tensor.copy_(tensor[slots[name].shares[0].stored, slots[name].shares[1].stored])
    assert torch.equal(layer.weight, torch.cat((gate[2:], up[2:])))


class Recorded:
    """An open safetensors file that notes how many numbers are read of it."""

    def __init__(self, file, sizes):
        self.file, self.sizes = file, sizes

    def __enter__(self):
        self.opened = self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.opened.keys()

    def get_slice(self, name):
        return RecordedSlice(self.opened.get_slice(name), self.sizes)

    def get_tensor(self, name):
        tensor = self.opened.get_tensor(name)
        self.sizes.append(tensor.numel())
        return tensor


class RecordedSlice:
    def __init__(self, stored, sizes):
        self.stored, self.sizes = stored, sizes
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, index):
        part = self.stored[index]
        self.sizes.append(part.numel())
        return part


def test_a_rank_reads_its_part_and_no_more(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    from minivllm.models import loader

    weight, bias = torch.randn(6, 8), torch.randn(6)
    save_file({"a.weight": weight, "a.bias": bias, "other": torch.randn(100)}, tmp_path / "model.safetensors")
    sizes, opener = [], loader.safe_open
    monkeypatch.setattr(loader, "safe_open", lambda *args, **kwargs: Recorded(opener(*args, **kwargs), sizes))
    by_outputs, by_inputs = Linear(8, Share(6, 2, 2), bias=True), Linear(Share(8, 4, 4), 6)
    load_weights([*by_outputs.slots("a"), ("other", None)], tmp_path)
    assert sorted(sizes) == [2, 16]
    assert torch.equal(by_outputs.weight, weight[2:4]) and torch.equal(by_outputs.bias, bias[2:4])
    sizes.clear()
    load_weights([*by_inputs.slots("a"), ("other", None)], tmp_path, lambda name: name == "a.bias")
    assert sizes == [24] and torch.equal(by_inputs.weight, weight[:, 4:])


def test_a_wrong_shape_is_that_of_the_whole_tensor(tmp_path):
    from safetensors.torch import save_file

    save_file({"a.weight": torch.zeros(5, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a\.weight is \(5, 8\), should be \(6, 8\)"):
        load_weights(Linear(8, Share(6, 2, 2)).slots("a"), tmp_path)


def test_a_slot_of_a_part_is_a_shard():
    tensor = torch.zeros(2, 8)
    assert slot(tensor, whole(2), whole(8)) is tensor
    assert slot(tensor, Share(4, 2, 2), whole(8)) == Shard(tensor, (Share(4, 2, 2), whole(8)))
