"""`Account`: one quota of one tenant, as one ingress sees it.

What the ingress has taken from the bucket and not used yet is `held`; below 0, answers took more
than was reserved for them. The bucket's level is known from the last take, and its refill since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.deployments.security.records import QUOTA_NAMES, QuotaLimits
from penstock.deployments.state.store import Bucket

DAY_S = 86400
SPAN_S = {"minute": 60, "day": DAY_S}
SLICES = 20  # an ingress takes a twentieth of a quota in advance
DAY_KEPT_S = 2.0 * DAY_S  # a day's bucket, from its last take: clocks differ, answers end late
KEPT_S = 60.0  # what was taken in advance and not used by then is forfeited: buckets fill again


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the four quotas. `what`: "requests" or "tokens"; `span`: "minute" or "day"."""

    what: str
    span: str

    @property
    def name(self) -> str:
        return f"{self.what}_per_{self.span}"


_KINDS = {name: Kind(*name.split("_per_")) for name in QUOTA_NAMES}


def account_kinds(limits: QuotaLimits) -> list[Kind]:
    """The quotas that are set."""
    return [kind for name, kind in _KINDS.items() if getattr(limits, name) is not None]


def day_of(now_s: float) -> int:
    """Days since 1970, UTC."""
    return int(now_s // DAY_S)


class Account:
    """Counts of one quota. Times are Unix time, in seconds, as the caller passes them."""

    __slots__ = ("_held_s", "_level", "_seen_s", "day", "held", "kind", "limit", "name")

    def __init__(self, kind: Kind, tenant: str, limit: int, day: int):
        self.kind, self.limit = kind, limit
        self.day = day if kind.span == "day" else None
        # Another limit has another bucket: the level of the old one says nothing about it.
        name = f"quota/{tenant}/{kind.what}/{kind.span}/{limit}"
        self.name = name if self.day is None else f"{name}/{day}"
        self.held = 0.0
        self._level, self._seen_s, self._held_s = float(limit), 0.0, 0.0

    @property
    def refill_per_s(self) -> float:
        return self.limit / SPAN_S["minute"] if self.day is None else 0.0

    @property
    def slice(self) -> float:
        """How much an ingress takes in advance: whole requests or tokens."""
        return float(self.limit // SLICES)

    def bucket(self, cost: float) -> Bucket:
        ttl_s = None if self.day is None else DAY_KEPT_S
        return Bucket(self.name, float(self.limit), self.refill_per_s, cost, ttl_s)

    def saw(self, level: float, now_s: float) -> None:
        """The bucket's level after a take."""
        self._level, self._seen_s = level, now_s

    def hold(self, amount: float, now_s: float) -> None:
        """More was taken, or was taken and not used."""
        self.held += amount
        self._held_s = now_s

    def expire(self, now_s: float) -> None:
        """Forfeit what was taken in advance a while ago: with it, a quiet minute would let more
        through at once than the quota."""
        if self.day is None and self.held > 0 and now_s - self._held_s > KEPT_S:
            self.held = 0.0

    def is_over(self, now_s: float) -> bool:
        return self.day is not None and self.day != day_of(now_s)

    def level(self, now_s: float) -> float:
        """What the bucket has now, if nobody else takes."""
        filled = self._level + max(0.0, now_s - self._seen_s) * self.refill_per_s
        return min(float(self.limit), filled)

    def remaining(self, now_s: float) -> float:
        """What the tenant may still use, as far as this ingress knows."""
        return min(float(self.limit), self.level(now_s) + self.held)

    def reset_s(self, now_s: float) -> float:
        """Seconds until all of the quota is there again."""
        if self.day is None:
            return max(0.0, self.limit - self.remaining(now_s)) / self.refill_per_s
        return (self.day + 1) * DAY_S - now_s

    def wait_s(self, needed: float, now_s: float) -> float:
        """Seconds until the bucket has `needed`."""
        if self.day is not None:
            return self.reset_s(now_s)
        return max(0.0, min(needed, self.limit) - self.level(now_s)) / self.refill_per_s


def reset_text(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 1s, 6m0s, 23h59m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
