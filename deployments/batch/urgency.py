"""Whether a batch will be finished by its deadline at the pace of its last minutes. Pure.

Requests of a batch have the lowest priority. While a batch is at risk, they get the priority of
other requests.
"""

from __future__ import annotations

from collections import deque

PACE_S = 600.0  # of the past that counts
FIRST_PACE_S = 30.0  # a pace over a shorter time is not used
RAISE_MARGIN = 1.5  # at risk: less time is left than this many times the time needed
LOWER_MARGIN = 3.0  # no longer at risk: more is left than this many times


class Urgency:
    """Follows one run. All times are seconds of one clock."""

    def __init__(self, began_s: float, deadline_s: float, num_done: int):
        self._deadline_s = deadline_s
        self._past: deque[tuple[float, int]] = deque([(began_s, num_done)])
        self.is_high = False

    def update(self, now_s: float, num_done: int, num_left: int) -> bool:
        """Record the progress; return whether the run is at risk, which `is_high` keeps."""
        self._past.append((now_s, num_done))
        while len(self._past) > 2 and self._past[1][0] <= now_s - PACE_S:
            self._past.popleft()
        since_s, before = self._past[0]
        left_s, pace_s = self._deadline_s - now_s, now_s - since_s
        if pace_s < min(FIRST_PACE_S, 0.1 * (left_s + pace_s)):
            return self.is_high
        # No line done counts as one: the pace is overestimated until the first one is done.
        needed_s = num_left * pace_s / max(num_done - before, 1)
        margin = LOWER_MARGIN if self.is_high else RAISE_MARGIN
        self.is_high = num_left > 0 and left_s < margin * needed_s
        return self.is_high
