"""The share of a worker's memory that admission leaves free, adapted to its preemptions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Headroom:
    """The share of a worker's memory that is kept free, from how often it had to preempt.

    After each 100 completions: plus 0.01 if there were more preemptions than are tolerated, else
    minus 0.004. This corrects a predictor that is wrong by a factor of two. 3 are tolerated, and
    more under pressure, when the quantile of futures that have to fit is lower.
    """

    share: float = 0.0
    completions: int = 0
    preemptions: int = 0
    level: float = 0.95  # the lowest quantile that was asked for in this window

    WINDOW = 100
    TOLERATED = 3.0
    RISKED = 25.0  # more, by how far the quantile lies below CAUTIOUS
    CAUTIOUS = 0.95
    UP, DOWN = 0.01, 0.004
    LARGEST = 0.3

    def count(self, *, completions: int = 0, preemptions: int = 0) -> None:
        self.completions += completions
        self.preemptions += preemptions
        if self.completions >= Headroom.WINDOW:
            risked = Headroom.RISKED * max(Headroom.CAUTIOUS - self.level, 0.0)
            much = self.preemptions > Headroom.TOLERATED + risked
            moved = self.share + (Headroom.UP if much else -Headroom.DOWN)
            self.share = min(max(moved, 0.0), Headroom.LARGEST)
            self.completions = self.preemptions = 0
            self.level = Headroom.CAUTIOUS

    def judged_at(self, level: float) -> None:
        """A request was judged at that quantile."""
        self.level = min(self.level, level)
