"""Draws each request's possible answer lengths from its own random stream.

The stream depends on the request's id and the gate's seed alone (common random numbers), so that
asking again gives the same futures. A request that bypassed the gate, or was admitted without a
prediction, has the predictor's prior distribution.
"""

from __future__ import annotations

import zlib
from functools import lru_cache, partial

import numpy as np

from penstock.deployments.gate.types import Demand, GateRequest, Running
from penstock.deployments.prediction.distribution import (
    Floats,
    LengthDistribution,
    cumulative_hazard,
)
from penstock.deployments.prediction.hazards import length_prior

TABLE = 1024  # rows of strata and of offsets: a million different streams


class FutureSampler:
    """Makes the demands of one gate's requests, with `num_samples` futures each."""

    def __init__(self, seed: int, num_samples: int) -> None:
        rng = np.random.default_rng(seed)
        # A generator for each request would cost 50 us.
        self._strata = rng.permuted(np.tile(np.arange(num_samples), (TABLE, 1)), axis=1)
        self._offsets = rng.random((TABLE, num_samples))
        prior = cumulative_hazard(length_prior())
        # One of each limit: its mean is computed once.
        self._prior = lru_cache(TABLE)(partial(LengthDistribution, prior))

    def demand(self, request: GateRequest, length: LengthDistribution) -> Demand:
        """`length`: how long its memory is held, in tokens."""
        name = request.request_id
        return Demand(
            name,
            request.prompt_tokens,
            length,
            self.uniforms(name),
            request.ceiling,
            request.tokenizer,
            request.generated,
        )

    def provisional(self, request: GateRequest, max_tokens: int | None) -> Demand:
        """Of a request without a prediction: the prior distribution."""
        return self.demand(request, self._prior(max_tokens))

    def from_report(self, running: Running) -> Demand:
        """Of a request that bypassed the gate, known from a worker's report."""
        length, name = self._prior(running.max_tokens), running.request_id
        return Demand(name, running.prompt_tokens, length, self.uniforms(name))

    def uniforms(self, request_id: str) -> Floats:
        """[samples] stratified uniform numbers in [0, 1), from the request's id alone."""
        drawn = zlib.crc32(request_id.encode())
        strata, offsets = self._strata[drawn % TABLE], self._offsets[drawn // TABLE % TABLE]
        uniforms: Floats = (strata + offsets) / self._strata.shape[1]
        return uniforms
