"""How long it takes until a worker is ready, learnt from the starts that requests had to wait for.

A start begins with the first request that finds no worker, and ends with the first report of one:
it contains the decision, perhaps a new machine, the process, and the weights. The caller passes the
time.
"""

from __future__ import annotations

import math
from collections import deque

QUANTILE = 0.9  # of the remembered starts: one in ten takes longer than predicted
REMEMBERED = 20
OVERDUE = 0.25  # a start that takes longer than predicted lasts this share of its age longer
GIVEN_UP = 3.0  # in predicted start times without a request: that start has come to nothing


class StartTimes:
    """Of the workers of one gate."""

    def __init__(self, prior_s: float) -> None:
        """`prior_s`: seconds of a start, until one was seen."""
        self.prior_s = prior_s
        self._taken: deque[float] = deque(maxlen=REMEMBERED)  # seconds of each start
        self._began: float | None = None  # the start that is under way
        self._asked = 0.0  # when a request last found no worker

    @property
    def predicted_s(self) -> float:
        """Seconds that a start takes."""
        if not self._taken:
            return self.prior_s
        return sorted(self._taken)[math.ceil(QUANTILE * len(self._taken)) - 1]

    def asked(self, now: float) -> None:
        """A request waits, or was refused, because there is no worker."""
        if self._began is None or now - self._asked > GIVEN_UP * self.predicted_s:
            self._began = now
        self._asked = now

    def ready(self, now: float) -> None:
        """A worker takes requests."""
        if self._began is not None:
            self._taken.append(now - self._began)
            self._began = None

    def remaining_s(self, now: float) -> float:
        """Predicted seconds until a worker is ready, if requests want one from now on."""
        age_s = 0.0 if self._began is None else now - self._began
        return max(self.predicted_s - age_s, OVERDUE * age_s)
