"""CPU priority for a client that shares the machine with the server that it loads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

NICE = -10


def take_precedence() -> None:
    """This process goes before those of the server, as one on another machine does.

    Without it, a client whose turn comes late measures its own waits. Without the right to it
    (root, or CAP_SYS_NICE) nothing changes.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)


@contextlib.contextmanager
def precedence() -> Iterator[None]:
    """`take_precedence` for a while. Processes that are started meanwhile have it, too."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    take_precedence()
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)
