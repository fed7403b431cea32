"""HTTP/1.1 under uvicorn with bounds: sizes of heads, times of heads and bodies, connections.

Everything here is decided before the API key is looked at, since it protects from clients that have
none. httptools and uvicorn alone keep heads of any size, and wait for the rest of them for ever.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.core.errors import CATALOGUE

HEAD_PIECE = 16 << 10  # bytes of a head that are parsed at once: the parser copies what it has


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Of one connection. Sizes in bytes, times in seconds."""

    head_bytes: int = 16 << 10  # names and values of all headers, and the URL
    num_headers: int = 100
    url_bytes: int = 8 << 10
    num_pipelined: int = 8  # requests that were sent before the answer to an earlier one
    head_s: float = 10.0  # for a whole head, from its first byte or from the connection's begin
    body_gap_s: float = 30.0  # without a byte of the body
    body_s: float = 300.0  # for a whole body
    write_s: float = 60.0  # in which a client reads nothing of its answer


class _Refused(Exception):
    """Raised in a callback of the parser, which ends the parsing."""


class _ForHttp10(RequestResponseCycle):
    """An answer to a client of HTTP/1.0, which knows no chunks: without a content-length it ends
    with the connection, which uvicorn closes after each answer to such a client."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            if b"content-length" not in names:
                self.chunked_encoding = False  # decided here, where uvicorn would choose chunks
                self._ends_with_connection = True
        elif getattr(self, "_ends_with_connection", False):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. uvicorn is given this class, with `limits`, `counted` and `errors` bound.

    `counted`: the connections of this ingress. `errors` counts refusals by their code.

    The slots keep the attributes of an instance below the 30 that instances of a class share the
    names of. With one more, each connection has a hash table of 1.4 KiB of its own: 14 MiB for ten
    thousand idle connections.
    """

    __slots__ = (
        *("handshake", "_limits", "_counted", "_errors"),
        *("_is_in_head", "_has_ended", "_num_fed", "_num_head", "_refusal"),
        *("_timer", "_slow_timer", "_body_left_s", "_body_looked_s", "_arrived_s"),
    )

    def __init__(
        self,
        *args: Any,
        limits: HttpLimits,
        counted: Connections,
        errors: Counter[str],
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.handshake: object | None = None  # of TLS; it is counted until this protocol begins
        self._limits = limits
        self._counted = counted
        self._errors = errors
        self._is_in_head = True
        self._has_ended = False  # a message, within the bytes that were parsed last
        self._num_fed = 0  # bytes of this head, given to the parser
        self._num_head = 0  # bytes of its names and values
        self._refusal: str | None = None  # a code of the catalogue
        self._timer: asyncio.TimerHandle | None = None  # of the head or of the body
        self._slow_timer: asyncio.TimerHandle | None = None
        self._body_left_s = 0.0
        self._body_looked_s = self._arrived_s = 0.0  # of the loop's time

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.handshake is not None:
            self._counted.leave(self.handshake)
        address = self.client[0] if self.client else ""
        if not self._counted.enter(self, address, self._evict):
            self.transport.abort()  # without an answer, which would cost more than it helps
            return
        self._arm(self._limits.head_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._counted.leave(self)
        self._disarm()
        if self._slow_timer is not None:
            self._slow_timer.cancel()
        super().connection_lost(exc)

    def _evict(self) -> None:
        self.transport.abort()

    # What arrives.

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_in_head and self._timer is None:
            self._arm(self._limits.head_s, self._head_is_late)
        self._arrived_s = self.loop.time()
        while data and self._refusal is None and not self.transport.is_closing():
            was_in_head, self._has_ended = self._is_in_head, False
            piece = data[:HEAD_PIECE] if was_in_head else data
            data = data[len(piece) :]
            try:
                self.parser.feed_data(piece)
                if was_in_head and self._is_in_head and not self._has_ended:
                    self._count_fed(piece)
            except _Refused:
                pass
            except httptools.HttpParserUpgrade:
                return  # answered as if it had asked for none
            except httptools.HttpParserError:
                self._refusal = self._refusal or "invalid_http"
            if self._refusal is not None:
                self._refuse()

    def _count_fed(self, piece: bytes) -> None:
        """An endless header calls nothing back: the bytes that the parser has are counted, too.

        But for empty lines before a head, which some clients send after a body.
        """
        self._num_fed += len(piece if self._num_fed else piece.lstrip(b"\r\n"))
        if self._num_fed > self._limits.head_bytes + HEAD_PIECE:
            self._stop("head_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head = True, 0
        if len(self.pipeline) >= self._limits.num_pipelined:
            self._stop("invalid_http")

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > self._limits.url_bytes:
            self._stop("url_too_long")
        self._num_head += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            self._stop("invalid_http")  # after the body: a trailer, which no client of ours sends
        self._num_head += len(name) + len(value)
        if (
            self._num_head > self._limits.head_bytes
            or len(self.headers) >= self._limits.num_headers
        ):
            self._stop("head_too_large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_fed = False, 0
        self._counted.busy(self)
        self._body_left_s = self._limits.body_s
        self._body_looked_s = self.loop.time()
        self._arm(self._limits.body_gap_s, self._body_is_late)
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope["http_version"] == "1.0":
            self.cycle.__class__ = _ForHttp10  # its task has not begun
            self.cycle.waiting_for_100_continue = False  # it would take that for the answer

    def on_message_complete(self) -> None:
        self._is_in_head = self._has_ended = True  # what follows is the next one
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_head and not self._num_fed:
            self._disarm()  # of an empty line: the time of a kept connection runs now
        if not self.pipeline and not self.transport.is_closing():
            self._counted.idle(self, self._evict)

    # Time.

    def _arm(self, seconds: float, late: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is on its way; some clients send an empty line after a body.
            self._arm(self._limits.head_s, self._head_is_late)
            return
        self._refusal = "request_timeout"
        self._refuse()

    def _body_is_late(self) -> None:
        """`body_gap_s` after the last byte; the time in which this server reads nothing does not
        count."""
        self._timer = None
        gap_s, now_s = self._limits.body_gap_s, self.loop.time()
        if self.flow.read_paused:
            self._arrived_s = now_s
        else:
            self._body_left_s -= now_s - self._body_looked_s
        self._body_looked_s = now_s
        silent_s = now_s - self._arrived_s
        if silent_s >= gap_s or self._body_left_s <= 0:
            self._refusal = "request_timeout"
            self._refuse()
            return
        self._arm(min(gap_s - silent_s, max(self._body_left_s, 0.0)), self._body_is_late)

    def pause_writing(self) -> None:
        """The client does not read: what waits for it is bounded, and so is the time."""
        super().pause_writing()
        if self._slow_timer is None:
            self._slow_timer = self.loop.call_later(self._limits.write_s, self._reads_nothing)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None

    def _reads_nothing(self) -> None:
        self._errors["client_too_slow"] += 1
        self.transport.abort()

    # Refusals.

    def _stop(self, code: str) -> None:
        self._refusal = code
        raise _Refused

    def _refuse(self) -> None:
        """Answer with the refusal and close; while another answer is on its way, close only."""
        self._disarm()
        if self.transport.is_closing():
            return
        code = self._refusal or "invalid_http"
        self._errors[code] += 1
        if self._may_answer() and not (code == "request_timeout" and self._is_silent()):
            self.transport.write(_answer(code, self.server_state.default_headers))
        self.transport.close()

    def _is_silent(self) -> bool:
        """Nothing of a request has arrived: there is nothing to answer."""
        return self._is_in_head and not self._num_fed

    def _may_answer(self) -> bool:
        """Whether the client takes what is written now for the answer to what it sent last."""
        if self.cycle is None:
            return True
        if self._is_in_head:
            return self.cycle.response_complete
        return not self.cycle.response_started and not self.pipeline


def bounded_protocol(
    counted: Connections, errors: Counter[str], limits: HttpLimits | None = None
) -> Any:
    """What uvicorn.Config takes as `http`: the protocol with these bounds."""
    return functools.partial(
        BoundedProtocol, limits=limits or HttpLimits(), counted=counted, errors=errors
    )


def _answer(code: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    entry = CATALOGUE[code]
    error = {"message": entry.message, "type": entry.openai_type, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    lines = [
        *(name + b": " + value for name, value in headers),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    return STATUS_LINE[entry.http_status] + b"\r\n".join(lines) + b"\r\n\r\n" + body
