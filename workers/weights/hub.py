"""Finds a model's files: shipped with Penstock, in a folder, or on the Hugging Face hub.

Loads no torch: the ingress, which needs only the tokenizer, imports it too.
"""

from __future__ import annotations

from pathlib import Path

from penstock.workers.errors import LoadError

BUILTIN = {"builtin": "dense", "builtin-moe": "moe"}
WANTED_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "*.jinja"]
# Second copies of the weights, and exports for other programs.
UNWANTED_FILES = ["consolidated*", "*/*.safetensors", "original/*", "onnx/*"]


def resolve_model(name: str) -> Path:
    """The folder of `name`: 'builtin', 'builtin-moe', a folder, or a hub id (fetched if needed).

    Raises LoadError with the remedy if there is no such model, or the hub cannot be reached.
    """
    if name in BUILTIN:
        folder = Path(__file__).parent / "builtin" / BUILTIN[name]
        if not (folder / "config.json").is_file():
            raise LoadError(f"this installation lacks the model {name!r}; reinstall Penstock")
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise LoadError(f"{name!r} is no folder; give a checkpoint's folder, or a hub id")
    # Slow to import, and not needed for what is already on this machine.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES)
        )
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise LoadError(
            f"model {name!r} is not a folder here and could not be fetched from the hub "
            f"({type(error).__name__}): check the spelling and the network, log in with `hf auth "
            "login` if access to it is restricted, or download it elsewhere and give its folder"
        ) from error
