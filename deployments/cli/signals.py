"""SIGINT and SIGTERM in `penstock serve`: the first one drains, the second one stops at once.

Signals are counted on a thread of their own, as Python runs handlers on the main thread only, and
that may be blocked in Ray's C++ code when a signal arrives.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

PATIENCE_S = 5.0
START_PATIENCE_S = 0.5  # nothing has been served: there is nothing to finish


class Interrupted(KeyboardInterrupt):
    """A signal arrived while `may_break_off` was set."""


class Signals:
    """Counts SIGINT and SIGTERM from its creation on.

    While `may_break_off`, the first one raises Interrupted in the main thread. If the process is
    still there `start_patience_s` later, or `PATIENCE_S` after a second signal, `give_up` is called
    on another thread and the process exits with status 130.
    """

    def __init__(self, give_up: Callable[[], None], start_patience_s: float = START_PATIENCE_S):
        self.num_seen = 0
        self._start_patience_s = start_patience_s
        self.may_break_off = True
        self._give_up = give_up
        self._handled = False
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self.take_over()
        threading.Thread(target=self._count, name="penstock-signals", daemon=True).start()

    def take_over(self) -> None:
        """Install the handlers; called again after Ray has installed its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.may_break_off and not self._handled:
            self._handled = True
            raise Interrupted

    def _count(self) -> None:
        while number := os.read(self._read_fd, 1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            self.num_seen += 1
            if self.may_break_off or self.num_seen == 2:
                patience_s = self._start_patience_s if self.may_break_off else PATIENCE_S
                timer = threading.Timer(patience_s, self.exit_now)
                timer.daemon = True  # the interpreter does not wait for it
                timer.start()

    def exit_now(self) -> None:
        """Give up and end the process, without anything that would run at its exit."""
        self._give_up()
        os._exit(130)
