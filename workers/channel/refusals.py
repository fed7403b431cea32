"""The log of connections that were refused: one line an address and minute, whoever knocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

QUIET_S = 60.0
MAX_ADDRESSES = 1024  # that are remembered; while so many are, new ones are not logged


class RefusalLog:
    """Writes why an address was refused, unless it wrote of that address within a minute."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic):
        self._log, self._clock = log, clock
        self._logged_s: dict[str, float] = {}  # by address, the earliest first

    def note(self, role: str, address: str, why: str) -> None:
        """`role` of the refused end, "ingress", "worker" or "gate"; `address`: its host, or
        host:port where it listens."""
        now_s = self._clock()
        for earliest in list(self._logged_s):
            if now_s - self._logged_s[earliest] < QUIET_S:
                break
            del self._logged_s[earliest]
        if address in self._logged_s or len(self._logged_s) >= MAX_ADDRESSES:
            return
        self._logged_s[address] = now_s
        self._log.warning("refused the %s at %s: %s", role, address, why)
