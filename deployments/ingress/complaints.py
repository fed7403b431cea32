"""What an ingress says of faults on its event loop that no task handles."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

log = logging.getLogger("penstock.ingress")

COMPLAIN_EVERY_S = 10.0


class Complaints:
    """Handles what the event loop could not: each as always, but for descriptors that ran out.

    Then asyncio complains once for each place in the listener's queue, two thousand times a second.
    Logged with their tracebacks, those would hold the loop up until the workers take it for dead.
    """

    def __init__(self) -> None:
        self._quiet_until_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until_s:
            self._quiet_until_s = loop.time() + COMPLAIN_EVERY_S
            log.error(
                "connections cannot be accepted: %s; raise the limit of open files (ulimit -n)",
                error.strerror,
            )
