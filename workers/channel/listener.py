"""The worker's port: accepts connections, and passes on those of ingresses that prove themselves.

A connection begins with a challenge of this worker. Until its other end has answered that it knows
the worker's token, it may say little, and not for long; such connections are few at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.encrypted import TlsSource
from penstock.workers.channel.framing import CLOSED, MAX_MESSAGE_BYTES
from penstock.workers.channel.peer import IngressPeer
from penstock.workers.channel.refusals import RefusalLog
from penstock.workers.channel.unproven import Unproven
from penstock.workers.stats import WorkerInfo

log = logging.getLogger("penstock.worker")

ACCEPT_RETRY_S = 0.1  # after a failed accept: the system may be out of file descriptors
STOPS = "this worker stops"


@dataclass(frozen=True, slots=True)
class PeerHandlers:
    """What is called of ingresses that have proven themselves; all on the listener's loop."""

    proven: Callable[[IngressPeer, bytes], None]  # with the proof of this worker, for Welcome
    message: Callable[[IngressPeer, bytes], None]
    ended: Callable[[IngressPeer, str], None]  # and why


class ChannelListener:
    """All connections with one worker. Lives on `loop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        info: WorkerInfo,
        handlers: PeerHandlers,
        max_pending_bytes: int,
        tls: TlsSource | None = None,
    ):
        """`info`: of the worker; its token and epoch count. `tls`: None: in the clear."""
        self.peers: set[IngressPeer] = set()  # that have proven themselves
        self._loop, self._info, self._handlers = loop, info, handlers
        self._max_pending_bytes, self._tls = max_pending_bytes, tls
        self._unproven: Unproven[IngressPeer] = Unproven(refuse)
        self._refusals = RefusalLog(log)
        self._numbers = itertools.count()

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections for ever."""
        while True:
            try:
                connection, place = await self._loop.sock_accept(listener)
                self._open(connection, place[0])
            except OSError as error:
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)

    def close(self) -> None:
        """End all connections."""
        for peer in [*self.peers, *self._unproven]:
            peer.connection.end(STOPS)

    def _open(self, connection: socket.socket, host: str) -> None:
        peer = IngressPeer(
            self._loop,
            connection,
            next(self._numbers),
            host=host,
            token=self._info.token,
            epoch=self._info.epoch,
            on_message=self._take,
            on_end=self._ended,
            max_pending_bytes=self._max_pending_bytes,
            tls=None if self._tls is None else self._tls(),
        )
        self._unproven.add(peer)
        challenge = pb.Challenge(nonce=peer.proof.nonce)
        peer.connection.send(pb.DownMessage(challenge=challenge).SerializeToString())

    def _take(self, peer: IngressPeer, data: bytes) -> None:
        if peer.name:
            self._handlers.message(peer, data)
        else:
            self._greet(peer, data)

    def _greet(self, peer: IngressPeer, data: bytes) -> None:
        """Pass on an ingress that knows the token and addresses this epoch; refuse any other."""
        try:
            message = pb.UpMessage.FromString(data)
        except DecodeError:
            peer.connection.end("it does not speak this protocol")
            return
        hello = message.hello
        if not message.HasField("hello") or message.number != 1:
            refuse(peer, "the first message must be Hello")
        elif message.epoch != self._info.epoch:
            refuse(peer, "this worker has restarted with a new epoch")
        elif not peer.proof.is_of_peer(hello.proof, hello.nonce, peer.connection.binding):
            refuse(peer, "it does not know this worker's token")
        else:
            self._unproven.discard(peer)
            self.peers.add(peer)
            peer.name, peer.outbox.heard = hello.ingress_id or "(unnamed)", message.number
            peer.connection.max_bytes = MAX_MESSAGE_BYTES
            own = peer.proof.of_own(hello.nonce, peer.connection.binding)
            self._handlers.proven(peer, own)

    def _ended(self, peer: IngressPeer, why: str) -> None:
        if peer.name:
            self.peers.discard(peer)
            self._handlers.ended(peer, why)
            return
        self._unproven.discard(peer)
        if why not in (CLOSED, STOPS):
            self._refusals.note("ingress", peer.host, why)


def refuse(peer: IngressPeer, why: str) -> None:
    """Tell it why, and end its connection."""
    peer.connection.send(pb.DownMessage(rejection=pb.Rejection(reason=why)).SerializeToString())
    peer.connection.end(why)
