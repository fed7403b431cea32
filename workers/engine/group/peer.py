"""The first rank's end of its connection to another rank, and how it notices that one is gone.

A thread of each rank says once a second that its process runs, with the statistics of its expert
cache. A process that says nothing for SILENCE_S hangs: it was stopped, or its machine or network is
gone. One whose pass never ends is noticed by the steps of the worker, which then make no progress
(engine/thread.py).
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.workers.engine.group import wire
from penstock.workers.errors import LoadError
from penstock.workers.stats import ExpertStats

PULSE_S = 1.0  # between two signs of life
SILENCE_S = 15.0  # after which a rank hangs: a process of a busy machine waits for seconds
_GONE = (-3, b"")


class Peer:
    """Another rank, by its number. A thread reads what it sends."""

    def __init__(self, number: int, connection: socket.socket, *, is_here: bool):
        """`is_here`: its process is one of this machine, whose end RankProcess notices."""
        self.number = number
        self.experts: ExpertStats | None = None  # of its expert cache, as it last said
        self._connection, self._is_here = connection, is_here
        self._messages: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._heard_s = time.monotonic()
        self._on_loss: Callable[[str], None] | None = None
        self._is_closed = False
        threading.Thread(target=self._read, name="penstock-rank-reader", daemon=True).start()

    def send(self, kind: int, contents: bytes = b"") -> None:
        """Raises PeerGone."""
        try:
            wire.send(self._connection, kind, contents)
        except wire.PeerGone:  # no request may end for that: its worker does, and it goes on
            self._lose(" has closed its connection")
            raise

    def receive(self) -> tuple[int, bytes]:
        """Kind and contents of its next message. Raises PeerGone."""
        kind, contents = self._messages.get()
        if (kind, contents) == _GONE:
            self._messages.put(_GONE)  # for the next one that asks
            raise wire.PeerGone("it has closed the connection")
        return kind, contents

    def await_ready(self) -> Any:
        """What it says with READY. Raises LoadError if it ends before, or cannot."""
        try:
            kind, contents = self.receive()
        except wire.PeerGone as error:
            raise LoadError(
                f"rank {self.number} of the group has ended while it loaded; its log says why"
            ) from error
        if kind != wire.READY:
            raise LoadError(f"rank {self.number} of the group: {contents.decode(errors='replace')}")
        return json.loads(contents)

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """From now on, call `on_loss`, on another thread, once it hangs or is gone."""
        self._heard_s, self._on_loss = time.monotonic(), on_loss
        threading.Thread(target=self._watch, name="penstock-rank-watch", daemon=True).start()

    def close(self) -> None:
        """The rank ends, if it waits for a message."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # it has closed it before
            self._connection.shutdown(socket.SHUT_RDWR)  # the reader wakes up
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                kind, contents = wire.receive(self._connection)
                self._heard_s = time.monotonic()
                if kind != wire.PULSE:
                    self._messages.put((kind, contents))
                elif contents:
                    self.experts = ExpertStats.from_json(contents)
        except wire.PeerGone:  # closed at that end, or at this one
            self._messages.put(_GONE)
        if not self._is_here:
            self._lose(", on another machine, has ended")

    def _watch(self) -> None:
        while not self._is_closed:
            silent_s = time.monotonic() - self._heard_s
            if silent_s > SILENCE_S:
                self._lose(f" hangs: it has said nothing for {silent_s:.0f} s")
            time.sleep(PULSE_S)

    def _lose(self, what: str) -> None:
        if self._on_loss is not None and not self._is_closed:
            self._on_loss(f"rank {self.number} of this worker's group{what}")


class Pulse:
    """The other end: sends, and says meanwhile that this process runs."""

    def __init__(
        self, connection: socket.socket, experts: Callable[[], ExpertStats | None] | None = None
    ):
        """`experts` returns the statistics of this process's expert cache, or None without one;
        each pulse carries them."""
        self._connection, self._lock, self._experts = connection, threading.Lock(), experts
        threading.Thread(target=self._run, name="penstock-pulse", daemon=True).start()

    def send(self, kind: int, contents: bytes = b"") -> None:
        """Raises PeerGone."""
        with self._lock:
            wire.send(self._connection, kind, contents)

    def _run(self) -> None:
        while True:
            try:
                found = None if self._experts is None else self._experts()
                self.send(wire.PULSE, b"" if found is None else found.to_json().encode())
            except wire.PeerGone:
                return  # the main thread finds that out, too
            time.sleep(PULSE_S)
