"""A digest of a model's tokenizer and one of its weights, to compare models across machines.

Ingresses and workers load the files of a model on their own, perhaps on different nodes, and during
an update different models. An operator may name the digest that they must have. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.workers.config import ModelOptions
from penstock.workers.errors import LoadError
from penstock.workers.gguf.header import find_gguf, read_header
from penstock.workers.progress import Report
from penstock.workers.weights.hub import is_hub_id, resolve_model

TOKENIZER_FILES = (
    *("tokenizer.json", "*.model", "vocab.*", "merges.txt", "added_tokens.json", "*.gguf"),
)
# Its configuration adds tokens, too. Chat templates are not of it: an ingress alone renders them.
TOKENIZER_CONFIG, TEMPLATE_FIELD = "tokenizer_config.json", "chat_template"
WEIGHT_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.gguf")
# Fields of config.json on which the meaning of token ids depends.
TOKEN_FIELDS = ("vocab_size", "bos_token_id", "eos_token_id", "model_type")
WHOLE_BYTES = 32 << 20  # of a larger file, only the beginning and SAMPLES pieces are read
HEAD_BYTES = 1 << 20  # the header, with names and shapes
GGUF_TOKENS = "tokenizer.ggml."  # metadata of a GGUF file on which token ids depend
SAMPLES, SAMPLE_BYTES = 32, 64 << 10


def verified_folder(options: ModelOptions, report: Report | None = None) -> Path:
    """The folder of the configured model, or its GGUF file, fetched if needed.

    `report`: as for `resolve_model`. Raises LoadError and ConfigError as it does, and LoadError if
    the files are not those of `model_digest`.
    """
    folder = resolve_model(options.model, options.revision, options.download_dir, report=report)
    if options.model_digest is not None and (found := _digest(folder)) != options.model_digest:
        raise _other_files(folder, found, options.model_digest)
    return folder


def verified_text(options: ModelOptions) -> tuple[Path, str]:
    """The folder with the configured model's configuration and tokenizer, and the digest of the
    tokenizer; no weights are fetched.

    Raises as `verified_folder` does. Of a model of the hub only the first part of `model_digest` is
    compared: that of the weights is the workers' business.
    """
    folder = resolve_model(options.model, options.revision, options.download_dir, text_only=True)
    found, pinned = _digest(folder), options.model_digest
    if pinned is not None and is_hub_id(options.model):
        found, pinned = found.partition("-")[0], pinned.partition("-")[0]
    if pinned is not None and found != pinned:
        raise _other_files(folder, found, pinned)
    return folder, found.partition("-")[0]


def _digest(folder: Path) -> str:
    try:
        return model_digest(folder)
    except (OSError, ValueError) as error:
        raise LoadError(f"model_digest: {folder} cannot be read: {error}") from error


def _other_files(folder: Path, found: str, pinned: str) -> LoadError:
    return LoadError(
        f"model_digest: the files in {folder} have the digest {found}, and {pinned} is "
        "configured: restore the files that were meant, or set model_digest to the new one if "
        "these are"
    )


def model_digest(folder: Path) -> str:
    """`TOKENIZER-WEIGHTS`, two digests of the model in `folder`, or of a GGUF file, whatever the
    folder's name.

    Takes milliseconds to a second: large files are sampled. Other weights have another digest; one
    damaged byte need not. Raises OSError or ValueError where files cannot be read.
    """
    tokenizer, weights = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    if (gguf := find_gguf(folder)) is not None:
        metadata = read_header(gguf).metadata
        for key in sorted(each for each in metadata if each.startswith(GGUF_TOKENS)):
            tokenizer.update(f"{key}:{metadata[key]!r};".encode())
        _add_file(weights, gguf)
        return f"{tokenizer.hexdigest()}-{weights.hexdigest()}"
    facts = _object_in(folder / "config.json")
    tokenizer.update(json.dumps([facts.get(name) for name in TOKEN_FIELDS]).encode())
    extra = _object_in(folder / TOKENIZER_CONFIG)
    extra.pop(TEMPLATE_FIELD, None)
    tokenizer.update(json.dumps(extra, sort_keys=True).encode())
    for hashed, patterns in ((tokenizer, TOKENIZER_FILES), (weights, WEIGHT_FILES)):
        for path in _files(folder, patterns):
            _add_file(hashed, path)
    return f"{tokenizer.hexdigest()}-{weights.hexdigest()}"


def local_digest(folder: Path) -> str:
    """A digest of the configuration and the weights in `folder`, or of a GGUF file, on this
    machine: it also depends on when the files were written, so that any change counts.

    Raises OSError.
    """
    hashed = hashlib.blake2b(digest_size=16)
    gguf = find_gguf(folder)
    for path in _files(folder, WEIGHT_FILES) if gguf is None else [gguf]:
        hashed.update(f"{path.stat().st_mtime_ns}:".encode())
        _add_file(hashed, path)
    return hashed.hexdigest()


def _add_file(hashed: hashlib.blake2b, path: Path) -> None:
    hashed.update(f"{path.name}:{path.stat().st_size};".encode())
    for piece in _pieces(path):
        hashed.update(piece)


def _object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty without one. Raises ValueError for anything else."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} should hold a JSON object")
    return found


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def _pieces(path: Path) -> Iterable[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            yield file.read()
            return
        yield file.read(HEAD_BYTES)
        for n in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * n // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
