"""What the gate is asked and what it answers: settings, requests, tickets, refusals, waits.

Plain frozen data that may travel between processes; knows nothing of how anything is decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.deployments.gate_queue import QueueSettings


@dataclass(frozen=True, slots=True)
class GateSettings:
    """How the gate judges."""

    level: float = 0.95  # share of the sampled futures that have to fit
    pressed_level: float = 0.7  # the same, once somebody has waited for `pressed_s`
    pressed_s: float = 10.0
    num_samples: int = 32
    rule: str = "sampled"  # or "gaussian": means and variances, for many workers
    max_choices: int = 4  # workers that are looked at for a request: those with least to hold
    lease_s: float = 2.0  # a grant that has not started by then is taken back
    max_passes: int = 8  # later requests that may go before a first one that does not fit
    longest_wait_s: float = math.inf  # who would wait longer is refused at once
    retry_s: tuple[float, float] = (1.0, 60.0)  # least and most that a client is told to stay away
    queue: QueueSettings = field(default_factory=QueueSettings)

    def level_after(self, wait_s: float) -> float:
        """The level while somebody has waited for so long; in tenths, so that rooms last."""
        share = min(int(10 * wait_s / self.pressed_s), 10) / 10
        return self.level + share * (min(self.pressed_level, self.level) - self.level)

    def __post_init__(self) -> None:
        for name in ("level", "pressed_level"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, not {self.num_samples}")
        if self.rule not in ("sampled", "gaussian"):
            raise ValueError(f"rule must be 'sampled' or 'gaussian', not {self.rule!r}")
        if self.max_choices < 1:
            raise ValueError(f"max_choices must be at least 1, not {self.max_choices}")
        for name in ("lease_s", "longest_wait_s", "pressed_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must exceed 0, not {getattr(self, name)}")
        if self.max_passes < 0:
            raise ValueError(f"max_passes must be 0 or more, not {self.max_passes}")
        if not 0 <= self.retry_s[0] <= self.retry_s[1]:
            raise ValueError(f"retry_s must be (least, most) and 0 or more, not {self.retry_s}")


@dataclass(frozen=True, slots=True)
class GateRequest:
    """What the gate is told of a request, beside the law of its length."""

    request_id: str
    prompt_tokens: int
    tenant: str = ""
    priority: int = 0  # higher goes first
    deadline: float | None = None  # on the gate's clock; afterwards nobody wants the answer
    ceiling: int | None = None  # tokens that a rolling cache never exceeds, prompt included
    prefix: tuple[int, ...] = ()  # marks of the prompt's beginning (prefix_book)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0:
            raise ValueError(f"prompt_tokens must be 0 or more, not {self.prompt_tokens}")
        if self.ceiling is not None and self.ceiling < 1:
            raise ValueError(f"ceiling must be at least 1 or None, not {self.ceiling}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Come in: this worker holds room, until the lease ends or the request starts there."""

    request_id: str
    worker: str
    epoch: str
    waited_s: float
    lease_until: float
    predicted_s: float = 0.0  # that it would wait, as it was thought when it came


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not now, or never (`retry_after_s` is None)."""

    request_id: str
    reason: str  # "queue_full", "too_long", "displaced", "never_fits"
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Expiry:
    """Its deadline passed while it waited."""

    request_id: str
    waited_s: float


Outcome = Ticket | Refusal | Expiry


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a request waits."""

    request_id: str
    tenant: str
    position: int  # 0 goes next
    reason: str  # "memory", "slots", "behind", "no_worker"
    waited_s: float
    expected_s: float | None  # until it goes in, as predicted; None: cannot be told
    worker: str | None = None  # of the first: where it fits soonest
    peak: int | None = None  # tokens that would be needed there now
    limit: int | None = None  # tokens that may be
