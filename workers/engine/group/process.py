"""A process of this machine that computes as another rank."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

log = logging.getLogger("penstock.engine")

FOLLOWER = (sys.executable, "-m", "penstock.workers.engine.group.follower")
EXIT_STATUS = 70  # of this process, if another rank has ended
END_S = 5.0  # for the others to end


class RankProcess:
    """One of the other ranks, and the thread that started it and waits for its end.

    That thread lives as long as the process: the kernel kills the process when its thread ends,
    which is with this process (follower.py asks for that), even if it has been stopped.
    """

    def __init__(self, *arguments: str, descriptors: tuple[int, ...] = (), secret: str = ""):
        """`descriptors`: that it inherits. `secret`: that it reads from its standard input."""
        self.is_vital = False  # without it, this process ends
        self._command, self._descriptors = [*FOLLOWER, *arguments], descriptors
        self._secret = secret
        self._is_started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-rank", daemon=True)
        self._thread.start()
        self._is_started.wait()

    def end(self, within_s: float = END_S) -> None:
        """Wait for its end, and kill it after `within_s`."""
        self._thread.join(within_s)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command, pass_fds=self._descriptors, stdin=subprocess.PIPE
            )
        finally:
            self._is_started.set()
        assert self._process.stdin is not None
        self._process.stdin.write(self._secret.encode())
        self._process.stdin.close()
        status = self._process.wait()
        if self.is_vital:
            end_with_group(f"a rank of this worker's group has ended with status {status}")


def end_with_group(why: str) -> None:
    """End this process: Ray Serve replaces the worker, and with it the whole group."""
    log.error("%s: the worker ends", why)
    os._exit(EXIT_STATUS)
