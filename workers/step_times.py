"""Where the time of the engine's steps goes: running sums of seconds by phase.

Host time only. On a GPU, kernels run on after their launch, so `model` and `sample` are the time to
launch them, and `wait` is the time until their ids are there. With steps launched ahead, all other
phases belong to the next step while the device computes the one that is waited for: what is left of
`wait` is device time that nothing of the host overlaps. Knows nothing of what the phases do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
