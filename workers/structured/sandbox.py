"""Runs the helper process (trial.py): sends a question, waits at most a second, kills and restarts.

The helper is a sandbox: a hostile grammar can only crash or stall that process.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from typing import Any

log = logging.getLogger("penstock.worker")

MAX_COMPILE_S = 1.0
MAX_START_S = 30.0


class HelperFailed(Exception):
    """The helper took too long, or died: there is no answer."""


class Helper:
    """One helper process, started on first use. One caller at a time."""

    def __init__(self, limit_s: float = MAX_COMPILE_S):
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send `question` and return the answer. Raises HelperFailed."""
        if self._process is None:
            self._start()
        try:
            return self._exchange(json.dumps(question).encode() + b"\n", self._limit_s)
        except HelperFailed:
            self.close()
            raise

    def close(self) -> None:
        """Kill the process; the next question starts another."""
        process, self._process, self._unread = self._process, None, b""
        if process is None:
            return
        process.kill()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        process.wait()

    def _start(self) -> None:
        command = [sys.executable, "-m", "penstock.workers.structured.trial"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a crash of the library may quote the client there
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self._exchange(b"", MAX_START_S)  # it reports that it is ready
        except HelperFailed:
            self.close()
            log.error("the helper process that compiles grammars does not start")
            raise

    def _exchange(self, line: bytes, limit_s: float) -> dict[str, Any]:
        """Write `line`, and read one back, both before the limit."""
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        deadline_s = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            writers = [stdin] if line else []
            left_s = max(0.0, deadline_s - time.monotonic())
            readable, writable, _ = select.select([stdout], writers, [], left_s)
            if not (readable or writable):
                raise HelperFailed("it took too long")
            try:
                if writable:
                    line = line[os.write(stdin.fileno(), line) :]
                if readable:
                    received = os.read(stdout.fileno(), 1 << 16)
                    if not received:
                        raise HelperFailed("it ended")
                    self._unread += received
            except OSError as error:
                raise HelperFailed("it ended") from error
        answer, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(answer)
        return found
