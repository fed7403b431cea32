"""The progress of `penstock batch` on standard error: a bar on a terminal, else a line at times."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TextIO

from penstock.deployments.batch.runner import Progress
from penstock.deployments.cli.tables import duration

BAR_S = 1.0  # between two renewals without a change
LINE_S = 10.0
QUIET_S = 60.0  # between two lines while nothing changes
STALLED_S = 30.0  # without a result, while requests are sent again


@asynccontextmanager
async def shown(progress: Progress) -> AsyncIterator[None]:
    """Show the progress until the body ends."""
    view = _Bar(progress) if sys.stderr.isatty() else Lines(progress, sys.stderr, time.monotonic)
    renewing = asyncio.create_task(_renew(view))
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        view.close()


class _View(Protocol):
    interval_s: float

    def renew(self) -> None: ...

    def close(self) -> None: ...


async def _renew(view: _View) -> None:
    while True:
        await asyncio.sleep(view.interval_s)
        view.renew()


class Words:
    """Speed, requests in flight, failures and delays, in words."""

    def __init__(self, progress: Progress, clock: Callable[[], float]):
        self._progress, self._clock = progress, clock
        self.began_s = self._done_s = clock()
        self.first_done = self._num_done = num_done(progress)
        self._first_tokens = progress.tokens.completion

    def __str__(self) -> str:
        progress, now_s = self._progress, self._clock()
        if num_done(progress) != self._num_done:
            self._num_done, self._done_s = num_done(progress), now_s
        tokens = progress.tokens.completion - self._first_tokens
        words = [
            f"{tokens / max(now_s - self.began_s, 1e-9):,.0f} tok/s",
            f"{progress.num_in_flight} in flight",
        ]
        if progress.num_failed:
            words.append(f"{progress.num_failed} failed")
        if progress.num_sent_again:
            cause = f" ({progress.cause})" if progress.cause else ""
            words.append(f"{progress.num_sent_again} sent again{cause}")
        if progress.cause and now_s - self._done_s >= STALLED_S:
            words.append(f"no answer for {duration(now_s - self._done_s)}")
        return ", ".join(words)


class _Bar:
    """A bar that is drawn over and over."""

    interval_s = BAR_S

    def __init__(self, progress: Progress):
        from tqdm import tqdm

        self._progress = progress
        self._words = Words(progress, time.monotonic)
        self._bar = tqdm(
            total=progress.num_lines,
            initial=num_done(progress),
            unit=" req",
            file=sys.stderr,
            mininterval=0.5,
        )
        progress.on_change = self._count

    def _count(self, progress: Progress) -> None:
        self._bar.set_postfix_str(str(self._words), refresh=False)
        self._bar.update(num_done(progress) - self._bar.n)

    def renew(self) -> None:
        self._count(self._progress)
        self._bar.refresh()

    def close(self) -> None:
        self._count(self._progress)
        self._bar.close()


class Lines:
    """A line at times, for logs."""

    interval_s = LINE_S

    def __init__(self, progress: Progress, file: TextIO, clock: Callable[[], float]):
        self._progress, self._file, self._clock = progress, file, clock
        self._words = Words(progress, clock)
        self._shown_s, self._shown_done = clock(), num_done(progress)

    def renew(self) -> None:
        """A line if more requests have their results, else one every QUIET_S."""
        now_s, done = self._clock(), num_done(self._progress)
        if done == self._shown_done and now_s - self._shown_s < QUIET_S:
            return
        progress, words = self._progress, self._words
        speed = (done - self._shown_done) / max(now_s - self._shown_s, 1e-9)
        self._shown_s, self._shown_done = now_s, done
        share = 100 * done // progress.num_lines
        line = f"{done} of {progress.num_lines} requests ({share} %), {speed:.1f} req/s, {words}"
        if words.first_done < done < progress.num_lines and not progress.cause:
            of_one_s = (now_s - words.began_s) / (done - words.first_done)
            line += f", {duration(of_one_s * (progress.num_lines - done))} left"
        print(line, file=self._file, flush=True)

    def close(self) -> None:
        self.renew()


def num_done(progress: Progress) -> int:
    return progress.num_completed + progress.num_failed
