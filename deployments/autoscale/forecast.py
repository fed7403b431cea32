"""Forecast of the offered load: level and slope of past rates, and quantiles of its own errors.

Rates are in workers: worker-seconds of work that arrive per second, so a rate of 3 keeps three
workers busy. Holt's linear method over the observed rates, with a damped slope; each forecast is
kept until its horizon has passed, then its error joins those that the quantile is taken of.
Pure: the caller passes the time; a `Forecast` is frozen and every update returns a new one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

PRIOR_ERRORS = 4  # judged forecasts from which on their errors alone give the quantile
PRIOR_SHARE = 0.25  # assumed error until then, as a share of the level


@dataclass(frozen=True, slots=True)
class ForecastConfig:
    """Time constants in seconds."""

    level_s: float = 50.0  # a level older than this has lost two thirds of its weight
    slope_s: float = 360.0  # the same for the slope
    damping_s: float = 180.0  # a slope is expected to fade within about this time
    num_errors: int = 200  # past errors that the quantile is taken of
    spacing: float = 0.1  # of the horizon: forecasts are kept this far apart, to be judged

    def __post_init__(self) -> None:
        for name in ("level_s", "slope_s", "damping_s", "spacing"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0 and finite, not {value}")
        if self.num_errors < 1:
            raise ValueError(f"num_errors must be at least 1, not {self.num_errors}")


@dataclass(frozen=True, slots=True)
class Pending:
    """A forecast whose horizon has not passed."""

    made_at: float
    work_then: float  # worker-seconds that had arrived in total
    mean: float  # forecast of the mean rate until the horizon, in workers


@dataclass(frozen=True, slots=True)
class Forecast:
    """The offered rate, in workers, and its slope, in workers per second."""

    level: float = 0.0
    slope: float = 0.0
    updated_at: float | None = None  # None: nothing observed
    work: float = 0.0  # worker-seconds that arrived since the first observation
    pending: tuple[Pending, ...] = ()
    errors: tuple[float, ...] = ()  # actual minus forecast mean rate, oldest first

    def at(self, ahead_s: float, config: ForecastConfig) -> float:
        """The rate `ahead_s` seconds from the last observation."""
        grown = config.damping_s * (1.0 - math.exp(-ahead_s / config.damping_s))
        return max(0.0, self.level + self.slope * grown)

    def mean(self, ahead_s: float, config: ForecastConfig) -> float:
        """The mean rate over the next `ahead_s` seconds, by Simpson's rule."""
        middle, end = self.at(ahead_s / 2, config), self.at(ahead_s, config)
        return (self.at(0.0, config) + 4.0 * middle + end) / 6.0

    def error(self, share: float) -> float:
        """The error, in workers, that a `share` of the forecasts stayed below; at least 0."""
        if len(self.errors) >= PRIOR_ERRORS:
            return max(0.0, quantile(self.errors, share))
        prior = PRIOR_SHARE * self.level
        return max(prior, *self.errors) if self.errors else prior

    def observe(
        self, rate: float, now: float, horizon_s: float, config: ForecastConfig
    ) -> Forecast:
        """Add the mean rate since the last observation, and judge forecasts that are due.

        rate: workers, the mean from the last observation (or the start) until `now`.
        horizon_s: seconds that forecasts look ahead.
        """
        if self.updated_at is None:
            return Forecast(level=rate, updated_at=now)
        elapsed = now - self.updated_at
        if elapsed <= 0.0:
            return self
        fade = math.exp(-elapsed / config.slope_s)
        expected = self.level + self.slope * elapsed
        gain = 1.0 - math.exp(-elapsed / config.level_s)
        level = max(0.0, expected + gain * (rate - expected))
        slope = fade * self.slope + (1.0 - fade) * (level - self.level) / elapsed
        updated = replace(
            self, level=level, slope=slope, updated_at=now, work=self.work + rate * elapsed
        )
        return updated._judge(now, horizon_s, config)

    def _judge(self, now: float, horizon_s: float, config: ForecastConfig) -> Forecast:
        pending, errors = list(self.pending), list(self.errors)
        while pending and pending[0].made_at <= now - horizon_s:
            due = pending.pop(0)
            errors.append((self.work - due.work_then) / (now - due.made_at) - due.mean)
        if not pending or now - pending[-1].made_at >= config.spacing * horizon_s:
            pending.append(Pending(now, self.work, self.mean(horizon_s, config)))
        return replace(self, pending=tuple(pending), errors=tuple(errors[-config.num_errors :]))


def quantile(values: tuple[float, ...], share: float) -> float:
    """The `share` quantile, interpolated between neighbours. Raises ValueError if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
