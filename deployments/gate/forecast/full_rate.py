"""How much a worker would do if it were full, from what its steps were measured to cost.

Workers fit the cost of a step while they serve (workers/execution/step_model.py). So the autoscaler
knows what one more worker is worth before one has been full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PROMPT_UNIT = 0.2  # work of a prompt token in units, of which an answer token is one
GAIN = 0.05  # of a request in the mean request


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds that a step takes, and more for each of these in it."""

    step: float
    row: float  # of an answer: one token
    cached_token: float  # that a row reads
    prompt_token: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> StepCosts | None:
        """None unless there is a number for each."""
        return cls(*seconds) if len(seconds) == 4 and all(map(math.isfinite, seconds)) else None

    def seconds(self, rows: float, cached_tokens: float, prompt_tokens: float) -> float:
        return (
            self.step
            + self.row * rows
            + self.cached_token * cached_tokens
            + self.prompt_token * prompt_tokens
        )


@dataclass(slots=True)
class MeanRequest:
    """A usual request of late, in tokens."""

    prompt: float = 0.0
    answer: float = 0.0
    _is_known: bool = False

    def add(self, prompt: float, answer: float) -> None:
        gain = GAIN if self._is_known else 1.0
        self.prompt += gain * (prompt - self.prompt)
        self.answer += gain * (answer - self.answer)
        self._is_known = True


def full_rate(
    costs: StepCosts, request: MeanRequest, step_s: float, *, capacity: int, slots: int
) -> float:
    """Units a second of a worker that runs as many of these requests as it can.

    A step then has a row for each, and for each answer that ends in it the prompt of another one.
    `step_s`: what steps take now; they are not expected to get shorter with more rows. `capacity`:
    KV tokens that fit. `slots`: most requests at once.
    """
    answer = max(request.answer, 1.0)
    held = request.prompt + answer / 2
    rows = max(1.0, min(slots, capacity / held))
    prompts = rows * request.prompt / answer  # tokens of prompts a step
    seconds = max(costs.seconds(rows, rows * held, prompts), step_s)
    return (rows + PROMPT_UNIT * prompts) / seconds
