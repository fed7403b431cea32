"""How long a step takes, as a line in what it does, refitted with each step.

seconds = c0 + c1 * decode rows + c2 * cached tokens that they read + c3 * prompt tokens: what the
roofline says of a batch, with the worker's own coefficients. Recursive least squares with
forgetting (Haykin, "Adaptive Filter Theory", ch. 10). Knows nothing of batches or clocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TERMS = ("step", "row", "cached_token", "prompt_token")
FORGET = 0.999  # a step weighs half as much after 700 others
START = 1e6  # variance of what is not known yet, in the scaled units
MOST = 1e6  # and at most: what never varies must not become arbitrary
OUTLIER = 8.0  # steps that took so many times as long as foretold teach little


class StepModel:
    """Coefficients of TERMS, in seconds each."""

    # What a usual step has of each, so that all columns are about as large.
    SCALE = np.array([1.0, 16.0, 4096.0, 256.0])

    def __init__(self) -> None:
        self.num_steps = 0
        self._weights = np.zeros(4)
        self._spread = np.eye(4) * START

    def observe(self, num_rows: int, num_cached: int, num_prompt: int, seconds: float) -> None:
        """A step took so long. One that was held up from outside is cut to what is plausible."""
        x = self._scaled(num_rows, num_cached, num_prompt)
        foretold = float(x @ self._weights)
        if self.num_steps >= 50 and foretold > 0:
            seconds = min(seconds, OUTLIER * foretold)
        spread_x = self._spread @ x
        gain = spread_x / (FORGET + x @ spread_x)
        self._weights += gain * (seconds - foretold)
        spread = (self._spread - np.outer(gain, spread_x)) / FORGET
        most = float(np.trace(spread)) / 4
        self._spread = spread * min(1.0, MOST / most)
        self.num_steps += 1

    def seconds(self, num_rows: int, num_cached: int, num_prompt: int) -> float:
        """What such a step should take; never below 0."""
        return max(float(self._scaled(num_rows, num_cached, num_prompt) @ self._weights), 0.0)

    def coefficients(self) -> dict[str, float]:
        """Seconds by term."""
        return dict(zip(TERMS, (self._weights / StepModel.SCALE).tolist(), strict=True))

    def _scaled(self, num_rows: int, num_cached: int, num_prompt: int) -> Floats:
        scaled: Floats = np.array([1, num_rows, num_cached, num_prompt]) / StepModel.SCALE
        return scaled
