"""How far a draft model goes on: as long as one more token promises more tokens a second.

A step of the model gives G tokens in T, with the drafts so far and the time that these took. One
more token for a draft that is right so far with probability s adds s times the share of right
tokens to G, and to T a step of the draft model and a row. Confidence of a draft decides, as in
llama.cpp's drafts, but against measured times instead of a fixed bound. The models are measured at
different moments of the start, so real steps of each correct both.
"""

from __future__ import annotations

from penstock.workers.speculation.draft import Draft, Drafted, StepSize
from penstock.workers.speculation.widths import GAIN, PACE, MeasuredWidths, StepCosts

PROBE_STEPS = 128  # without a draft; then one token is proposed, to see how it fares now
LEAST_SCALE, MOST_SCALE = 0.1, 100.0


class MeasuredSteps:
    """By the measured times of both models, and by what was accepted so far."""

    def __init__(self, widths: MeasuredWidths, costs: StepCosts):
        """`costs`: of the draft model's steps."""
        self.widths = widths
        self.costs = costs
        self.scale = 1.0  # of `costs`, by real steps
        self._num_quiet = 0

    def survival(self, draft: Draft) -> float:
        """As DraftSteps."""
        return self.widths.acceptance.survival(draft)[-1]

    def is_likely(self, draft: Draft) -> bool:
        """As DraftSteps."""
        return self.survival(draft) >= self.widths.acceptance.share("draft")

    def choose(self, state: Drafted, step: StepSize) -> int:
        """As DraftSteps."""
        share = self.widths.acceptance.share("draft")
        plain_s = self.widths.costs.seconds(step.num_rows, step.num_keys)
        is_first = not state.num_rows
        if is_first and self.widths.watch.wants_plain(step.num_rows):
            return 0
        best = self._rate(state, step, plain_s, state.gain, 0, 0.0) * (GAIN if is_first else 1.0)
        best_num, gain = 0, state.gain
        for num, survival in enumerate(state.survivals, 1):
            gain += share * survival
            seconds = self.scale * self.costs.seconds(num, num * state.num_keys)
            rate = self._rate(state, step, plain_s, gain, num, seconds)
            if rate > best:
                best, best_num = rate, num
        if not is_first:
            return best_num
        self._num_quiet = 0 if best_num else self._num_quiet + 1
        if self._num_quiet < PROBE_STEPS:
            return best_num
        self._num_quiet = 0
        return 1

    def _rate(
        self, state: Drafted, step: StepSize, plain_s: float, gain: float, num: int, seconds: float
    ) -> float:
        """Tokens a second with `num` more rows of drafts, `gain` tokens from all of them, and
        `seconds` more in the draft model."""
        rows = state.num_rows + num
        keys = step.num_keys + rows * state.num_keys
        watch = self.widths.watch
        model_s = watch.pace_of(step.num_rows) * (plain_s + watch.added_s(step, rows, keys))
        return (step.num_sampled + gain) / (model_s + state.seconds + seconds)

    def observe(self, num_rows: int, num_keys: int, seconds: float) -> None:
        """As DraftSteps."""
        found = seconds / self.costs.seconds(num_rows, num_keys)
        moved = self.scale * PACE if found > self.scale else self.scale / PACE
        self.scale = min(max(moved, LEAST_SCALE), MOST_SCALE)
