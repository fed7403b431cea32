"""A circuit breaker: after some faults in a row, no requests for a while.

The caller passes the time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CircuitBreaker:
    """Closed: ask. Open: do not ask until `until`; then the next request is a probe."""

    most_faults: int = 3
    open_s: float = 5.0
    num_faults: int = 0  # in a row
    num_opened: int = 0
    until: float | None = None  # open till then

    def allows(self, now: float) -> bool:
        """Whether to ask now. After the pause the next request is the probe."""
        return self.until is None or now >= self.until

    def success(self) -> None:
        self.num_faults, self.until = 0, None

    def fault(self, now: float) -> None:
        """No answer in time. A probe that fails opens it again at once."""
        self.num_faults += 1
        is_probe = self.until is not None and now >= self.until
        if is_probe or (self.until is None and self.num_faults >= self.most_faults):
            self.until = now + self.open_s
            self.num_opened += 1

    def state(self, now: float) -> str:
        if self.until is None:
            return "closed"
        return "half_open" if now >= self.until else "open"
