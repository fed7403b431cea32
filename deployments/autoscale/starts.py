"""How long workers take to start, from the order until they serve. Pure."""

from __future__ import annotations

from collections import deque

from penstock.deployments.autoscale.forecast import quantile

PRIOR_S = 30.0  # before a start was observed: on a node that runs
NUM_STARTS = 20
SHARE = 0.9  # the quantile that is planned with


class StartTimes:
    """Start-up times, from the target and ready numbers at each turn: oldest order first."""

    def __init__(self, prior_s: float = PRIOR_S) -> None:
        """`prior_s`: the start-up time until one was observed."""
        self._prior_s = prior_s
        self._orders: deque[float] = deque()  # when each worker that starts was ordered
        self._ready: int | None = None
        self._took: deque[float] = deque(maxlen=NUM_STARTS)

    @property
    def start_s(self) -> float:
        """The 90th percentile of the last starts."""
        return quantile(tuple(self._took), SHARE) if self._took else self._prior_s

    def observe(self, target: int, ready: int, now: float) -> None:
        """Record one turn. `target`: workers ordered in all; `ready`: those of them that serve."""
        was_ready, self._ready = self._ready, ready
        if was_ready is None:  # what starts now was ordered at an unknown time
            return
        for _ in range(min(max(ready - was_ready, 0), len(self._orders))):
            self._took.append(now - self._orders.popleft())
        starting = max(target - ready, 0)
        while len(self._orders) > starting:
            self._orders.pop()  # a cancelled order
        while len(self._orders) < starting:
            self._orders.append(now)
