"""How long the engine's steps take: seconds by phase (step_model.py: what decides it).

Host time only. On a GPU, kernels run on after their launch, so `model` and `sample` are the time to
launch them, and `wait` is the time until the sampled ids are there. With async scheduling, all
other phases belong to the next step while the device computes the one that is waited for: what is
left of `wait` is device time that the host does not overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds

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
