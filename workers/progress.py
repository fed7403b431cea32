"""How far the download of a model, or its loading, has got: as a bar on a terminal, else as lines.

Whoever does the work calls a `Report` as often as it likes; what shows it decides how often.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

log = logging.getLogger("penstock.loading")

DOWNLOADING = "downloading"
WAITING = "waiting for another process's download of the model"
COMPILING = "compiling the CPU operators (about a minute, once on each machine)"
LOADING = "loading weights"
KEEPING = "storing packed weights"  # for the next start
PREPARING = "preparing the engine"  # allocates the KV cache, measures, captures graphs
PHASES = (DOWNLOADING, WAITING, COMPILING, LOADING, KEEPING, PREPARING)  # in this order

LINE_S = 10.0  # at least one line in this time
LINE_PERCENT = 10  # and one at each of these steps, but
BETWEEN_S = 1.0  # not sooner after another, and
QUIET_S = 2.0  # none for what takes no longer than this


@dataclass(frozen=True, slots=True)
class Progress:
    """A phase, and the bytes of it that are done. `total` 0: it is not measured in bytes."""

    phase: str
    done: int = 0
    total: int = 0

    @property
    def percent(self) -> int:
        return min(100, 100 * self.done // self.total) if self.total else 0

    def __str__(self) -> str:
        if not self.total:
            return self.phase
        return f"{self.phase} {self.percent} % ({size(self.done)} of {size(self.total)})"


Report = Callable[[Progress], None]


def size(num_bytes: float) -> str:
    """As "1.5 GiB"; below a MiB, bytes."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


class ProgressLines:
    """Says a line at the steps above, with the rate and what is left."""

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._phase = ""
        self._began_s = self._said_s = 0.0
        self._began_at = 0  # bytes
        self._percent = 0  # of the last line

    def __call__(self, progress: Progress) -> None:
        now_s = self._clock()
        if progress.phase != self._phase:
            self._phase, self._began_s, self._said_s = progress.phase, now_s, now_s
            self._began_at = progress.done
            self._percent = progress.percent // LINE_PERCENT * LINE_PERCENT
            return
        is_late = now_s - self._said_s >= LINE_S
        is_step = progress.percent >= self._percent + LINE_PERCENT
        is_soon = now_s - self._said_s < BETWEEN_S or now_s - self._began_s < QUIET_S
        if is_late or (is_step and not is_soon):
            self._said_s = now_s
            self._percent = progress.percent // LINE_PERCENT * LINE_PERCENT
            self._say(f"{progress}{self._rate(progress, now_s - self._began_s)}")

    def _rate(self, progress: Progress, took_s: float) -> str:
        """The rate since the phase began, and the time that is left at that rate."""
        num_bytes = progress.done - self._began_at
        if not progress.total or num_bytes <= 0:
            return f", for {took_s:.0f} s"
        left_s = (progress.total - progress.done) * took_s / num_bytes
        return f", {size(num_bytes / took_s)}/s, {left_s:.0f} s left"

    def finish(self) -> None:
        """Nothing is open; as ProgressBar has it."""

    close = finish


class ProgressBar:
    """A bar on stderr for each phase that is measured in bytes."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if progress.phase != self._phase:
            self.finish()  # the last state of a phase may not have been seen
            self._phase = progress.phase
        if not progress.total:
            return
        bar = self._bar
        if bar is None:
            bar = self._bar = tqdm(
                desc=progress.phase,
                total=progress.total,
                initial=progress.done,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                file=sys.stderr,
            )
        bar.total = progress.total
        bar.update(progress.done - bar.n)

    def finish(self) -> None:
        """End the bar, full."""
        if self._bar is not None and self._bar.total:
            self._bar.update(self._bar.total - self._bar.n)
        self.close()

    def close(self) -> None:
        """End the bar, and leave it as it is."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def shown(say: Callable[[str], object] = log.info) -> ProgressBar | ProgressLines:
    """A bar if stderr is a terminal, else lines by `say`."""
    return ProgressBar() if sys.stderr.isatty() else ProgressLines(say)


@contextmanager
def showing(report: Report | None) -> Iterator[Report]:
    """`report`, or without one what `shown` returns, ended afterwards."""
    if report is not None:
        yield report
        return
    own = shown()
    try:
        yield own
    finally:
        own.close()


def told(progress: bool | Report) -> Report | None:
    """For `showing`. True: whatever it chooses; False: nobody is told."""
    if isinstance(progress, bool):
        return None if progress else lambda _: None
    return progress


def counted(report: Report, phase: str, total: int) -> Callable[[int], None]:
    """Takes the bytes of each piece that is done, and reports all so far of `total`."""
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(Progress(phase, done, total))

    report(Progress(phase, 0, total))
    return add
