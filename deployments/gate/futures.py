"""Demands of requests: each with a share of the dice that is its own, whoever else is there.

The futures of an answer are drawn once, from its id and the gate's seed (common random numbers): a
request that was turned away gets no luckier by asking again. Whoever came past the gate, or is let
in before anything is foretold, has the broad law of the beginning. Knows nothing of workers' books.
"""

from __future__ import annotations

import zlib

import numpy as np

from penstock.deployments.gate.types import Demand, GateRequest, Running
from penstock.deployments.prediction.distribution import (
    Floats,
    LengthDistribution,
    cumulative_hazard,
)
from penstock.deployments.prediction.hazards import length_prior

TABLE = 1024  # rows of dice: a million requests have different ones


class Demands:
    """Of one gate: `num_samples` futures for each."""

    def __init__(self, seed: int, num_samples: int) -> None:
        rng = np.random.default_rng(seed)
        # A generator for each request would cost 50 us.
        self._strata = rng.permuted(np.tile(np.arange(num_samples), (TABLE, 1)), axis=1)
        self._places = rng.random((TABLE, num_samples))
        self._broad = cumulative_hazard(length_prior())

    def of(self, request: GateRequest, law: LengthDistribution) -> Demand:
        """`law` is of how long its memory is held."""
        name = request.request_id
        return Demand(name, request.prompt_tokens, law, self.dice(name), request.ceiling)

    def unseen(self, request: GateRequest, max_tokens: int | None) -> Demand:
        """Nothing is foretold of it yet."""
        return self.of(request, LengthDistribution(self._broad, max_tokens))

    def adopted(self, running: Running) -> Demand:
        """It came past the gate: a report has told of it."""
        law, name = LengthDistribution(self._broad, running.max_tokens), running.request_id
        return Demand(name, running.prompt_tokens, law, self.dice(name))

    def dice(self, request_id: str) -> Floats:
        """[samples] stratified uniform numbers of a request's own: they do not hang on others."""
        drawn = zlib.crc32(request_id.encode())
        strata, places = self._strata[drawn % TABLE], self._places[drawn // TABLE % TABLE]
        u: Floats = (strata + places) / self._strata.shape[1]
        return u
