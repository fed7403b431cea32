"""Runs the unfinished lines of a batch against a target, many at a time.

Every line ends with one record in the part file. Lines without a seed get one from the run's seed
and their number, and keep it in every attempt: an undisturbed run and a resumed one send the same
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from penstock.deployments.batch import results
from penstock.deployments.batch.lines import EMBEDDINGS, RESPONSES, BatchLine, read_lines
from penstock.deployments.batch.part_file import ERROR, OUTPUT, PartFile, TokenCounts
from penstock.deployments.batch.retries import Retries
from penstock.deployments.batch.target import Reply, Target
from penstock.deployments.batch.urgency import Urgency
from penstock.deployments.batch.window import Window

log = logging.getLogger("penstock.batch")

LOWEST_PRIORITY = 100  # the largest value that clients may send
CHECK_URGENCY_S = 2.0
SYNC_RECORDS = 64
SYNC_S = 1.0
CANCEL_S = 10.0  # for requests in flight to finish after a cancel


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a batch is run. Of these settings only `run_seed` changes an answer.

    `priority` replaces that of every line; None: lines keep theirs. `deadline_s`: point on
    time.monotonic() after which unfinished lines become `batch_expired` errors; None: never. While
    the deadline is at risk, lines are sent without one: they have the best that the key permits.
    """

    run_seed: int
    max_in_flight: int = 64
    priority: int | None = LOWEST_PRIORITY
    deadline_s: float | None = None
    cancel_s: float = CANCEL_S


@dataclass(slots=True)
class Progress:
    """Counts of a run, renewed during it. `on_change` is called after each change."""

    num_lines: int
    num_completed: int = 0
    num_failed: int = 0
    num_in_flight: int = 0
    num_sent_again: int = 0
    cause: str = ""  # of the last time that a line was sent again; "" once one has its result
    tokens: TokenCounts = field(default_factory=TokenCounts)
    on_change: Callable[[Progress], None] = lambda _: None


class Runner:
    """One run over an input. Belongs to one event loop."""

    def __init__(
        self,
        file: BinaryIO,
        part: PartFile,
        target: Target,
        settings: RunSettings,
        progress: Progress,
    ):
        """`file`: checked by `check_input`. Lines that `part` has are not run."""
        self._file = file
        self._part = part
        self._target = target
        self._settings = settings
        self._progress = progress
        self._window = Window(settings.max_in_flight, time.monotonic)
        self._retries = Retries(self._window, self._count_resend)
        self._tasks = asyncio.Semaphore(settings.max_in_flight)
        self._is_stopping = False
        self._wants_sync = asyncio.Event()
        self._raised = asyncio.Event()  # set while the deadline is at risk
        self._renew_progress()

    async def run(self, cancelled: asyncio.Event | None = None) -> str | None:
        """Give every line its record. None, or why some lines were not run: EXPIRED or CANCELLED.

        `cancelled`: once set, no line begins, and those in flight get `cancel_s` to finish. Raises
        TargetError or OSError, which leave the part file as it is: a later run resumes from it.
        """
        helping = [asyncio.create_task(self._sync_often())]
        if self._settings.deadline_s is not None and self._settings.priority is not None:
            helping.append(asyncio.create_task(self._watch_urgency(self._settings.deadline_s)))
        try:
            unfinished = await self._run_lines(cancelled or asyncio.Event())
            if unfinished is not None:
                await self._record_unfinished(unfinished)
        finally:
            for task in helping:
                task.cancel()
            await asyncio.gather(*helping, return_exceptions=True)
            await asyncio.to_thread(self._part.sync)
        return unfinished

    async def _run_lines(self, cancelled: asyncio.Event) -> str | None:
        deadline_s = self._settings.deadline_s
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        running = asyncio.create_task(self._feed())
        watching = asyncio.create_task(cancelled.wait())
        both = (running, watching)
        try:
            await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
                return None
            self._is_stopping = True
            if not watching.done():
                return results.EXPIRED
            await asyncio.wait((running,), timeout=self._settings.cancel_s)
            return results.CANCELLED
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _feed(self) -> None:
        """Start a task for each line, as many at a time as may be in flight."""
        lines = read_lines(self._file, self._part)
        async with asyncio.TaskGroup() as group:
            while True:
                await self._tasks.acquire()
                line = None
                if not self._is_stopping:
                    line = await asyncio.to_thread(next, lines, None)
                if line is None:
                    return
                group.create_task(self._run_line(line))

    async def _run_line(self, line: BatchLine) -> None:
        try:
            reply = await self._reply(line)
            kind = OUTPUT if reply.is_success else ERROR
            self._record(line, kind, results.of_reply(line, reply), results.tokens_of(reply))
        finally:
            self._tasks.release()

    async def _reply(self, line: BatchLine) -> Reply:
        """The reply that is the line's result, after as many attempts as it takes."""

        async def attempt() -> Reply:
            self._progress.num_in_flight = self._window.num_in_flight
            return await self._attempt(line)

        return await self._retries.reply_of(attempt)

    def _count_resend(self, cause: str) -> None:
        self._progress.num_sent_again += 1
        self._progress.num_in_flight, self._progress.cause = self._window.num_in_flight, cause
        self._progress.on_change(self._progress)

    async def _attempt(self, line: BatchLine) -> Reply:
        """Send a line; once more, at once, if priorities are raised while it waits.

        Raises Unreachable.
        """
        if self._raised.is_set():
            return await self._target.send(line.url, self._body(line))
        sending = asyncio.create_task(self._target.send(line.url, self._body(line)))
        raising = asyncio.create_task(self._raised.wait())
        try:
            await asyncio.wait((sending, raising), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return await sending
        finally:
            for task in (sending, raising):
                task.cancel()
            await asyncio.gather(sending, raising, return_exceptions=True)
        return await self._target.send(line.url, self._body(line))

    def _body(self, line: BatchLine) -> dict[str, Any]:
        """The body to send for a line: its own, with a seed and the priority of the batch.

        The server does not store a response unless the line sets `store`: nothing would read it.
        """
        body = dict(line.body)
        if line.url == RESPONSES:
            body.setdefault("store", False)
        if body.get("seed") is None and line.url != EMBEDDINGS:
            body["seed"] = seed_of(self._settings.run_seed, line.number)
        if self._settings.priority is not None:
            body.pop("priority", None)  # without one it is the best that the API key permits
            if not self._raised.is_set():
                body["priority"] = self._settings.priority
        return body

    def _record(self, line: BatchLine, kind: str, content: bytes, tokens: TokenCounts) -> None:
        self._part.append(line.number, kind, content, tokens)
        if self._part.num_unsynced >= SYNC_RECORDS:
            self._wants_sync.set()
        self._renew_progress()
        self._progress.cause = ""
        self._progress.on_change(self._progress)

    async def _record_unfinished(self, code: str) -> None:
        """Record every line that has no result as an error with this code."""
        lines = read_lines(self._file, set(self._part))
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            self._record(line, ERROR, results.of_unfinished(line, code), TokenCounts())

    async def _sync_often(self) -> None:
        """After SYNC_RECORDS records, or SYNC_S."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wants_sync.wait(), SYNC_S)
            self._wants_sync.clear()
            if self._part.num_unsynced:
                await asyncio.to_thread(self._part.sync)

    async def _watch_urgency(self, deadline_s: float) -> None:
        """Raise priorities while the deadline is at risk."""
        progress = self._progress
        urgency = Urgency(time.monotonic(), deadline_s, len(self._part))
        while True:
            await asyncio.sleep(CHECK_URGENCY_S)
            num_done = len(self._part)
            at_risk = urgency.update(time.monotonic(), num_done, progress.num_lines - num_done)
            if at_risk and not self._raised.is_set():
                log.info("a batch is at risk of expiring: its requests get priority 0")
                self._raised.set()
            elif not at_risk and self._raised.is_set():
                self._raised.clear()

    def _renew_progress(self) -> None:
        progress, part = self._progress, self._part
        progress.num_completed, progress.num_failed = part.num_completed, part.num_failed
        progress.num_in_flight, progress.tokens = self._window.num_in_flight, part.tokens


def seed_of(run_seed: int, name: int | str) -> int:
    """The seed of a request that sets none: 64 signed bits, the same in each run with `run_seed`.

    `name`: identifies the request in the run; of a line, its number.
    """
    digest = hashlib.blake2b(f"{run_seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
