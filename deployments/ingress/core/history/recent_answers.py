"""What became of the requests that run here, and of the last that have ended: `penstock explain`.

Times, counts, addresses of workers and decisions about memory; never a word of a prompt or of an
answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from penstock.deployments.ingress.core.call import TokenUsage
from penstock.deployments.ingress.core.request_metrics import RequestTimes
from penstock.deployments.ingress.core.tracing import AnswerTrace

MAX_CALLS = 1000  # that are remembered


@dataclass(slots=True, eq=False)
class AnswerRecord:
    """One answer of a call. The parts that are shared with it go on changing while it runs."""

    request_id: str
    model: str
    tenant: str
    priority: int
    trace: AnswerTrace
    times: RequestTimes  # on time.monotonic()
    usage: TokenUsage
    arrived_at: float = field(default_factory=time.time)
    finish: str | None = None  # as for RequestMetrics.count_end; None: it runs
    ended_s: float | None = None


class RecentAnswers:
    """The answers of the last calls of one ingress, by the id of the call."""

    def __init__(self, most: int = MAX_CALLS):
        self._calls: OrderedDict[str, list[AnswerRecord]] = OrderedDict()
        self._most = most

    def begin(self, call_id: str, record: AnswerRecord) -> None:
        answers = self._calls.get(call_id)
        if answers is None:
            answers = self._calls[call_id] = []
            if len(self._calls) > self._most:
                self._forget_one()
        answers.append(record)

    def end(self, record: AnswerRecord, finish: str) -> None:
        record.finish, record.ended_s = finish, time.monotonic()

    def of(self, call_id: str) -> list[AnswerRecord]:
        """The answers of that call in the order in which they began; none: it is not known."""
        return list(self._calls.get(call_id, ()))

    def _forget_one(self) -> None:
        """The oldest call of the older half that has ended; if all of these run, the oldest."""
        older = list(islice(self._calls, self._most // 2))
        ended = (name for name in older if all(each.finish for each in self._calls[name]))
        del self._calls[next(ended, older[0])]
