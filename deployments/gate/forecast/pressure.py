"""For how long more has been asked than fits: by the oldest wait, or by refusals.

A limit on waits keeps the queue short in overload, so that the oldest wait alone would call for
caution just when memory that is left free costs most.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pressure:
    """Rises by a second a second while requests are refused for want of room, and falls as fast."""

    largest_s: float  # it rises no higher
    _refusing_s: float = 0.0  # as of `_updated`
    _updated: float = 0.0
    _refused_until: float = float("-inf")  # a refusal counts for PAUSE_S

    PAUSE_S = 5.0  # between refusals that belong together

    def refused(self, now: float) -> None:
        """A request was refused because others come before it."""
        self.after(0.0, now)
        self._refused_until = now + Pressure.PAUSE_S

    def after(self, longest_wait_s: float, now: float) -> float:
        """Seconds of pressure: `longest_wait_s` of the waiting requests, or of refusals."""
        risen = max(min(now, self._refused_until) - self._updated, 0.0)
        fallen = max(now - max(self._updated, self._refused_until), 0.0)
        self._refusing_s = max(min(self._refusing_s + risen, self.largest_s) - fallen, 0.0)
        self._updated = max(now, self._updated)
        return max(longest_wait_s, self._refusing_s)
