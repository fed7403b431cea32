"""How the hidden states of a prompt become one embedding: as sentence-transformers' files say.

A checkpoint made for sentence-transformers lists its modules in modules.json, and says in
1_Pooling/config.json which hidden states are taken; a GGUF file says it in its metadata.
engine/load.py reads that for a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.workers.errors import ConfigError
from penstock.workers.gguf.header import find_gguf, read_header
from penstock.workers.model_config import read_json, read_json_list

LAST, MEAN = "last", "mean"
_KINDS = {"pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN}
_GGUF_KINDS = {None: LAST, -1: LAST, 0: LAST, 1: MEAN, 2: "cls", 3: LAST, 4: "rank"}
_PLAIN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """`kind`: LAST, the hidden state of the last token, or MEAN, the mean over all tokens.

    `refusal`: why prompts are not embedded with this model; empty: they are. `score_vector`
    [hidden]: of a reranker, whose product with that hidden state takes its place (scoring.py).
    """

    kind: str = LAST
    refusal: str = ""
    score_vector: NDArray[np.float64] | None = None


def pooling_of(asked: str) -> Pooling:
    """As the setting `asked` says, without a look at files: with "auto", LAST."""
    return Pooling(MEAN if asked == MEAN else LAST)


def read_pooling(folder: Path, asked: str) -> Pooling:
    """The pooling of the model in `folder`, or of a GGUF file: `asked`, or with "auto" as its files
    say, and LAST where it has none.

    A module that Penstock does not have makes other embeddings than the model's own, so these are
    refused. Raises ConfigError for damaged files.
    """
    if asked != "auto":
        return pooling_of(asked)
    if (gguf := find_gguf(folder)) is not None:
        return _of_gguf(read_header(gguf).metadata)
    modules = read_modules(folder)
    unknown = [kind for kind, _ in modules if kind not in _PLAIN_MODULES]
    if unknown:
        return Pooling(refusal=_refusal(f"its modules.json has a module {unknown[0]}"))
    stated = [folder / path / "config.json" for kind, path in modules if kind == "Pooling"]
    return _stated(read_json(stated[0])) if stated and stated[0].is_file() else Pooling()


def _of_gguf(metadata: Mapping[str, Any]) -> Pooling:
    """As llama.cpp writes it; most files do not say."""
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    name = _GGUF_KINDS.get(number, str(number))
    if name in (LAST, MEAN):
        return Pooling(name)
    return Pooling(refusal=_refusal(f"its pooling_type is {name}"))


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Class and folder of each module of sentence-transformers; none if `folder` has no list of
    them. Raises ConfigError."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    listed = read_json_list(path)
    if not all(
        isinstance(each, dict)
        and isinstance(each.get("type"), str)
        and isinstance(each.get("path"), str)
        for each in listed
    ):
        raise ConfigError(f"{path} should be a list of modules, each with a type and a path")
    return [(each["type"].rpartition(".")[2], each["path"]) for each in listed]


def _stated(stated: dict[str, Any]) -> Pooling:
    modes = [name for name, is_on in stated.items() if is_on and name.startswith("pooling_mode_")]
    if len(modes) == 1 and modes[0] in _KINDS:
        return Pooling(_KINDS[modes[0]])
    return Pooling(refusal=_refusal(f"its pooling is {' + '.join(modes) or 'not stated'}"))


def _refusal(why: str) -> str:
    return (
        f"no embeddings with this model: {why}, which this server does not have; start it with "
        "--pooling last or --pooling mean to use that instead"
    )
