"""The vector of a reranker: its product with the last hidden state is the score of a pair."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.workers.config import ModelOptions
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.gguf.header import find_gguf
from penstock.workers.model_config import ModelConfig
from penstock.workers.pooling.pooling import LAST, Pooling, read_pooling
from penstock.workers.pooling.scoring import Scoring, read_scoring
from penstock.workers.weights.checkpoint import SCORE_HEAD, StoredTensor, open_checkpoint
from penstock.workers.weights.gguf import open_gguf


def configured_pooling(folder: Path, options: ModelOptions) -> Pooling:
    """What becomes of the hidden states of the model in `folder`, with the vector that scores them
    if it is a reranker. Raises ConfigError or LoadError."""
    scoring = read_scoring(folder, options)
    if scoring is None:
        return read_pooling(folder, options.pooling)
    return Pooling(LAST, score_vector=_vector(folder, scoring))


def _vector(folder: Path, scoring: Scoring) -> NDArray[np.float64]:
    """[hidden]. Raises ConfigError or LoadError."""
    gguf = find_gguf(folder)
    tensors = open_checkpoint(folder) if gguf is None else open_gguf(gguf)
    if scoring.positive is None:
        return _row(_stored(tensors, SCORE_HEAD), 0)
    config = ModelConfig.from_pretrained(folder)
    if config.logits_softcap:
        raise ConfigError(
            "scores by two logits are not computed for a model that caps its logits: serve it with "
            "--pooling last for embeddings"
        )
    head = "lm_head.weight"
    if head not in tensors and config.tie_word_embeddings:
        head = "model.embed_tokens.weight"
    rows = _stored(tensors, head)
    vector = _row(rows, scoring.positive)
    if scoring.negative is not None:
        vector = vector - _row(rows, scoring.negative)
    return vector / config.logits_divisor


def _stored(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    if name not in tensors:
        raise LoadError(
            f"the checkpoint has no tensor {name}, which scores are computed with: rerankers are "
            "served with a head that is not quantised"
        )
    return tensors[name]


def _row(stored: StoredTensor, index: int) -> NDArray[np.float64]:
    if not 0 <= index < stored.shape[0]:
        raise ConfigError(
            f"the token {index} cannot be scored by: {stored.name} has {stored.shape[0]} rows"
        )
    row: NDArray[np.float64] = stored.part(index, index + 1).read()[0].double().numpy()
    return row
