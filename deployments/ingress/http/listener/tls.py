"""uvicorn's server over TLS: connections are counted when they are accepted, and handshakes end.

uvicorn alone accepts any number of connections before their handshakes, and waits 60 s for each.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn

from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.http.listener.protocol import BoundedProtocol

HANDSHAKE_S = 5.0
SHUTDOWN_S = 5.0  # for a client's answer to the end of TLS
NO_DESCRIPTORS_S = 0.5  # until connections are accepted again
COMPLAIN_EVERY_S = 10.0

log = logging.getLogger("penstock.ingress")


class TlsServer(uvicorn.Server):
    """As uvicorn.Server, for `serve(sockets=[...])` with listening sockets."""

    def __init__(
        self,
        config: uvicorn.Config,
        context: ssl.SSLContext,
        connections: Connections,
        *,
        handshake_s: float = HANDSHAKE_S,
    ):
        """`config.http` is of `bounded_protocol`, with the same `connections`."""
        super().__init__(config)
        self._context = context
        self._counted = connections
        self._handshake_s = handshake_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers: list[Any] = [
            _Listener(each, self._context, self._counted, self._protocol, self._handshake_s)
            for each in sockets or ()
        ]
        self.started = True

    def _protocol(self) -> BoundedProtocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg, return-value]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


class _Listener:
    """Accepts the connections of one socket. uvicorn ends it as it ends asyncio's servers."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        counted: Connections,
        protocol: Callable[[], BoundedProtocol],
        handshake_s: float,
    ):
        listener.setblocking(False)
        self._listener = listener
        self._context = context
        self._counted = counted
        self._protocol = protocol
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.ensure_future(self._accept_all())

    def close(self) -> None:
        """Accept no more, and end the handshakes: what has not begun cannot be drained."""
        self._accepting.cancel()
        self._loop.remove_reader(self._listener)  # which uvicorn closes now
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept_all(self) -> None:
        quiet_until_s = 0.0
        while True:
            try:
                accepted, address = await self._loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # of a client that has left again
                if self._loop.time() >= quiet_until_s:
                    quiet_until_s = self._loop.time() + COMPLAIN_EVERY_S
                    log.error(
                        "connections cannot be accepted: %s; raise the limit of open files "
                        "(ulimit -n)",
                        error.strerror,
                    )
                await asyncio.sleep(NO_DESCRIPTORS_S)
                continue
            task = self._loop.create_task(self._serve(accepted, str(address[0])))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _serve(self, accepted: socket.socket, address: str) -> None:
        """One handshake; the connection then belongs to its protocol. It counts as idle before."""
        task = asyncio.current_task()
        assert task is not None
        if not self._counted.enter(task, address, lambda: _end(task)):
            accepted.close()
            return
        protocol = self._protocol()
        protocol.handshake = task
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except (OSError, asyncio.CancelledError):  # ssl.SSLError and TimeoutError are OSErrors
            accepted.close()
        finally:
            self._counted.leave(task)


def _end(handshake: asyncio.Task[None]) -> None:
    handshake.cancel()
