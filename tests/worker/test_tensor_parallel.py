"""The collectives: the same results from threads and from processes, counted bytes, and an end to waiting."""

import threading

import pytest
import torch
import torch.multiprocessing as multiprocessing
from cached_forward import STEPS, logits_in_steps
from tiny_deepseek import random_prompt, save_deepseek

from minivllm.models.registry import load_model
from minivllm.worker.tensor_parallel import (
    SINGLE_RANK,
    DistributedGroup,
    ThreadGroup,
    Traffic,
    agree_on,
    building_for,
    collective_group,
    current_group,
    run_ranks,
)

IDS = torch.tensor(random_prompt(sum(STEPS), seed=1))


def collectives(group):
    """What a rank sees of each collective, from tensors that name their rank."""
    x = torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * group.rank
    return (
        group.all_reduce(x.clone()),
        group.all_gather(x),
        group.broadcast(x.clone(), source=group.size - 1),
        agree_on(torch.tensor([7 + group.rank]), group),
    )


def expected_collectives(size):
    parts = [torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * rank for rank in range(size)]
    return sum(parts), torch.cat(parts, dim=1), parts[-1], torch.tensor([7])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_threads_get_sums_parts_side_by_side_and_the_sources_tensor(size):
    for results in run_ranks(collectives, ThreadGroup.create(size)):
        for got, wanted in zip(results, expected_collectives(size), strict=True):
            assert torch.equal(got, wanted)


def test_a_single_rank_gives_back_what_it_got():
    x = torch.ones(2, 3)
    assert all(call(x) is x for call in (SINGLE_RANK.all_reduce, SINGLE_RANK.all_gather, SINGLE_RANK.broadcast))
    for got, wanted in zip(collectives(SINGLE_RANK), expected_collectives(1), strict=True):
        assert torch.equal(got, wanted)


def test_a_rank_may_write_into_its_result_at_once():
    def rounds(group):
        x = torch.full((1000,), float(group.rank + 1))
        for _ in range(50):
            x = group.all_reduce(x).div_(group.size)
        return x

    for result in run_ranks(rounds, ThreadGroup.create(4)):
        assert result.eq(2.5).all()


def test_calls_and_bytes_are_counted_by_the_rank_that_sends():
    groups = ThreadGroup.create(2)
    run_ranks(collectives, groups)
    assert groups[0].traffic == {"all_reduce": Traffic(1, 24), "all_gather": Traffic(1, 24), "broadcast": Traffic(2, 8)}
    assert groups[1].traffic["broadcast"] == Traffic(2, 24)


def test_when_a_rank_fails_the_others_stop_waiting_and_its_error_comes_out():
    def fail(group):
        if group.rank == 1:
            raise RuntimeError("rank 1 is out of memory")
        return group.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match="out of memory"):
        run_ranks(fail, ThreadGroup.create(3))


def test_layers_are_built_for_the_group_in_force_in_their_own_thread():
    group = ThreadGroup.create(2)[1]
    seen = []
    with building_for(group):
        assert current_group() is group and collective_group() is group
        thread = threading.Thread(target=lambda: seen.append(current_group()))
        thread.start()
        thread.join()
    assert seen == [SINGLE_RANK] and current_group() is SINGLE_RANK and collective_group() is None


def run_process(rank, size, rendezvous, model_path, results):
    """One rank as torch.multiprocessing starts it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=size)
    group = DistributedGroup()
    found = collectives(group)
    model, _ = load_model(model_path, dtype="float32", tensor_parallel=group)
    torch.save((found, logits_in_steps(model, IDS)), f"{results}/{rank}")
    torch.distributed.destroy_process_group()


def test_two_processes_over_gloo_give_what_one_gives(tmp_path):
    save_deepseek(tmp_path / "model")
    whole, _ = load_model(tmp_path / "model", dtype="float32")
    expected = logits_in_steps(whole, IDS)
    arguments = 2, tmp_path / "rendezvous", tmp_path / "model", tmp_path
    multiprocessing.spawn(run_process, arguments, nprocs=2)
    logits = []
    for rank in range(2):
        found, got = torch.load(tmp_path / str(rank))
        for one, wanted in zip(found, expected_collectives(2), strict=True):
            assert torch.equal(one, wanted)
        assert (got - expected).abs().max() < 1e-3 and expected.std() > 1
        logits.append(got)
    assert torch.equal(*logits)
