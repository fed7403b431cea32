"""How a reranker scores a prompt that holds a query and a document: one number, by a vector.

Rerankers of two kinds are decoders. One answers with a word for yes or for no, and its score is the
logit of the one less that of the other at the end of the prompt (Qwen3-Reranker, arXiv 2506.05176,
section 2; sentence-transformers' LogitScore). The other has a head of a single output in the place
of the LM head (transformers' ...ForSequenceClassification). Both are the product of the last hidden
state after the final norm with a vector: the difference of two rows of the LM head, or the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.workers.config import ModelOptions
from penstock.workers.errors import ConfigError
from penstock.workers.families.table import CLASSIFIER, FAMILIES, family_of
from penstock.workers.gguf.config import stated_by
from penstock.workers.gguf.header import find_gguf, read_header
from penstock.workers.model_config import read_json
from penstock.workers.pooling.pooling import read_modules
from penstock.workers.text.pair_template import PairTemplate
from penstock.workers.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Scoring:
    """`positive` and `negative`: the tokens whose logits are compared; `negative` None: the logit
    of the other one alone counts. `positive` None: the checkpoint has a head of one output."""

    positive: int | None = None
    negative: int | None = None


def read_scoring(folder: Path, options: ModelOptions) -> Scoring | None:
    """How the model in `folder` scores: as `options` or its own files say; None: it does not.

    Reads no weights. Raises ConfigError.
    """
    if options.score_tokens is not None:
        return _by_tokens(folder, options.score_tokens)
    if options.pooling != "auto" or find_gguf(folder) is not None:
        return None
    for kind, path in read_modules(folder):
        if kind == "LogitScore":
            stated = read_json(folder / path / "config.json")
            return Scoring(_token_in(stated, "true_token_id"), stated.get("false_token_id"))
    names = read_json(folder / "config.json").get("architectures") or [""]
    return Scoring() if str(names[0]).endswith(CLASSIFIER) else None


def pair_template(folder: Path, options: ModelOptions, tokenizer: Tokenizer) -> PairTemplate | None:
    """How the model in `folder` reads pairs of texts; None: it does not score. Raises ConfigError,
    also where nothing says how a pair is written."""
    if read_scoring(folder, options) is None:
        return None
    gguf = find_gguf(folder)
    if gguf is None:
        family = family_of(read_json(folder / "config.json"))
    else:
        family = FAMILIES[stated_by(read_header(gguf))[0]]
    return PairTemplate(tokenizer, family.model_type)


def _by_tokens(folder: Path, texts: str) -> Scoring:
    tokenizer = Tokenizer.load(folder)
    ids = []
    for text in texts.split(","):
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1:
            raise ConfigError(
                f"score_tokens: {text!r} is {len(found)} tokens of this model, and must be one"
            )
        ids += found
    return Scoring(*ids)


def _token_in(stated: Mapping[str, Any], name: str) -> int:
    value = stated.get(name)
    if not isinstance(value, int):
        raise ConfigError(f"the model's LogitScore/config.json has {name} {value!r}, not a token")
    return value
