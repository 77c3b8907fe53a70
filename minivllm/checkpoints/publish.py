"""Directories that exist only when they are whole.

target                 absent, or complete .target.tmp-<pid>      being built; removed when building
fails, or by the next build if the process was killed .target.lock           held while building, so that
a second process waits and then finds the result
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Returns `target`, which `build` has filled now or earlier.

    `build` gets an empty directory beside the target. When it returns, its files are flushed to disk and the
    directory is renamed to `target` in one step; when it raises, nothing is left.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if target.is_dir():
            return target
        # Whoever made these was killed: building needs the lock, and we hold it.
        for stale in target.parent.glob(f".{target.name}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = target.parent / f".{target.name}.tmp-{os.getpid()}"
        partial.mkdir()
        try:
            build(partial)
            for file in partial.rglob("*"):
                _flush(file)
            _flush(partial)
            os.replace(partial, target)
            _flush(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _flush(path: Path) -> None:
    """Waits until a file or a directory listing is on disk; a rename may get there before its files."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
