"""The models in the package: whole, small, transformers' own as well as ours, and the same through every schedule."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.bench.equality import FLOAT32_MARGIN, run_configuration, transformers_reference
from minivllm.checkpoints import fetch, list_models

ROOT = Path(__file__).parents[2]
MEGABYTES = {"tiny-deepseek": 16, "tiny-qwen3": 12, "tiny-qwen3-draft": 2}
NUM_TOKENS = 24
TALES = [
    "The king had three",
    "The king had three sons, and the youngest",
    "He cut off the dragon's",
    "They lived happily",
    "There was once a poor woodcutter who lived in the",
    # Longer than a block of 64 together with its output.
    "Once upon a time there was a king who had three daughters. The eldest was proud, the second was idle, but the "
    "youngest was good and kind to everybody. One day the king fell ill, and no doctor in the land could help him. "
    "Then an old woman came to the gate and said that",
]
# Every block size, chunk size and company, in pairs that are far apart.
CONFIGURATIONS = [
    (1, 0, "crowded"),
    (8, 1, "batch"),
    (16, 7, "alone"),
    (16, 16, "crowded"),
    (64, 16, "batch"),
    (64, 0, "alone"),
    (256, 7, "batch"),
]


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


@pytest.fixture(scope="module")
def references() -> dict:
    """transformers' greedy tokens and logits in float32, without close calls."""
    found = {name: transformers_reference(fetch(name), TALES, NUM_TOKENS, "float32") for name in MEGABYTES}
    for name, of_model in found.items():
        for text, reference in zip(TALES, of_model, strict=True):
            assert min(reference.margins) > 2 * FLOAT32_MARGIN, f"{name}: {text!r} has a close call, choose another"
    return found


@pytest.mark.parametrize("name", MEGABYTES)
def test_a_directory_is_small_and_its_size_is_told(name):
    megabytes = size(fetch(name)) / 1e6
    assert megabytes <= MEGABYTES[name]
    (told,) = (model.size for model in list_models() if model.name == name)
    assert float(told.removesuffix(" MB on disk")) == pytest.approx(megabytes, abs=0.1)


def test_the_repository_stays_below_40_megabytes():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode != 0:
        pytest.skip("this is no git checkout")
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 40e6


@pytest.mark.parametrize("name", MEGABYTES)
def test_transformers_misses_nothing_and_leaves_out_exactly_the_mtp_layer(name):
    directory = fetch(name)
    model, loading = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    with safe_open(directory / "model.safetensors", "pt") as file:
        of_mtp = [key for key in file.keys() if key.startswith(f"model.layers.{model.config.num_hidden_layers}.")]  # noqa: SIM118
    # transformers joins a layer's experts before it looks for their place.
    of_mtp = [re.sub(r"experts\.\d+\.(gate|up)_proj\.weight", "experts.gate_up_proj", key) for key in of_mtp]
    of_mtp = [re.sub(r"experts\.\d+\.down_proj\.weight", "experts.down_proj", key) for key in of_mtp]
    assert set(loading["unexpected_keys"]) == set(of_mtp)
    assert bool(of_mtp) == (name == "tiny-deepseek")


@pytest.mark.parametrize("name", MEGABYTES)
def test_logits_are_those_of_transformers_for_prompts_chunks_and_decodes(name, references):
    for chunk_size in (0, 5):
        outcome = run_configuration(
            fetch(name), references[name], 16, chunk_size, "alone", dtype="float32", device="cpu"
        )
        assert outcome.num_equal == outcome.num_outputs == len(TALES)
        assert outcome.max_logit_difference < 1e-3


@pytest.mark.parametrize(("block_size", "chunk_size", "company"), CONFIGURATIONS)
def test_tiny_deepseek_gives_the_tokens_of_transformers(references, block_size, chunk_size, company):
    expected = references["tiny-deepseek"]
    outcome = run_configuration(
        fetch("tiny-deepseek"), expected, block_size, chunk_size, company, dtype="float32", device="cpu"
    )
    assert outcome.num_equal == len(expected)
    assert (outcome.num_preemptions > 0) == (company == "crowded")


@pytest.mark.parametrize("chunk_size", [0, 5])
@pytest.mark.parametrize("caching", [True, False])
def test_prefix_hits_change_no_token(references, caching, chunk_size):
    llm = LLM("tiny-deepseek", dtype="float32", device="cpu", block_size=4, num_gpu_blocks_override=256,
              enable_prefix_caching=caching, long_prefill_token_threshold=chunk_size)  # fmt: skip
    expected = references["tiny-deepseek"]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for is_second_time in (False, True):
        outputs = llm.generate([reference.prompt_token_ids for reference in expected], params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [reference.token_ids for reference in expected]
        assert any(o.num_cached_tokens > 0 for o in outputs) or not (caching and is_second_time)
        assert caching or not any(o.num_cached_tokens for o in outputs)


@pytest.mark.parametrize(
    ("name", "speculation"),
    [
        ("tiny-deepseek", {"method": "mtp", "num_speculative_tokens": 3}),
        ("tiny-qwen3", {"method": "draft_model", "model": "tiny-qwen3-draft", "num_speculative_tokens": 3}),
    ],
)
def test_trained_drafters_are_often_right_and_change_no_token(references, name, speculation):
    llm = LLM(name, dtype="float32", device="cpu", num_gpu_blocks_override=64, speculative_config=speculation)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([r.prompt_token_ids for r in references[name]], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [r.token_ids for r in references[name]]
    accepted, drafted = (sum(sum(getattr(o.spec_decode, field)) for o in outputs) for field in ("accepted", "drafted"))
    assert accepted > 0.3 * drafted


def test_a_token_of_tiny_deepseek_takes_160_numbers_a_layer():
    llm = LLM("tiny-deepseek", device="cpu", dtype="bfloat16", num_gpu_blocks_override=4)
    caches = llm.model_runner.kv_caches
    assert {tuple(cache.shape[-2:]) for cache in caches.values()} == {(1, 128 + 32)}
    assert llm.model_runner.kv_cache_spec.bytes_per_token == len(caches) * 160 * 2 == 6 * 320


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The package as it would be installed, built without a network from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_of_the_checkout(folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "-w", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("minivllm-*.whl")
    return path


def copy_of_the_checkout(target: Path) -> Path:
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    shutil.copytree(ROOT / "minivllm", target / "minivllm", ignore=shutil.ignore_patterns("__pycache__"))
    return target


def test_the_wheel_holds_the_models_whole(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {item.filename: item.file_size for item in archive.infolist()}
    for name in MEGABYTES:
        for file in fetch(name).iterdir():
            assert packed[f"minivllm/checkpoints/{name}/{file.name}"] == file.stat().st_size


def test_a_model_runs_out_of_the_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import minivllm; from minivllm import LLM, SamplingParams\n"
        "llm = LLM('tiny-deepseek', device='cpu', num_gpu_blocks_override=16)\n"
        "print(minivllm.__file__)\n"
        "print(llm.generate('The king', SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs)"
    )
    environment = {"PYTHONPATH": str(tmp_path / "installed"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "installed")) and "token_ids=[" in done.stdout
