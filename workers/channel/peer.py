"""The state of each connected ingress in a worker's channel: its requests, and unsent deltas.

The channel sends one message a step, or one for several steps if the ingress reads slowly: while
the socket has no room, the deltas of later steps are merged here, those of one request into one. So
a slow reader delays no other reader and costs bounded memory. What is large is sent in several
messages: no message is as long as the other end refuses.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.codec import step_bytes
from penstock.workers.channel.delta_size import num_bytes, num_prompt_bytes, num_token_bytes
from penstock.workers.channel.encrypted import TlsEnd, message_connection
from penstock.workers.channel.framing import MessageConnection
from penstock.workers.channel.proof import Proof
from penstock.workers.request import Delta

log = logging.getLogger("penstock.worker")

MAX_HELLO_BYTES = 4096  # of a message, before its sender has proven itself
# Of deltas that an ingress has not read. At 50 tokens a second 128 requests fill it in 5 s, if each
# token has 15 alternatives; an ingress that reads nothing for so long does not live.
MAX_PENDING_BYTES = 64 << 20
# Of deltas in one message, as they lie in memory: on the wire they take less, a fourth at most.
MAX_STEP_BYTES = 8 << 20
_LISTS = ("token_ids", "logprobs", "prompt_logprobs", "events")
# They only grow; not every delta has them.
_COUNTS = (
    *("num_cached_tokens", "num_evicted_tokens"),
    *("num_draft_tokens", "num_accepted_tokens"),
)
_OF_FIRST = ("request_id", "times", "engine", "computes")
_OF_LAST = tuple(
    each.name for each in fields(Delta) if each.name not in (*_LISTS, *_COUNTS, *_OF_FIRST)
)


@dataclass(slots=True)
class RequestRoute:
    """Where the deltas of one request go, and how many tokens it has so far."""

    peer: IngressPeer
    stream_id: int
    name: str  # request id at the ingress
    num_prompt: int
    max_tokens: int  # 0: not given
    num_expected: int  # predicted tokens still to compute
    num_generated: int = 0  # tokens of its answer, with those that it began with
    is_begun: bool = False

    def count(self, delta: Delta) -> None:
        num_computed = len(delta.token_ids)
        if not self.is_begun:  # all that was known of it has been computed
            num_computed += self.num_prompt + self.num_generated
        self.is_begun = True
        self.num_expected = max(0, self.num_expected - num_computed)
        self.num_generated += len(delta.token_ids)


class Outbox:
    """The deltas on their way over one connection, by stream id.

    An ingress is disconnected when a step comes while more than `max_pending_bytes` of earlier ones
    are unread.
    """

    def __init__(
        self,
        connection: MessageConnection,
        epoch: int,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ):
        """`epoch`: of the worker. The connection's `on_room` must call `flush`."""
        self._connection = connection
        self._epoch = epoch
        self._max_pending_bytes = max_pending_bytes
        self.heard = 0  # number of the ingress's last message
        self._pending: dict[int, Delta] = {}
        self.num_pending_bytes = 0

    def push(self, deltas: list[tuple[int, Delta]]) -> None:
        """Send the deltas of one step, or keep them until there is room. Never blocks."""
        with self._connection.lock:
            if self.num_pending_bytes > self._max_pending_bytes:
                self._drop("it did not read what was sent to it")
                return
            for stream_id, delta in deltas:
                self.num_pending_bytes += _size_of(delta)
                earlier = self._pending.get(stream_id)
                self._pending[stream_id] = delta if earlier is None else joined(earlier, delta)
            self.flush()

    def flush(self) -> None:
        """Send what is pending, while there is room; with the connection's lock held."""
        while self._pending and not self._connection.is_stuck:
            part = self._next_part()
            try:
                message = step_bytes(part, self._epoch, self.heard)
            except Exception:  # ends one connection; this is the engine's thread, of others, too
                log.exception("the deltas of a step could not be encoded")
                self._drop("the deltas of a step could not be encoded")
                return
            self._connection.send(message)

    def _next_part(self) -> dict[int, Delta]:
        """Take out as much of what is pending as one message may have."""
        if self.num_pending_bytes <= MAX_STEP_BYTES:
            part, self._pending, self.num_pending_bytes = self._pending, {}, 0
            return part
        part, room = {}, MAX_STEP_BYTES
        for stream_id, delta in list(self._pending.items()):
            size = _size_of(delta)
            if size <= room:
                del self._pending[stream_id]
            elif part:  # it begins the next message
                break
            else:
                delta, rest = cut(delta, room)
                if rest is None:
                    del self._pending[stream_id]
                else:
                    self._pending[stream_id] = rest
                size = _size_of(delta)
            part[stream_id] = delta
            room -= size
            self.num_pending_bytes -= size
        return part

    def _drop(self, why: str) -> None:
        self._pending, self.num_pending_bytes = {}, 0
        self._connection.end_soon(why)


def joined(earlier: Delta, later: Delta) -> Delta:
    """`earlier` with `later` appended: as if one step had produced both."""
    for name in _LISTS:
        getattr(earlier, name).extend(getattr(later, name))
    for name in _COUNTS:
        setattr(earlier, name, max(getattr(earlier, name), getattr(later, name)))
    for name in _OF_LAST:
        setattr(earlier, name, getattr(later, name))
    return earlier


def cut(delta: Delta, most: int) -> tuple[Delta, Delta | None]:
    """`delta` in two that give it when `joined`: the first with as many tokens as take `most` bytes
    of memory, at least one, and with the scores of the prompt; None if these are all."""
    num, room = 0, most - num_prompt_bytes(delta)
    for i in range(len(delta.token_ids)):
        room -= num_token_bytes(delta, i)
        if room < 0 and num:
            break
        num += 1
    if num >= len(delta.token_ids):
        return delta, None
    first = Delta(
        delta.request_id,
        delta.token_ids[:num],
        num_cached_tokens=delta.num_cached_tokens,
        logprobs=delta.logprobs[:num],
        prompt_logprobs=delta.prompt_logprobs,
        times=delta.times,
        engine=delta.engine,
    )
    rest = replace(
        delta,
        token_ids=delta.token_ids[num:],
        logprobs=delta.logprobs[num:],
        prompt_logprobs=[],
        times=None,
    )
    return first, rest


def _size_of(delta: Delta) -> int:
    return num_bytes(delta) + num_prompt_bytes(delta)


class IngressPeer:
    """One connected ingress."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        number: int,
        *,
        host: str,
        token: str,
        epoch: int,
        on_message: Callable[[IngressPeer, bytes], None],
        on_end: Callable[[IngressPeer, str], None],
        max_pending_bytes: int,
        tls: TlsEnd | None,
    ):
        """`host`: where the connection comes from. `token`, `epoch`: of the worker. Callbacks:
        those of MessageConnection, with this peer. `tls`: None: the connection is in the clear."""
        self.number, self.host = number, host
        self.name = ""  # of the ingress, once it has proven itself
        self.proof = Proof(token, own="worker", peer="ingress", epoch=epoch)
        self.num_silent_ticks = 0
        self.connection = message_connection(
            loop,
            connection,
            tls,
            on_message=lambda message: on_message(self, message),
            on_end=lambda why: on_end(self, why),
            on_room=lambda: self.outbox.flush(),
            max_bytes=MAX_HELLO_BYTES,
        )
        self.outbox: Outbox = Outbox(self.connection, epoch, max_pending_bytes)

    def request_id(self, message: pb.Submit | pb.Cancel) -> str:
        """The engine's id: separates a second attempt from late deltas of the first."""
        return f"{message.request_id}#{self.number}.{message.stream_id}"
