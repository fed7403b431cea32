"""How long the engine's steps take: seconds by phase, and a model of a step's time.

Host time only. On a GPU, kernels run on after their launch, so `model` and `sample` are the time to
launch them, and `wait` is the time until the sampled ids are there. With async scheduling, all
other phases belong to the next step while the device computes the one that is waited for: what is
left of `wait` is device time that the host does not overlap.

The model: seconds = c0 + c1 * decode rows + c2 * cached tokens that they read + c3 * prompt tokens.
That is the roofline of a batch with the worker's own coefficients, refitted with each step by
recursive least squares with forgetting (Haykin, "Adaptive Filter Theory", ch. 10).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Clock = Callable[[], float]  # seconds
Floats = NDArray[np.float64]

PHASES = (
    "schedule",  # choose which sequences compute which tokens, and take blocks
    "copy",  # build the batch's tensors, and put them on the device
    "model",  # the forward pass, the LM head included
    "sample",  # logits to ids; logprobs
    "wait",  # read what was sampled
    "deliver",  # record the results, and hand them to the streams
)


class StepTimes:
    """A stopwatch of the engine's loop: `with times.phase("schedule"):`.

    The time between two phases counts with the later one. So the phases of a step leave no gap, and
    their sum is the step. Only the engine holds one.
    """

    def __init__(self, clock: Clock = time.perf_counter):
        self._clock = clock
        self._since_s = clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phases = {name: _Phase(self, name) for name in PHASES}

    def begin(self) -> None:
        """A step starts now; the time before it belongs to no phase."""
        self._since_s = self._clock()

    def phase(self, name: str) -> _Phase:
        """A context manager: at its end, the time since the end of the last phase is `name`."""
        return self._phases[name]

    def end(self, name: str) -> None:
        """The phase `name` ends now."""
        now_s = self._clock()
        self._seconds[name] += now_s - self._since_s
        self._since_s = now_s

    def end_launch(self, model_s: float, sample_s: float) -> None:
        """A launch ends now. The executor measured two of its phases; the rest is `copy`."""
        now_s, seconds = self._clock(), self._seconds
        seconds["copy"] += now_s - self._since_s - model_s - sample_s
        seconds["model"] += model_s
        seconds["sample"] += sample_s
        self._since_s = now_s

    def seconds(self) -> dict[str, float]:
        """Totals by phase."""
        return dict(self._seconds)


class _Phase:
    """One phase of a StepTimes; made once, entered in every step."""

    __slots__ = ("_name", "_times")

    def __init__(self, times: StepTimes, name: str):
        self._times, self._name = times, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self._times.end(self._name)


TERMS = ("step", "row", "cached_token", "prompt_token")
FORGETTING = 0.999  # a step weighs half as much after 700 others
INITIAL_VARIANCE = 1e6  # of a coefficient that is not known yet, in the scaled units
MAX_VARIANCE = 1e6  # a term that never varies must not make its coefficient arbitrary
OUTLIER = 8.0  # a step that took more than this many times its prediction counts as this many
MIN_STEPS = 50  # before a prediction is good enough to recognise outliers


class StepModel:
    """Coefficients of TERMS, in seconds each."""

    # The size of each term in a usual step, so that all columns are about as large.
    SCALE = np.array([1.0, 16.0, 4096.0, 256.0])

    def __init__(self) -> None:
        self.num_steps = 0
        self._weights = np.zeros(4)
        self._spread = np.eye(4) * INITIAL_VARIANCE

    def observe(self, num_rows: int, num_cached: int, num_prompt: int, seconds: float) -> None:
        """A step took `seconds`; a time that other processes made implausible is cut."""
        x = self._scaled(num_rows, num_cached, num_prompt)
        predicted = float(x @ self._weights)
        if self.num_steps >= MIN_STEPS and predicted > 0:
            seconds = min(seconds, OUTLIER * predicted)
        spread_x = self._spread @ x
        gain = spread_x / (FORGETTING + x @ spread_x)
        self._weights += gain * (seconds - predicted)
        spread = (self._spread - np.outer(gain, spread_x)) / FORGETTING
        mean_variance = float(np.trace(spread)) / 4
        self._spread = spread * min(1.0, MAX_VARIANCE / mean_variance)
        self.num_steps += 1

    def seconds(self, num_rows: int, num_cached: int, num_prompt: int) -> float:
        """The predicted time of such a step; never below 0."""
        return max(float(self._scaled(num_rows, num_cached, num_prompt) @ self._weights), 0.0)

    def coefficients(self) -> dict[str, float]:
        """Seconds by term."""
        return dict(zip(TERMS, (self._weights / StepModel.SCALE).tolist(), strict=True))

    def _scaled(self, num_rows: int, num_cached: int, num_prompt: int) -> Floats:
        scaled: Floats = np.array([1, num_rows, num_cached, num_prompt]) / StepModel.SCALE
        return scaled
