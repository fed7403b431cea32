"""Where the time of the engine's steps goes: running sums of seconds by phase.

Host time only. On a GPU, kernels run on after their launch, so `model` and `sample` are the time to
launch them, and `wait` is the time until their ids are there. With steps launched ahead, all other
phases belong to the next step while the device computes the one that is waited for: what is left of
`wait` is device time that nothing of the host overlaps. Knows nothing of what the phases do.

How long a step takes, as a line in what it does, refitted with each step.

seconds = c0 + c1 * decode rows + c2 * cached tokens that they read + c3 * prompt tokens: what the
roofline says of a batch, with the worker's own coefficients. Recursive least squares with
forgetting (Haykin, "Adaptive Filter Theory", ch. 10). Knows nothing of batches or clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

PHASES = (
    "schedule",  # choose who computes what, and take blocks
    "copy",  # build the batch's tensors, and put them on the device
    "model",  # the forward pass, the LM head included
    "sample",  # logits to ids; logprobs
    "wait",  # read what was sampled
    "deliver",  # record the results, and hand them to the streams
)


class StepTimes:
    """A stopwatch with laps: each lap adds the time since the one before it to a phase.

    So the phases of a step leave no gap, and their sum is the step. `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._since_s = clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def begin(self) -> None:
        """A step starts now; what went before belongs to no phase."""
        self._since_s = self._clock()

    def lap(self, phase: str) -> None:
        """What has gone by since the last lap was `phase`."""
        now_s = self._clock()
        self._seconds[phase] += now_s - self._since_s
        self._since_s = now_s

    def seconds(self) -> dict[str, float]:
        """Totals by phase."""
        return dict(self._seconds)


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
