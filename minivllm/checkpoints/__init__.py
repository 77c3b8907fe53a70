"""Where models come from: a local directory, the package itself, a name that is fetched once, or the Hugging Face Hub.

    resolve(name) -> a local directory in Hugging Face format (config.json, *.safetensors, tokenizer.json)

    name is a directory              the directory itself
    name is in the catalogue         a directory of this package (the tiny models, trained by `train.py`), or
                                     fetched and converted on first use, then served from the user's cache
    name looks like "org/name"       downloaded by huggingface_hub into its own cache

Invariant: a directory in our cache is whole. It is built under another name and renamed at the end, so
neither a power cut nor a second process can leave half a model under a model's name.
"""

from minivllm.checkpoints.catalogue import ModelInfo, cache_dir, fetch, list_models, resolve
from minivllm.checkpoints.errors import CheckpointError

__all__ = ["CheckpointError", "ModelInfo", "cache_dir", "fetch", "list_models", "resolve"]
