"""The shift of the counted hazards' logits by one request's features: online linear regression.

logit h_k(x) = b_k + g(x), a proportional-odds shift: g > 0 ends sooner. g is linear in hashed words
(2^18 weights, seldom seen ones move in large steps: AdaGrad) and in standardised numbers. It
starts at zero, so at first the histogram alone predicts. A head with a logit per bin overfits
online (7.36 nats against 6.71 of the plain histogram after 3,000 requests), one number gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.deployments.prediction.distribution import Floats
from penstock.deployments.prediction.features import NUM_FACTS, Features

HASH_BITS = 18
MAX_SHIFT = 3.0
# On the prompts of benchmarks/prediction/online.py, 0.15 to 0.3 are alike; 0.07 learns slower.
SPARSE_RATE, SPARSE_START = 0.15, 0.01
DENSE_RATE, DENSE_START = 0.02, 0.1
L2 = 1e-3
CLIP = 4.0  # standard deviations of a dense fact


@dataclass(frozen=True, slots=True)
class Words:
    """One request's features: [words] indices and values, [num_facts] facts."""

    indices: NDArray[np.int64]
    values: Floats  # +-1/sqrt(words), the sign hashed: collisions cancel on average
    facts: Floats  # as given, NaN where unknown


@dataclass(frozen=True, slots=True)
class Row:
    """The same, ready to be multiplied."""

    indices: NDArray[np.int64]
    values: Floats
    dense: Floats  # standardised, 0 where unknown
    facts: Floats


def words_in(hashes: NDArray[np.uint32], facts: Floats) -> Words:
    """`facts` [num_facts], NaN where unknown."""
    indices = (hashes & ((1 << HASH_BITS) - 1)).astype(np.int64)
    signs = np.where(hashes >> 31, 1.0, -1.0)
    return Words(indices, signs / np.sqrt(max(len(signs), 1)), facts)


@lru_cache(maxsize=1024)  # of some 2 kB: a request is learnt from several times
def words_of(features: Features) -> Words:
    """The features of one request as numbers, not to be changed.

    Raises ValueError for a text that `digest_text` cannot have made.
    """
    facts = features.facts()
    if len(facts) != NUM_FACTS:
        raise ValueError(f"features of a text have {NUM_FACTS} facts, not {len(facts)}")
    digest = features.text
    hashes = digest.hashes() if digest is not None else np.zeros(0, np.uint32)
    return words_in(hashes, facts)


class LengthResidual:
    """The shift g(x). All arrays are the state; `rows` does not change it, `learn` does."""

    def __init__(self, num_facts: int):
        size = 1 << HASH_BITS
        self.sparse = np.zeros(size)
        self.sparse_squares = np.zeros(size)  # of gradients, above SPARSE_START
        self.dense = np.zeros(num_facts)
        self.dense_squares = np.full(num_facts, DENSE_START)
        self.counts = np.zeros(num_facts)
        self.means = np.zeros(num_facts)
        self.spreads = np.zeros(num_facts)  # sums of squared deviations (Welford)

    def rows(self, requests: Sequence[Words]) -> list[Row]:
        """Features of each request, standardised by what was seen so far."""
        facts = np.array([each.facts for each in requests])
        deviation = np.sqrt(self.spreads / np.maximum(self.counts, 1.0) + 1e-3)
        dense = np.minimum(np.maximum((facts - self.means) / deviation, -CLIP), CLIP)
        dense[np.isnan(dense) | (self.counts < 2)] = 0.0
        return [
            Row(each.indices, each.values, own, each.facts) for each, own in zip(requests, dense)
        ]

    def shift(self, row: Row) -> float:
        g = self.sparse[row.indices] @ row.values + self.dense @ row.dense
        return min(max(float(g), -MAX_SHIFT), MAX_SHIFT)

    def learn(self, row: Row, gradient: float, *, is_new: bool = True) -> None:
        """One AdaGrad step. `gradient`: of the loss by the shift, d loss / d g.

        `is_new`: also update the facts' means; false where one answer is learnt from several times.
        """
        slope = gradient * row.values + L2 * self.sparse[row.indices]
        # Two words in one slot: add.at counts both, where plain indexing would keep the last.
        np.add.at(self.sparse_squares, row.indices, slope**2)
        size = np.sqrt(self.sparse_squares[row.indices] + SPARSE_START)
        np.subtract.at(self.sparse, row.indices, SPARSE_RATE * slope / size)
        slope = gradient * row.dense + L2 * self.dense
        self.dense_squares += slope**2
        self.dense -= DENSE_RATE * slope / np.sqrt(self.dense_squares)
        if is_new:
            self._standardise(row.facts)

    def _standardise(self, facts: Floats) -> None:
        known = ~np.isnan(facts)
        self.counts += known
        delta = np.where(known, facts - self.means, 0.0)
        self.means += delta / np.maximum(self.counts, 1.0)
        self.spreads += delta * np.where(known, facts - self.means, 0.0)
