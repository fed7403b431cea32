"""Asks for /health all the time, in a process of its own: what it takes is the server's doing."""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from benchmarks.common.priority import take_precedence
from benchmarks.faults.child import Child, answer

EVERY_S = 0.02
TIMEOUT_S = 30.0


@dataclass
class Health:
    """Seconds of each answer, and failures."""

    times_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    is_over: bool = False
    has_ended: bool = False

    @property
    def longest_s(self) -> float:
        return max(self.times_s, default=float("inf"))

    @property
    def num_answers(self) -> int:
        return len(self.times_s)


class HealthProbe(Child[Health]):
    """Begins at once; `end` returns what it saw."""

    def __init__(self, url: str):
        super().__init__(_serve, url)

    def end(self) -> Health:
        found: Health = self.ask(_end)
        self.kill()
        return found


def _end(health: Health) -> Health:
    health.is_over = True
    while not health.has_ended:  # the last answer counts, too
        time.sleep(EVERY_S)
    return health


def _serve(pipe: Connection, url: str) -> None:
    take_precedence()
    health = Health()
    threading.Thread(target=_probe, args=(url, health), daemon=True).start()
    pipe.send("probing")
    answer(pipe, health)


def _probe(url: str, health: Health) -> None:
    host, port = urlsplit(url).hostname or "", urlsplit(url).port
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    while not health.is_over:
        began_s = time.monotonic()
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            health.num_failed += response.status != 200
        except (OSError, http.client.HTTPException):
            health.num_failed += 1
            connection.close()
        health.times_s.append(time.monotonic() - began_s)
        time.sleep(EVERY_S)
    health.has_ended = True
