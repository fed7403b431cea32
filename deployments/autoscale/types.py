"""Data of the autoscaling policy: figures in, settings, state, decisions. Frozen.

Units: work in worker-seconds (what one worker does in a second under full load), rates in workers
(worker-seconds per second), times in seconds on the caller's clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from penstock.deployments.autoscale.capacity import Bucket
from penstock.deployments.autoscale.forecast import Forecast, ForecastConfig

Kind = Literal["up", "down", "hold", "wake", "sleep"]


@dataclass(frozen=True, slots=True)
class Signals:
    """Figures of the gate and of Serve at one moment.

    Totals count from the gate's start and never fall within one `gate_epoch`. Offered work includes
    requests that the gate refused (`queue_full`, `too_long`, `displaced`), once however often they
    come again, not those that never fit, and not batch jobs.
    """

    gate_epoch: int  # changes when the gate restarts: totals begin at 0 again
    offered_work_s: float  # total expected work of requests offered, worker-seconds
    offered_kv_s: float  # the same in KV memory: token-seconds over one worker's usable tokens
    backlog_s: float  # expected work of the requests that wait, worker-seconds
    num_waiting: int
    num_running: int
    oldest_wait_s: float  # 0 if none waits
    ready: int  # workers that take requests; those that drain are in neither of these two
    starting: int  # ordered and not ready: target minus ready, whether or not a process runs yet
    start_s: float  # 90th percentile of recent start-up times, from the order until ready
    failed_starts: int = 0  # starts that failed in the last 10 minutes
    batch_work_s: float = 0.0  # remaining work of batch jobs, worker-seconds
    batch_due_s: float = math.inf  # seconds until the earliest of their windows ends


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Bounds, the target wait, and when a worker is removed.

    Raises ValueError naming the field.
    """

    min_workers: int = 1  # 0: to zero when there is no work
    max_workers: int = 1
    target_wait_s: float = 5.0  # a request should wait no longer before a worker takes it
    late_share: float = 0.01  # of the work may wait longer
    usable: float = 0.9  # share of a worker's capacity that is planned with
    spare: float = 0.85  # a worker is removed only if the rest would be used less than this
    quantile: float = 0.9  # of forecast errors, planned with ...
    reserve_s: float = 6.0  # ... or the share start_s / (start_s + reserve_s), if that is less
    clear_s: float = 20.0  # a foreseen backlog is served this long after the workers are ready ...
    clear_starts: float = 0.25  # ... or this many start-up times, if longer
    down_window_s: float = 200.0  # a worker is removed once this long needed no such worker ...
    down_window_starts: float = 1.5  # ... or this many start-up times, if longer
    max_down_window_s: float = 3600.0  # the window grows up to this where bursts recur
    max_down_starts: float = 12.0  # ... or up to this many start-up times, if shorter
    down_share: float = 0.25  # at most this share of the workers is removed at once (at least 1)
    zero_after_s: float = 600.0  # without work; or three start-up times, if longer
    cancel_s: float = 60.0  # orders that were not wanted for this long are cancelled
    max_failed_starts: int = 3  # from this number on, no worker is added
    bucket_s: float = 5.0  # the load is recorded in intervals of at least this length
    forecast: ForecastConfig = field(default_factory=ForecastConfig)

    def __post_init__(self) -> None:
        if self.min_workers < 0:
            raise ValueError(f"min_workers must be 0 or more, not {self.min_workers}")
        if self.max_workers < max(1, self.min_workers):
            raise ValueError(
                f"max_workers must be at least 1 and min_workers ({self.min_workers}), "
                f"not {self.max_workers}"
            )
        for name in ("target_wait_s", "clear_s", "bucket_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0 and finite, not {value}")
        for name in ("usable", "spare", "quantile", "down_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        if not 0.0 <= self.late_share < 1.0:
            raise ValueError(f"late_share must be 0 or more and below 1, not {self.late_share}")
        for name in (
            "clear_starts",
            "reserve_s",
            "down_window_s",
            "down_window_starts",
            "max_down_window_s",
            "max_down_starts",
            "zero_after_s",
            "cancel_s",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more and finite, not {value}")
        if self.max_failed_starts < 1:
            raise ValueError(f"max_failed_starts must be at least 1, not {self.max_failed_starts}")


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The state between decisions; only `decide` makes one."""

    number: int  # of the last decision
    gate_epoch: int | None = None
    since: float = 0.0  # first figures of this gate
    bucket_from: float = 0.0  # the open bucket: its start, and the totals then
    bucket_totals: tuple[float, float] = (0.0, 0.0)
    buckets: tuple[Bucket, ...] = ()  # oldest first
    recorded_s: float = 0.0  # total length of the buckets
    forecast: Forecast = field(default_factory=Forecast)
    needed: int = 0  # workers that the load of the window needed
    kept: int = 0  # the most workers to keep, of the history within the window
    history: tuple[tuple[float, int, int], ...] = ()  # when, workers to keep, workers wanted
    orders: tuple[tuple[float, int], ...] = ()  # when ordered, workers still starting
    last_up: float = -math.inf
    last_down: float = -math.inf
    late_at: float = -math.inf  # when a request last waited longer than it should
    window_s: float = 0.0  # of a removal, if above the shortest; grows after a removal too early
    window_at: float = -math.inf  # when it grew or shrank last
    idle_since: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """`number`: workers wanted, with those that start and without those that drain."""

    number: int
    kind: Kind
    reason: str  # one sentence with the figures, for operators
    state: PolicyState
