"""How many blocks fit: arithmetic, limits of machine and container, and refusals that say what to do."""

import os

import pytest
import torch

from minivllm.config import ConfigError, EngineConfig
from minivllm.worker import kv_memory
from minivllm.worker.kv_memory import CPU_CACHE_LIMIT, GIB, KVCacheSpec, available_memory, count_blocks

CPU = torch.device("cpu")
# 2 (K and V) x 4 layers x 2 heads x 64 x 4 bytes = 4096 bytes a token, 64 KiB a block
SPEC = KVCacheSpec(num_layers=4, block_size=16, num_kv_heads=2, head_dim=64, bytes_per_element=4)


def not_called() -> int:
    raise AssertionError("activations are measured on a GPU only")


def count(max_model_len=1024, spec=SPEC, **settings) -> int:
    config = EngineConfig("m", **settings)
    return count_blocks(config, spec, max_model_len, CPU, not_called)


@pytest.fixture
def free_memory(monkeypatch):
    def set_to(num_bytes):
        monkeypatch.setattr(kv_memory, "available_memory", lambda: num_bytes)

    return set_to


def test_bytes_of_a_token_and_a_block():
    assert SPEC.bytes_per_token == 4096
    assert SPEC.bytes_per_block == 65536
    assert SPEC.layer_shape(10) == (2, 10, 16, 2, 64)
    per_layer = torch.Size(SPEC.layer_shape(10)).numel() * SPEC.bytes_per_element
    assert per_layer * SPEC.num_layers == 10 * SPEC.bytes_per_block


def test_an_override_is_taken_as_it_is(free_memory):
    free_memory(0)
    assert count(num_gpu_blocks_override=77) == 77
    assert count(num_gpu_blocks_override=10**6) == 10**6


def test_on_a_cpu_the_cache_takes_at_most_half_of_what_is_free(free_memory):
    free_memory(2 * 100 * 65536 + 1)
    assert count() == 100


def test_on_a_cpu_the_cache_never_takes_more_than_4_gib(free_memory):
    free_memory(1000 * GIB)
    assert CPU_CACHE_LIMIT == 4 * GIB
    assert count(max_model_len=10**6) == 4 * GIB // 65536


def test_no_more_blocks_are_taken_than_all_requests_together_can_use(free_memory):
    free_memory(1000 * GIB)
    assert count(max_model_len=33, max_num_seqs=5) == 5 * 3


def test_no_room_for_a_single_block_is_refused_with_what_helps(free_memory):
    free_memory(2 * 65536 - 1)
    message = (
        r"no room for the KV cache: one block of 16 tokens takes 0\.1 MiB; free some memory, raise "
        r"gpu_memory_utilization, or choose a smaller block_size or model"
    )
    with pytest.raises(ConfigError, match=message):
        count()


def test_a_max_model_len_that_was_asked_for_must_fit(free_memory):
    free_memory(2 * 10 * 65536)
    message = r"room for 160 tokens \(10 blocks of 16\), but max_model_len is 161: lower max_model_len to at most 160"
    with pytest.raises(ConfigError, match=message):
        count_blocks(EngineConfig("m", max_model_len=161), SPEC, 161, CPU, not_called)
    assert count_blocks(EngineConfig("m", max_model_len=160), SPEC, 160, CPU, not_called) == 10


def test_a_max_model_len_that_was_left_open_bows_to_what_fits(free_memory):
    free_memory(2 * 10 * 65536)
    assert count(max_model_len=100_000) == 10


def test_a_cache_of_one_token_serves_nobody():
    spec = KVCacheSpec(num_layers=1, block_size=1, num_kv_heads=1, head_dim=16, bytes_per_element=4)
    with pytest.raises(ConfigError, match=r"room for 1 tokens \(1 blocks of 1\), but a request needs 2"):
        count(spec=spec, num_gpu_blocks_override=1)
    assert count(spec=spec, num_gpu_blocks_override=2) == 2


def test_on_a_gpu_weights_others_and_activations_come_off_the_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 8 * GIB)
    config = EngineConfig("m", gpu_memory_utilization=0.5)
    # 50 GiB are ours; 40 are taken, of which our allocator holds 2 in reserve; the activations take 3 more
    num_blocks = count_blocks(config, SPEC, 10**9, torch.device("cuda"), lambda: 3 * GIB)
    assert num_blocks == (50 - (40 - 2) - 3) * GIB // 65536
    with pytest.raises(ConfigError, match="no room for the KV cache"):
        count_blocks(config, SPEC, 1024, torch.device("cuda"), lambda: 30 * GIB)


class TestContainers:
    def write(self, root, **files):
        for name, text in files.items():
            path = root / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{text}\n")

    def test_version_2_leaves_the_limit_less_what_is_used(self, tmp_path):
        self.write(tmp_path, memory_dot_max=1000, memory_dot_current=300)
        assert kv_memory._cgroup_available(tmp_path) == [700]

    def test_version_1_leaves_the_limit_less_what_is_used(self, tmp_path):
        self.write(tmp_path, memory__memory_dot_limit_in_bytes=1000, memory__memory_dot_usage_in_bytes=300)
        assert kv_memory._cgroup_available(tmp_path) == [700]

    def test_cached_files_that_nobody_reads_are_not_counted_as_used(self, tmp_path):
        self.write(tmp_path, memory_dot_max=1000, memory_dot_current=900)
        self.write(tmp_path, memory_dot_stat="anon 250\ninactive_file 600\nactive_file 50")
        assert kv_memory._cgroup_available(tmp_path) == [700]

    def test_the_same_for_version_1(self, tmp_path):
        self.write(tmp_path, memory__memory_dot_limit_in_bytes=1000, memory__memory_dot_usage_in_bytes=900)
        self.write(tmp_path, memory__memory_dot_stat="inactive_file 1\ntotal_inactive_file 600")
        assert kv_memory._cgroup_available(tmp_path) == [700]

    def test_a_container_over_its_limit_has_nothing_left(self, tmp_path):
        self.write(tmp_path, memory_dot_max=1000, memory_dot_current=1001)
        assert kv_memory._cgroup_available(tmp_path) == [0]

    def test_no_limit_and_no_container_say_nothing(self, tmp_path):
        assert kv_memory._cgroup_available(tmp_path) == []
        self.write(tmp_path, memory_dot_max="max", memory_dot_current=300)
        assert kv_memory._cgroup_available(tmp_path) == []

    def test_the_tighter_of_machine_and_container_counts(self, monkeypatch):
        monkeypatch.setattr(kv_memory, "_machine_available", lambda: 500)
        monkeypatch.setattr(kv_memory, "_cgroup_available", lambda: [300])
        assert available_memory() == 300
        monkeypatch.setattr(kv_memory, "_cgroup_available", lambda: [800])
        assert available_memory() == 500
        monkeypatch.setattr(kv_memory, "_cgroup_available", lambda: [])
        assert available_memory() == 500


def test_this_machine_has_some_memory_and_not_more_than_is_built_in():
    assert 2**20 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
