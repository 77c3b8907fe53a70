"""Result files come back as they were written, and nothing without provenance is taken for a result."""

import dataclasses
import json

import pytest

from minivllm.bench import environment
from minivllm.bench.environment import PACKAGE, Code, Environment, describe_code, hash_sources
from minivllm.bench.result_file import RESULTS, Measurement, ResultFile, ResultFileError, load, quartiles

CPU = Environment("Some CPU, 2 CPUs", 2, "Linux", "3.12.1", "2.13.0", "3.7.1", "5.17.0")
H200 = dataclasses.replace(CPU, gpu="NVIDIA H200", driver="570.1", cuda="12.8")


def make_result(environment=CPU, device="cpu", **changes) -> ResultFile:
    measurement = Measurement.from_samples(
        "minivllm", [3.0, 1.0, 2.0], shapes={"num_requests": 2}, dtype="float32", unit="s", warmup=1
    )
    code = Code("0123456789abcdef", False, ["config.py"], hash_sources(["config.py"]))
    result = ResultFile("k", device, environment, code, "python -m minivllm", "2026-01-31T12:00:00Z", [measurement])
    return dataclasses.replace(result, **changes)


def written(tmp_path, edit) -> str:
    """A good file after `edit(its JSON object)`."""
    path = tmp_path / "result.json"
    raw = dataclasses.asdict(make_result(H200, "cuda"))
    edit(raw)
    path.write_text(json.dumps(raw))
    return str(path)


def test_a_file_comes_back_as_it_was_saved(tmp_path):
    result = ResultFile.record("k", "cpu", make_result().measurements, [PACKAGE / "config.py"], {"ratio": 2.5})
    result.save(tmp_path / "result.json")
    assert load(tmp_path / "result.json") == result
    assert result.measurement("minivllm").median == 2.0
    assert (result.measurements[0].repeats, result.code.sources) == (3, ["config.py"])
    with pytest.raises(KeyError, match="no measurement 'other'; there are: minivllm"):
        result.measurement("other")


def test_subtitle_names_machine_versions_date_and_commit():
    assert make_result(H200, "cuda").subtitle() == (
        "recorded on NVIDIA H200, driver 570.1, CUDA 12.8, PyTorch 2.13.0, Triton 3.7.1, 2026-01-31, commit 0123456789"
    )
    dirty = Code("0123456789abcdef", True, ["config.py"], "0")
    assert make_result(code=dirty).subtitle() == (
        "recorded on Some CPU, 2 CPUs, 2 threads, PyTorch 2.13.0, 2026-01-31, commit 0123456789 with local changes"
    )


def test_a_result_is_outdated_once_its_sources_change(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "PACKAGE", tmp_path)
    (tmp_path / "kernel.py").write_text("x = 1\n")
    result = make_result(code=describe_code([tmp_path / "kernel.py"]))
    assert not result.is_outdated()
    (tmp_path / "kernel.py").write_text("x = 2\n")
    assert result.is_outdated()
    (tmp_path / "kernel.py").unlink()
    assert result.is_outdated()


@pytest.mark.parametrize(("given", "dirty"), [("abc123", False), ("abc123-dirty", True)])
def test_commit_can_be_given_where_there_is_no_git(monkeypatch, given, dirty):
    monkeypatch.setenv("MINIVLLM_COMMIT", given)
    code = describe_code([PACKAGE / "config.py"])
    assert (code.commit, code.dirty) == ("abc123", dirty)


def test_commit_is_unknown_without_git_and_without_being_told(monkeypatch):
    monkeypatch.delenv("MINIVLLM_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    code = describe_code([PACKAGE / "config.py"])
    assert (code.commit, code.dirty) == ("unknown", None)
    assert make_result(code=code).subtitle().endswith("commit unknown")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw.pop("command"), r"result\.json: lacks command"),
        (lambda raw: raw.update(comment="fast"), r"has unknown comment"),
        (lambda raw: raw["environment"].pop("torch"), r"environment: lacks torch"),
        (lambda raw: raw["environment"].update(driver=None), r"a run on a GPU must name driver"),
        (lambda raw: raw["code"].update(commit=""), r"code: commit: must be str, not ''"),
        (lambda raw: raw["code"].update(dirty="no"), r"code: dirty: must be bool or null, not 'no'"),
        (lambda raw: raw.update(time_utc="yesterday"), r"time_utc: 'yesterday' is not like"),
        (lambda raw: raw.update(measurements=[]), r"measurements: there are none"),
        (lambda raw: raw.update(format=99), r"format is 99, this version reads 1"),
        (lambda raw: raw["measurements"][0].update(median=9.0), r"the median must lie between the quartiles"),
        (lambda raw: raw["measurements"][0].update(median=float("nan")), r"must be finite numbers"),
        (lambda raw: raw["measurements"][0].update(repeats=0), r"repeats must be at least 1"),
        (lambda raw: raw["measurements"][0].update(warmup=True), r"warmup: must be int, not True"),
        (lambda raw: raw["measurements"][0].update(shapes={}), r"\(minivllm\): shapes: must say what was computed"),
    ],
)
def test_a_file_that_lacks_provenance_is_refused(tmp_path, edit, message):
    with pytest.raises(ResultFileError, match=message):
        load(written(tmp_path, edit))


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ResultFileError, match="cannot be read"):
        load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ResultFileError, match="is not JSON"):
        load(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ResultFileError, match="must be an object, not list"):
        load(tmp_path / "list.json")


def test_what_load_would_refuse_is_not_written(tmp_path):
    with pytest.raises(ResultFileError, match="there are none"):
        make_result(measurements=[]).save(tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()


def test_quartiles_of_few_samples():
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert quartiles([1.0, 3.0]) == (1.5, 2.0, 2.5)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("engine_*.json")), ids=lambda path: path.name)
def test_recorded_engine_results_can_be_shown(path):
    result = load(path)
    assert result.subtitle().startswith("recorded on ")
    assert str(PACKAGE.parent) not in path.read_text()
