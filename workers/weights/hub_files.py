"""Fetches files of a model from the hub into its cache on this machine.

First what is small (configuration and tokenizer), and the caller may look at it; then the weights,
by one process of the machine, with the space for them looked at before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from penstock.workers.errors import LoadError
from penstock.workers.gguf.header import SUFFIX, read_header
from penstock.workers.hub_name import HubName
from penstock.workers.model_config import read_limits
from penstock.workers.progress import DOWNLOADING, Progress, Report, size
from penstock.workers.weights.hub_errors import HubUnreachable, explained
from penstock.workers.weights.hub_gguf import chosen_gguf, header_copy
from penstock.workers.weights.hub_locks import alone, remove_leftovers

# What an ingress needs: all that the digest of a tokenizer covers, templates, and how it scores.
TEXT_FILES = [
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.jinja"),
    *("modules.json", "*_LogitScore/config.json"),
]
MODEL_FILES = [*TEXT_FILES, "*.safetensors", "*.json"]
# Second copies of the weights, and exports for other programs.
UNWANTED_FILES = ["consolidated*", "*/*.safetensors", "original/*", "onnx/*"]
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SPARE_BYTES = 64 << 20  # that a download leaves free


def cache_folder(download_dir: str | None) -> str:
    """The folder of the hub's cache: `download_dir`, else where HF_HOME or HF_HUB_CACHE say."""
    from huggingface_hub import constants

    return str(Path(download_dir or constants.HF_HUB_CACHE).expanduser().resolve())


def text_files(name: HubName, download_dir: str | None) -> Path:
    """The folder with configuration and tokenizer of a model, fetched if they are not here; or a
    GGUF file that has these, and perhaps no weights.

    Raises LoadError, and ConfigError for a file that Penstock cannot read.
    """
    cache = cache_folder(download_dir)
    with explained(name, cache):
        folder = _snapshot(name, cache, TEXT_FILES)
        if name.file is None:
            _check_is_checkpoint(name, folder, cache)
            return folder
        sizes = _listed(name, folder, cache)
        file = chosen_gguf(name, sizes or _local_files(folder))
        if (folder / file).is_file():
            return folder / file
        if sizes is None:
            raise HubUnreachable(f"model {name}: the hub cannot be reached for {file}")
        return header_copy(name.repo, folder.name, file, sizes[file], Path(cache))


def model_files(name: HubName, download_dir: str | None, report: Report) -> Path:
    """The folder of a model with all its files, or its GGUF file, fetched if they are not here.

    Its configuration is looked at before any weight is fetched: raises ConfigError for a model that
    Penstock does not support, and LoadError.
    """
    cache = cache_folder(download_dir)
    text = text_files(name, download_dir)
    with explained(name, cache):
        read_limits(text)
        if name.file is not None:
            return _gguf_file(name, cache, report)
        sizes = _listed(name, text, cache)
        if sizes is not None and not any(path.endswith(".safetensors") for path in sizes):
            raise _no_safetensors(name, sizes)
        _fetch(
            name,
            text,
            cache,
            lambda: _missing(text, _wanted(sizes)),
            lambda bar: _snapshot(name, cache, MODEL_FILES, text.name, bar),
            report,
        )
        return text


def download_size(name: HubName, text: Path, download_dir: str | None) -> int:
    """Bytes of a model that are not on this machine yet; 0 where the hub is out of reach.
    `text`: from `text_files`."""
    cache = cache_folder(download_dir)
    if name.file is not None:
        return 0 if _is_whole(text, cache) else text.stat().st_size
    return sum(_missing(text, _wanted(_listed(name, text, cache))).values())


def check_space(name: HubName, num_bytes: int, folder: str) -> None:
    """Raise LoadError unless `folder`'s disk has room for a download of that size."""
    there = Path(folder)
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if num_bytes + SPARE_BYTES <= free or not num_bytes:
        return
    left = sum(each.stat().st_size for each in Path(folder).glob("*/blobs/*.incomplete"))
    hint = f" (unfinished downloads take {size(left)}: */blobs/*.incomplete)" if left else ""
    raise LoadError(
        f"model {name}: {size(num_bytes)} are to be downloaded to {folder}, which has "
        f"{size(free)} free: free some space{hint}, or name a folder on another disk with "
        "--download-dir (download_dir)"
    )


def _gguf_file(name: HubName, cache: str, report: Report) -> Path:
    from huggingface_hub import hf_hub_download

    folder = _snapshot(name, cache, TEXT_FILES)
    sizes = _listed(name, folder, cache)
    file = chosen_gguf(name, sizes or _local_files(folder))
    _fetch(
        name,
        folder,
        cache,
        lambda: _missing(folder, {} if sizes is None else {file: sizes[file]}),
        lambda bar: hf_hub_download(
            name.repo, file, revision=folder.name, cache_dir=cache, tqdm_class=bar
        ),
        report,
    )
    read_header(folder / file)
    return folder / file


def _fetch(
    name: HubName,
    folder: Path,
    cache: str,
    missing: Callable[[], dict[str, int]],
    fetch: Callable[[type[tqdm[Any]]], object],
    report: Report,
) -> None:
    """Fetch what is `missing`, as the only process of this machine that does so."""
    if not missing():
        return
    repository = folder.parents[1].name
    with alone(Path(cache), repository, report):
        sizes = missing()  # another process may have fetched it meanwhile
        if sizes:
            remove_leftovers(Path(cache), repository)
            total = sum(sizes.values())
            check_space(name, total, cache)
            report(Progress(DOWNLOADING, 0, total))
            fetch(_counting(report, total))
            report(Progress(DOWNLOADING, total, total))


def _snapshot(
    name: HubName,
    cache: str,
    patterns: list[str],
    commit: str | None = None,
    bar: type[tqdm[Any]] | None = None,
) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name.repo,
            revision=commit or name.revision,
            cache_dir=cache,
            allow_patterns=patterns,
            ignore_patterns=UNWANTED_FILES,
            tqdm_class=bar or _counting(lambda _: None, 0),
        )
    )


def _listed(name: HubName, folder: Path, cache: str) -> dict[str, int] | None:
    """Size of each file of the repository, by path; None: the hub has not been reached."""
    from huggingface_hub import errors, get_cached_repo_tree

    try:
        tree = get_cached_repo_tree(name.repo, revision=folder.name, cache_dir=cache)
    except errors.CachedRepoTreeNotFoundError:
        return None
    return {each.path: each.size for each in tree}


def _wanted(sizes: Mapping[str, int] | None) -> dict[str, int]:
    from huggingface_hub.utils import filter_repo_objects

    wanted = filter_repo_objects(
        sizes or {}, allow_patterns=MODEL_FILES, ignore_patterns=UNWANTED_FILES
    )
    return {path: (sizes or {})[path] for path in wanted}


def _missing(folder: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    return {path: each for path, each in sizes.items() if not (folder / path).exists()}


def _local_files(folder: Path) -> dict[str, int]:
    return {
        each.relative_to(folder).as_posix(): each.stat().st_size
        for each in folder.rglob("*")
        if each.is_file()
    }


def _is_whole(file: Path, cache: str) -> bool:
    """Whether a GGUF file is the one of the cache, and no copy of its header."""
    return file.parent.is_relative_to(cache) and "snapshots" in file.relative_to(cache).parts[:2]


def _check_is_checkpoint(name: HubName, folder: Path, cache: str) -> None:
    """Raise LoadError, saying what the repository is, unless it has a config.json."""
    if (folder / "config.json").is_file():
        return
    sizes = _listed(name, folder, cache) or {}
    files = sorted(path for path in sizes if path.endswith(SUFFIX))
    if files:
        raise LoadError(
            f"model {name}: the repository has {len(files)} GGUF files; name one of them, as "
            f"{name}:{files[0]} ({', '.join(map(_short, files[:12]))})"
        )
    if "adapter_config.json" in sizes:
        raise LoadError(
            f"model {name} is a LoRA adapter: serve its base model with --enable-lora "
            "--lora-modules NAME=FOLDER (docs/guide/adapters.md)"
        )
    raise LoadError(f"model {name}: the repository has no config.json, so it is no language model")


def _no_safetensors(name: HubName, sizes: Mapping[str, int]) -> LoadError:
    pickled = [path for path in sizes if path.endswith(PICKLES)]
    if pickled:
        return LoadError(
            f"model {name} has only pickled weights ({pickled[0]}), which can run code when they "
            "are read and are never fetched; give a repository or revision with safetensors (often "
            f"{name} --revision refs/pr/1), or convert them elsewhere"
        )
    return LoadError(f"model {name}: the repository has no weights (safetensors)")


def _short(path: str) -> str:
    return PurePosixPath(path).name


def _counting(report: Report, total: int) -> type[tqdm[Any]]:
    """A class of bars that shows nothing, and reports the bytes that it is told.

    The hub's client makes several bars, whose bytes may be counted twice: the most advanced counts.
    """
    done: dict[int, float] = {}

    class Counting(tqdm):  # no generic class when it runs
        def __init__(self, *args: Any, **kwargs: Any):
            self._is_of_bytes = kwargs.get("unit") == "B"
            done[id(self)] = 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._is_of_bytes:
                done[id(self)] += n or 0
                report(Progress(DOWNLOADING, min(total, int(max(done.values()))), total))
            return None

    return Counting
