"""Vectors as a client gets them: shortened, of length 1, compared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.workers.request import RequestError

Vectors = NDArray[np.float32]  # [vectors, dimensions]


def finished(raw: Vectors, dimensions: int | None, *, normalize: bool) -> Vectors:
    """`raw` [N, hidden] cut to its first `dimensions`; None: all. With `normalize` each then has
    length 1, but one of zeros stays as it is. Raises RequestError for more than there are."""
    if dimensions is not None and dimensions > raw.shape[1]:
        raise RequestError(
            f"dimensions is {dimensions}, and embeddings of this model have {raw.shape[1]}",
            param="dimensions",
        )
    cut = raw[:, :dimensions].astype(np.float64)
    if normalize:
        lengths = np.linalg.norm(cut, axis=1, keepdims=True)
        cut /= np.where(lengths > 0, lengths, 1.0)
    return cut.astype(np.float32)


def pair_scores(raw: Vectors, *, as_logits: bool) -> list[float]:
    """The scores of a reranker, from 0 to 1: the probability of its word for yes rather than that
    for no, 1 / (1 + exp(-x)). `raw` [pairs, 1]: x, the differences of their logits, which
    `as_logits` returns."""
    logits = raw[:, 0].astype(np.float64)
    return [float(each) for each in (logits if as_logits else 0.5 + 0.5 * np.tanh(logits / 2))]


def cosines(one: Vectors, other: Vectors) -> list[float]:
    """The cosine of each pair of rows, of length 1; `one` may have a single row for all."""
    products = (one.astype(np.float64) * other).sum(axis=1)
    return [float(each) for each in np.clip(products, -1.0, 1.0)]
