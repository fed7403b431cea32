"""SIGINT and SIGTERM in `penstock serve`: the first one drains, the second one stops at once.

Signals are counted on a thread of their own, as Python runs handlers on the main thread only, and
that may be blocked in Ray's C++ code when a signal arrives. Nor does a handler raise an exception
where the process is to end at once: the main thread may be in a callback or in a destructor, where
Python prints an exception and drops it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

PATIENCE_S = 5.0


class Interrupted(KeyboardInterrupt):
    """A signal arrived while the start may be broken off."""


class Signals:
    """Counts SIGINT and SIGTERM from its creation on.

    Until `started` is called, the first one breaks the start off. With `unwinds` it raises
    Interrupted in the main thread, which has PATIENCE_S to clean up; without, the main thread stops
    where it is, and the process ends at once: nothing has been served. After `started`, a second
    signal gives the main thread PATIENCE_S. The process ends by `give_up`, called on another
    thread, and status 130.
    """

    def __init__(self, give_up: Callable[[], None], *, unwinds: bool):
        self.num_seen = 0
        self._give_up = give_up
        self._unwinds = unwinds
        self._is_starting = True
        self._is_ending = False  # the process ends without the main thread
        self._has_raised = False
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self._install()
        threading.Thread(target=self._count, name="penstock-signals", daemon=True).start()

    def started(self) -> None:
        """From now on the main thread, which calls this, looks at `num_seen`, and cleans up by
        itself."""
        self._install()  # Ray has put a handler before ours that prints a stack at each SIGTERM
        self._is_starting = False
        # A signal that came before this has another effect, which may have begun just now.
        while self._is_ending:
            time.sleep(0.01)

    def _install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_starting:
            return
        if self._unwinds:
            if not self._has_raised:
                self._has_raised = True
                raise Interrupted
            return
        while self._is_starting or self._is_ending:  # until the process has ended
            time.sleep(0.01)

    def _count(self) -> None:
        while number := os.read(self._read_fd, 1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            self.num_seen += 1
            if not self._unwinds:
                self._is_ending = True  # before the look: `started` sees it, or this sees `started`
                if self._is_starting:
                    self.exit()
                self._is_ending = False
            if self._is_starting or self._has_raised or self.num_seen == 2:
                timer = threading.Timer(PATIENCE_S, self.exit)
                timer.daemon = True  # the interpreter does not wait for it
                timer.start()

    def exit(self, status: int = 130, why: str = "") -> NoReturn:
        """Give up and end the process, without anything that would run at its exit.

        `why` is printed to stderr. Callable on any thread but the main one.
        """
        if why:
            print(f"penstock: {why}", file=sys.stderr, flush=True)
        # The main thread has stopped anywhere, perhaps with a lock that `give_up` needs.
        latest = threading.Timer(PATIENCE_S, os._exit, (status,))
        latest.daemon = True
        latest.start()
        try:
            self._give_up()
        finally:
            os._exit(status)
