"""A digest of a model's tokenizer and one of its weights, to compare models across machines.

Ingresses and workers load the files of a model on their own, perhaps on different nodes, and during
an update different models. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

TOKENIZER_FILES = (  # not its configuration: chat templates may differ
    *("tokenizer.json", "*.model", "vocab.*", "merges.txt", "added_tokens.json", "*.gguf"),
)
WEIGHT_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.gguf")
# Fields of config.json on which the meaning of token ids depends.
TOKEN_FIELDS = ("vocab_size", "bos_token_id", "eos_token_id", "model_type")
WHOLE_BYTES = 32 << 20  # of a larger file, only the beginning and SAMPLES pieces are read
HEAD_BYTES = 1 << 20  # the header, with names and shapes
SAMPLES, SAMPLE_BYTES = 32, 64 << 10


def model_digest(folder: Path) -> str:
    """`TOKENIZER-WEIGHTS`, two digests of the model in `folder`, whatever the folder's name.

    Takes milliseconds to a second: large files are sampled. Other weights have another digest; one
    damaged byte need not. Raises OSError or ValueError where files cannot be read.
    """
    tokenizer, weights = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    config = folder / "config.json"
    facts = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    tokenizer.update(json.dumps([facts.get(name) for name in TOKEN_FIELDS]).encode())
    for hashed, patterns in ((tokenizer, TOKENIZER_FILES), (weights, WEIGHT_FILES)):
        for path in _files(folder, patterns):
            hashed.update(f"{path.name}:{path.stat().st_size};".encode())
            for piece in _pieces(path):
                hashed.update(piece)
    return f"{tokenizer.hexdigest()}-{weights.hexdigest()}"


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
