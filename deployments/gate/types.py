"""The gate's data: settings, requests, demands, worker reports, and decisions. Frozen.

Tokens are of KV memory, times in seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from penstock.deployments.gate.forecast.sampled import UNBOUNDED, Candidate
from penstock.deployments.options import StateOptions
from penstock.deployments.prediction.distribution import Floats, Ints, LengthDistribution

# Of requests that wait for as long as any other does. The ingress negates what a client sends, so
# that a client's lowest priority (MAX_PRIORITY, 100) is this one.
LOWEST_PRIORITY = -100


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Settings of the queue. Charges are in virtual tokens."""

    max_waiting: int = 512  # requests
    max_wait_s: float = 30.0  # then no later request of its class is admitted before it
    ageing: float = 0.05  # seconds of KV area that a second of waiting is worth
    prompt_charge: float = 1.0  # of a prompt token
    answer_charge: float = 2.0  # of an answer token
    # By so much may a tenant run ahead of its share with requests whose deadlines are near.
    deadline_loan: float = 2000.0

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, not {self.max_waiting}")
        for name in (
            "max_wait_s",
            "ageing",
            "prompt_charge",
            "answer_charge",
            "deadline_loan",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more and finite, not {value}")

    def charge(self, weight: float, prompt_tokens: int, answer_tokens: float) -> float:
        """What an answer costs a tenant of that weight."""
        tokens = self.prompt_charge * prompt_tokens + self.answer_charge * answer_tokens
        return tokens / weight


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Settings of the gate."""

    level: float = 0.95  # share of the sampled futures that have to fit
    pressed_level: float = 0.3  # the same, after `pressed_s` of waits or refusals (Pressure)
    pressed_s: float = 10.0
    num_samples: int = 32
    max_choices: int = 4  # workers evaluated for a request: the ones with the least expected tokens
    lease_s: float = 2.0  # a grant without a start by then is taken back
    # For each worker, later requests admitted before a first one that does not fit.
    max_backfills: int = 8
    # Between looks at a queue of more than `short_queue` requests while the first one does not fit
    # and nothing has been freed; and after an arrival. Shorter ones are looked at at each tick.
    look_s: float = 0.25
    look_on_arrival_s: float = 0.03
    short_queue: int = 8
    longest_wait_s: float = math.inf  # a longer predicted wait is refused at once
    retry_s: tuple[float, float] = (1.0, 60.0)  # bounds of Retry-After
    may_wake: bool = False  # without a worker, requests wait for one that is started for them
    start_s: float = 30.0  # that its start takes, until one was seen
    queue: QueueSettings = field(default_factory=QueueSettings)

    def level_after(self, pressed_s: float) -> float:
        """The level after so much pressure; in ten steps, so that forecasts stay cached."""
        share = min(int(10 * pressed_s / self.pressed_s), 10) / 10
        return self.level + share * (min(self.pressed_level, self.level) - self.level)

    def __post_init__(self) -> None:
        for name in ("level", "pressed_level"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, not {self.num_samples}")
        if self.max_choices < 1:
            raise ValueError(f"max_choices must be at least 1, not {self.max_choices}")
        for name in ("lease_s", "longest_wait_s", "pressed_s", "start_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must exceed 0, not {getattr(self, name)}")
        if self.max_backfills < 0:
            raise ValueError(f"max_backfills must be 0 or more, not {self.max_backfills}")
        if not 0 <= self.retry_s[0] <= self.retry_s[1]:
            raise ValueError(f"retry_s must be (least, most) and 0 or more, not {self.retry_s}")


@dataclass(frozen=True, slots=True)
class GateSetup:
    """The operator's settings of the gate. Small: each ingress passes its own when it connects.

    `generation` numbers the deployments of one application. Those of the highest are in force: in
    an update, ingresses with older settings and ingresses with newer ones share the gate.
    """

    admission: str = "predicted"  # or "reserve_max"
    max_queued: int = 1024
    longest_wait_s: float | None = None
    host: str | None = None  # address that the gate listens on; None: its node's in the cluster
    snapshot_file: str | None = None  # where the predictor's state is kept; AUTO_FILE: by these:
    snapshot_of: tuple[str, str] = ("penstock", "")  # the application and the model
    state: StateOptions | None = None  # and a Redis that keeps it, too
    snapshot_key: str = "predictor"  # there
    may_wake: bool = False  # without a worker, requests wait for one that is started for them
    certs_dir: str | None = None  # of the cluster's certificates; None: in the clear
    generation: int = 0  # as Registry.begin numbers it; not a setting

    @property
    def digest(self) -> str:
        """Equal for equal settings, whatever their generation."""
        settings = astuple(replace(self, generation=0))
        return hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()

    def gate_settings(self) -> GateSettings:
        wait_s = float("inf") if self.longest_wait_s is None else self.longest_wait_s
        return GateSettings(
            longest_wait_s=wait_s,
            queue=QueueSettings(max_waiting=self.max_queued),
            may_wake=self.may_wake,
        )


def digest_of(setups: Iterable[GateSetup | None]) -> str:
    """Equal for equal settings of all gates of an application; empty: it has none. Of one gate,
    the digest of its settings."""
    digests = [setup.digest for setup in setups if setup is not None]
    if len(digests) < 2:
        return "".join(digests)
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class GateRequest:
    """What the gate knows of a request, in addition to its length distribution."""

    request_id: str
    prompt_tokens: int
    tenant: str = ""
    priority: int = 0  # higher goes first
    deadline: float | None = None  # on the gate's clock; then it is dropped
    ceiling: int | None = None  # tokens that a rolling cache never exceeds, prompt included
    prefix: tuple[int, ...] = ()  # marks of the prompt's prefix (forecast/prefix_affinity.py)
    tokenizer: str = ""  # digest: it goes to workers with this one; empty: to any
    generated: int = 0  # tokens of its answer that workers which were lost have emitted
    weight: float = 1.0  # share of its tenant beside the others that wait

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight must exceed 0 and be finite, not {self.weight}")
        if self.prompt_tokens < 0:
            raise ValueError(f"prompt_tokens must be 0 or more, not {self.prompt_tokens}")
        if self.ceiling is not None and self.ceiling < 1:
            raise ValueError(f"ceiling must be at least 1 or None, not {self.ceiling}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Admitted: this worker holds room, until the lease ends or the request starts there."""

    request_id: str
    worker: str
    epoch: int
    waited_s: float
    lease_until: float
    quoted_wait_s: float = 0.0  # as predicted when it arrived


Reason = Literal["queue_full", "too_long", "displaced", "never_fits", "no_worker"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refused for now, or for good (`retry_after_s` is None)."""

    request_id: str
    reason: Reason
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
    expected_s: float | None  # until it is admitted, as predicted; None: unknown
    worker: str | None = None  # of the first: where it fits soonest
    peak: int | None = None  # tokens that would be needed there now
    limit: int | None = None  # tokens that it may use


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker and its capacity."""

    name: str
    epoch: int  # changes whenever the worker starts anew
    capacity: int  # tokens of KV that fit its pool
    block_size: int = 16  # tokens
    slots: int = 256  # answers at once
    tokenizer: str = ""  # its digest; empty: unknown

    def __post_init__(self) -> None:
        for name in ("capacity", "block_size", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Demand:
    """What an answer needs of a worker's memory, and its random numbers.

    `uniforms` are drawn once per request (common random numbers): a request that was refused gets
    the same futures when it asks again, and its futures only shrink as tokens come.
    """

    request_id: str
    prompt_tokens: int
    length: LengthDistribution  # tokens until its memory is free
    uniforms: Floats  # [samples] in [0, 1)
    ceiling: int | None = None  # tokens that a rolling cache never exceeds, prompt included
    tokenizer: str = ""  # digest of the one that made its token ids; empty: any
    generated: int = 0  # tokens of its answer that it begins with

    def is_for(self, spec: WorkerSpec) -> bool:
        """Whether its token ids mean the same to that worker."""
        return not self.tokenizer or not spec.tokenizer or self.tokenizer == spec.tokenizer

    def used(self, generated: int, block_size: int) -> int:
        """Tokens held, at most: the last block may have one token."""
        return self._capped(self.prompt_tokens + generated + block_size - 1)

    def longest(self, block_size: int) -> int:
        """Tokens held, in whole blocks, at max_tokens; with one token if unlimited."""
        limit = self.length.max_tokens
        total = self.prompt_tokens + (1 if limit is None else limit)
        return self._capped(-(-total // block_size) * block_size)

    @property
    def expected(self) -> float:
        """Tokens that it is expected to hold at its end."""
        return self.holds(round(self.length.mean))

    def holds(self, answer_tokens: int) -> int:
        """Tokens of KV that it holds once `answer_tokens` of its answer are generated."""
        return self._capped(self.prompt_tokens + answer_tokens)

    def remaining(self) -> Ints:
        """[samples] steps to its end, from its beginning: P(L - t | L > t), t tokens generated."""
        return self.length.sample_remaining(self.generated, self.uniforms)

    def candidate(self, block_size: int, remaining: Ints | None = None) -> Candidate:
        """For a worker with blocks of this size; `remaining`, if known."""
        return Candidate(
            used=self.used(self.generated, block_size),
            remaining=self.remaining() if remaining is None else remaining,
            ceiling=UNBOUNDED if self.ceiling is None else self.ceiling,
            longest=self.longest(block_size),
        )

    def _capped(self, tokens: int) -> int:
        return tokens if self.ceiling is None else min(tokens, self.ceiling)


class Running(NamedTuple):
    """One answer in a worker's report: made for each of them, several times a second."""

    request_id: str
    generated: int  # 0: its prompt is not yet computed
    prompt_tokens: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All that runs on a worker. `sequence` rises within an epoch; late reports are dropped."""

    epoch: int
    sequence: int
    running: tuple[Running, ...]
    step_s: float  # recent duration of a step
    num_preemptions: int = 0  # since the worker started
    is_draining: bool = False  # it takes no new request
    step_costs: tuple[float, ...] = ()  # as StepCosts; empty: not known
