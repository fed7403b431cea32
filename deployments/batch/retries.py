"""Sends each request of a job until it has its result.

The loss of a worker is seldom the fault of the requests that ran there: machines fail, clusters
restart. So a loss counts against a request only if another request of the job was answered since
the loss of it that counted last: then workers serve others, and a request that loses
MAX_WORKERS_LOST of them is the likely cause. A request that was lost SUSPECT_LOSSES times is sent
while no other such request is in flight, so that one that ends workers does not end the attempts of
others for long. If nothing else of the job is in flight then, a request that was answered before is
sent once more, for comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.deployments.batch.target import (
    Reply,
    TargetError,
    Unreachable,
    Verdict,
    cause_of,
    judge,
    wait_s,
)
from penstock.deployments.batch.window import Window

MAX_WORKERS_LOST = 5
SUSPECT_LOSSES = 3  # from this number on, such requests are sent one at a time
NO_ANSWER_S = 24 * 3600.0  # without any answer, while workers are lost: then the job stops

Attempt = Callable[[], Awaitable[Reply]]  # sends a request once; may raise Unreachable


@dataclass(slots=True)
class _Counts:
    """Counts over all attempts of one request."""

    num_failures: int = 0
    num_waits: int = 0
    num_lost: int = 0
    num_lost_counted: int = 0  # losses that count against the request
    num_answered: int = -1  # requests of the job that had an answer at the last of those


class Retries:
    """Sends the requests of one job. Belongs to one event loop."""

    def __init__(
        self,
        window: Window,
        on_resend: Callable[[str], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Each attempt holds a slot of `window`. `on_resend` gets the cause of each wait."""
        self._window = window
        self._on_resend = on_resend
        self._clock = clock
        self._suspects = asyncio.Lock()
        self._num_answered = 0
        self._answered_s = clock()
        self._last_answered: Attempt | None = None

    async def reply_of(self, attempt: Attempt) -> Reply:
        """The reply that is the request's result, after as many attempts as it takes.

        Raises TargetError if no request of the job can be served.
        """
        counts = _Counts()
        while True:
            is_suspect = counts.num_lost >= SUSPECT_LOSSES
            async with self._suspects if is_suspect else contextlib.nullcontext():
                if is_suspect:
                    await self._compare(counts)
                reply, verdict = await self._try(attempt, counts)
            if verdict is Verdict.DONE:
                assert reply is not None, "only a reply is a result"
                return reply
            self._on_resend(cause_of(reply))
            if verdict is Verdict.LOST:  # longer each time; a Retry-After does not count
                await asyncio.sleep(wait_s(None, counts.num_lost - 1))
            else:
                await asyncio.sleep(wait_s(reply, counts.num_waits))
                counts.num_waits += 1

    async def _try(self, attempt: Attempt, counts: _Counts) -> tuple[Reply | None, Verdict]:
        reply: Reply | None = None
        async with self._window.slot():
            with contextlib.suppress(Unreachable):
                reply = await attempt()
            verdict = judge(reply, counts.num_failures)
            if verdict is Verdict.LOST and self._is_result(counts):
                verdict = Verdict.DONE
            if verdict in (Verdict.AGAIN, Verdict.LOST):
                self._window.refused()
            elif verdict is Verdict.RETRY:
                counts.num_failures += 1
            else:
                self._window.succeeded()
                if reply is not None and reply.is_success:
                    self._last_answered = attempt
                    self._answered()
        return reply, verdict

    def _answered(self) -> None:
        self._num_answered += 1
        self._answered_s = self._clock()

    def _is_result(self, counts: _Counts) -> bool:
        """Count a loss; whether it is the result of the request. Raises TargetError."""
        counts.num_lost += 1
        if counts.num_answered != self._num_answered:
            counts.num_answered = self._num_answered
            counts.num_lost_counted += 1
        if counts.num_lost_counted >= MAX_WORKERS_LOST:
            return True
        if self._clock() - self._answered_s > NO_ANSWER_S:
            raise TargetError(
                f"no request was answered for {NO_ANSWER_S / 3600:.0f} h, because workers are lost "
                "(worker_lost): look for the cause in the server's log, and run the same command "
                "again: finished lines are kept"
            )
        return False

    async def _compare(self, counts: _Counts) -> None:
        """Send a request that was answered before, unless others were answered since, or may be."""
        if (
            counts.num_answered != self._num_answered
            or self._last_answered is None
            or self._window.num_in_flight
        ):
            return
        reply: Reply | None = None
        async with self._window.slot():
            with contextlib.suppress(Unreachable):
                reply = await self._last_answered()
        if reply is not None and reply.is_success:
            self._answered()
