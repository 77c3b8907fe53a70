"""On what machine, with what libraries and with what code a benchmark runs: the provenance of a number."""

import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
COMMIT_VARIABLE = "MINIVLLM_COMMIT"
UNKNOWN = "unknown"
_VARIABLES_THAT_MATTER = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MINIVLLM_ATTENTION_BACKEND",
    "MINIVLLM_GEMM_BACKEND",
    "MINIVLLM_USE_DEEP_GEMM",
)


@dataclass(frozen=True)
class Environment:
    """Hardware and libraries; `gpu`, `driver` and `cuda` are None for a run on a CPU."""

    cpu: str
    num_threads: int
    """Threads that PyTorch computes with."""
    platform: str
    python: str
    torch: str
    triton: str | None
    """None where Triton has no wheels."""
    transformers: str | None
    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None


@dataclass(frozen=True)
class Code:
    """Which version of minivllm ran."""

    commit: str
    """Full hash, or "unknown" on a machine without git where MINIVLLM_COMMIT is not set."""
    dirty: bool | None
    """Whether a file of `sources` differs from the commit; None if nobody can tell."""
    sources: list[str]
    """The files whose speed was measured, relative to the package."""
    source_hash: str
    """SHA-256 over names and contents of `sources`."""


def describe_environment(device: str) -> Environment:
    """The machine as it is now.

    Args:
        device: "cpu", "cuda" or "cuda:N", where the benchmark ran.
    """
    import torch

    on_gpu = device.startswith("cuda")
    return Environment(
        cpu=_cpu_name(),
        num_threads=torch.get_num_threads(),
        platform=platform.platform(terse=True),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        transformers=_version("transformers"),
        gpu=torch.cuda.get_device_name(device) if on_gpu else None,
        driver=_driver_version() if on_gpu else None,
        cuda=torch.version.cuda if on_gpu else None,
    )


def describe_code(sources: Iterable[Path]) -> Code:
    """The version of minivllm that runs.

    The commit comes from git. A copy of the tree without git gets it from the environment variable MINIVLLM_COMMIT,
    as `<hash>`, or `<hash>-dirty` where the copied files differ from that commit.

    Args:
        sources: files of the package whose speed is measured.
    """
    paths = sorted({Path(source).resolve() for source in sources})
    names = [path.relative_to(PACKAGE).as_posix() for path in paths]
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        commit, dirty = given.removesuffix("-dirty"), given.endswith("-dirty")
    else:
        commit = _git("rev-parse", "HEAD") or UNKNOWN
        status = None if commit == UNKNOWN else _git("status", "--porcelain", "--", *names)
        dirty = None if status is None else bool(status)
    return Code(commit, dirty, names, hash_sources(names))


def hash_sources(names: Iterable[str]) -> str:
    """SHA-256 over names and contents of files of the package; a file that is gone changes the hash too."""
    digest = hashlib.sha256()
    for name in sorted(names):
        path = PACKAGE / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b"(gone)") + b"\0")
    return digest.hexdigest()


def imported_sources(excluded: Iterable[str] = ("bench", "cli.py", "__main__.py")) -> list[Path]:
    """The files of this package that the process has imported so far: what a run of the whole engine depends on.

    Args:
        excluded: folders and files, relative to the package, that take no part in what is measured.
    """
    files = {Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    left_out = [PACKAGE / name for name in excluded]
    return sorted(
        file
        for file in files
        if file.is_relative_to(PACKAGE) and not any(file.is_relative_to(folder) for folder in left_out)
    )


def current_command() -> str:
    """The command line of this process, without the interpreter's path, after the variables that change its speed."""
    variables = [f"{name}={os.environ[name]}" for name in _VARIABLES_THAT_MATTER if name in os.environ]
    return shlex.join([*variables, "python", "-m", "minivllm", *sys.argv[1:]])


def _git(*arguments: str) -> str | None:
    """git's answer about the tree that holds the package; None where there is no git, or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} CPUs"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"


def _driver_version() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return UNKNOWN
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else UNKNOWN
