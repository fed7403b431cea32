"""The share of a worker's memory that admission leaves free, adapted to its preemptions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Headroom:
    """The share of a worker's memory that is kept free, from how often it had to preempt.

    After each 100 completions: plus 0.01 if there were more than 3 preemptions, else minus 0.004.
    This corrects a predictor that is wrong by a factor of two.
    """

    share: float = 0.0
    completions: int = 0
    preemptions: int = 0

    WINDOW = 100
    TOLERATED = 3
    UP, DOWN = 0.01, 0.004
    LARGEST = 0.3

    def count(self, *, completions: int = 0, preemptions: int = 0) -> None:
        self.completions += completions
        self.preemptions += preemptions
        if self.completions >= Headroom.WINDOW:
            much = self.preemptions > Headroom.TOLERATED
            moved = self.share + (Headroom.UP if much else -Headroom.DOWN)
            self.share = min(max(moved, 0.0), Headroom.LARGEST)
            self.completions = self.preemptions = 0
