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

import psutil

log = logging.getLogger("penstock.worker")

MAX_COMPILE_S = 1.0
MAX_START_S = 30.0
PATIENCE = 10  # times the limit, by the clock, for a helper that waits for a CPU
POLL_S = 0.05
# The process that meets hostile input first gets no secrets of this one's environment.
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class HelperFailed(Exception):
    """The helper took too long, or died: there is no answer.

    `is_verdict`: the question is to blame, so that it would fail again: it used up its CPU time.
    """

    def __init__(self, why: str, *, is_verdict: bool = False, has_ended: bool = False):
        super().__init__(why)
        self.is_verdict, self.has_ended = is_verdict, has_ended


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
            env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self._exchange(b"", MAX_START_S, patience=1)  # it reports that it is ready
        except HelperFailed:
            self.close()
            log.error("the helper process that compiles grammars does not start")
            raise

    def _cpu_s(self) -> float:
        """CPU time that the process has used; 0, if it has just ended."""
        assert self._process is not None
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    def _exchange(self, line: bytes, limit_s: float, patience: int = PATIENCE) -> dict[str, Any]:
        """Write `line`, and read one back, both within `limit_s` of the helper's CPU time."""
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        began_s, began_cpu_s = time.monotonic(), self._cpu_s()
        deadline_s = began_s + limit_s
        while b"\n" not in self._unread:
            writers = [stdin] if line else []
            left_s = max(0.0, deadline_s - time.monotonic())
            readable, writable, _ = select.select([stdout], writers, [], left_s)
            if not (readable or writable):
                # By the clock it is late; but has it computed, or waited for a busy machine?
                left_s = limit_s - (self._cpu_s() - began_cpu_s)
                if left_s <= 0:
                    raise HelperFailed("it took too long", is_verdict=True)
                if time.monotonic() - began_s >= patience * limit_s:
                    raise HelperFailed("the machine is too busy")
                deadline_s = time.monotonic() + max(left_s, POLL_S)
            try:
                if writable:
                    line = line[os.write(stdin.fileno(), line) :]
                if readable:
                    received = os.read(stdout.fileno(), 1 << 16)
                    if not received:
                        raise HelperFailed("it ended", has_ended=True)
                    self._unread += received
            except OSError as error:
                raise HelperFailed("it ended", has_ended=True) from error
        answer, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(answer)
        return found
