"""The memory events of one sequence, until its next delta takes them along."""

from __future__ import annotations

from penstock.workers.scheduling.commit_rule import Decision
from penstock.workers.stats import DECIDED, PREEMPTED, MemoryEvent

MAX_EVENTS = 32  # of one request: later ones are not recorded


class EventLog:
    """Preemptions, and those decisions that differ from the one before."""

    __slots__ = ("_last", "_num", "pending")

    def __init__(self) -> None:
        self.pending: list[MemoryEvent] = []
        self._num = 0
        self._last: tuple[str, bool] | None = None

    def preempted(self, num_computed: int, num_generated: int) -> None:
        self._last = None
        self._add(MemoryEvent(PREEMPTED, num_generated, num_computed))

    def decided(self, decision: Decision, num_generated: int) -> None:
        kind = (decision.branch, decision.is_pressed)
        if kind == self._last:
            return
        self._last = kind
        self._add(
            MemoryEvent(
                DECIDED,
                num_generated,
                decision.num_pending,
                decision.branch,
                decision.num_scheduled,
                decision.ridge_tokens,
                decision.compute_s,
                decision.load_s,
                decision.is_pressed,
            )
        )

    def take(self) -> list[MemoryEvent]:
        """Those that no delta has had yet."""
        taken, self.pending = self.pending, []
        return taken

    def _add(self, event: MemoryEvent) -> None:
        self._num += 1
        if self._num <= MAX_EVENTS:
            self.pending.append(event)
