"""Two connected MessageConnections, in the clear or under TLS, over sockets that take what a test
lets them take."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.deployments.security.authority import make_all
from penstock.deployments.security.cluster_links import ClusterCertificate
from penstock.workers.channel.encrypted import TlsEnd, message_connection

CLUSTER = "test"


class Choppy:
    """A socket that sends and reads in pieces of random sizes, with `seed`; while `is_blocked`, it
    sends nothing."""

    def __init__(self, inner: socket.socket, seed: int | None = None):
        self._inner, self._random = inner, random.Random(seed)
        self.is_choppy, self.is_blocked = seed is not None, False

    def send(self, data: bytes) -> int:
        if self.is_blocked:
            raise BlockingIOError
        if not self.is_choppy:
            return self._inner.send(data)
        if self._random.random() < 0.2:
            raise BlockingIOError
        return self._inner.send(data[: self._random.choice((1, 3, 100, 5000, 1 << 17))])

    def recv(self, num_bytes: int) -> bytes:
        if self.is_choppy:
            num_bytes = min(num_bytes, self._random.choice((1, 7, 21, 4000, 1 << 17)))
        return self._inner.recv(num_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class End:
    """A connection, what it received, and why it ended."""

    def __init__(
        self,
        connection: socket.socket,
        tls: TlsEnd | None = None,
        seed: int | None = None,
        **rest: Any,
    ):
        self.messages: list[bytes] = []
        self.reasons: list[str] = []
        self.socket = Choppy(connection, seed)
        self.connection = message_connection(
            asyncio.get_event_loop(),
            self.socket,  # type: ignore[arg-type]
            tls,
            on_message=self.messages.append,
            on_end=self.reasons.append,
            **rest,
        )


class Certs:
    """A cluster's certificates, and the TLS ends made of them."""

    def __init__(self, folder: Path):
        make_all(folder, CLUSTER, days=1)
        self.folder = folder
        self.worker = ClusterCertificate(str(folder), "worker")
        self.ingress = ClusterCertificate(str(folder), "ingress")

    def pair(self) -> tuple[TlsEnd, TlsEnd]:
        """A client's end and its server's, as ingress and worker have them."""
        return self.ingress.client_end("worker"), self.worker.server_end("ingress")


def sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection, the one that connected first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def both(
    tls: tuple[TlsEnd | None, TlsEnd | None], seed: int | None = None, **rest: Any
) -> tuple[End, End]:
    one, other = sockets()
    return (
        End(one, tls[0], seed, **rest),
        End(other, tls[1], None if seed is None else seed + 1, **rest),
    )


async def until(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)
