"""A transport for httpx or httpx2: streams of server-sent events go on after a lost connection.

    http_client = openai.DefaultHttpxClient(transport=ResumingTransport())
    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", http_client=http_client)

OpenAI's and Anthropic's clients need no other change: they see a pause. The server must keep
journals (its setting state_url); without them a lost connection is the error that it was.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

try:  # that of OpenAI's client from 3.0 on
    _http: Any = importlib.import_module("httpx2")
except ImportError:
    _http = importlib.import_module("httpx")

RESUMABLE, CALL_ID, EVENT_ID = "x-penstock-resumable", "x-request-id", "last-event-id"
WAIT_S = 0.25  # between attempts
# In the event with which a server ends a stream that another one can continue, as in its own drain:
# as each API writes it. Such an event has no id.
LOST_MARKS = (b'"code":"worker_lost"', b'"type":"worker_lost"', b'"type":"overloaded_error"')
# Statuses of a server that starts, or of a proxy before it.
REFUSALS = (502, 503, 504)


class _Resumption:
    """One stream: how to ask for the rest of it, and for how long to try."""

    def __init__(self, request: Any, response: Any, resume_s: float):
        self._request = request
        self._call_id = response.headers[CALL_ID]
        self._resume_s = resume_s
        self._until_s: float | None = None  # of the attempts since the last event
        self._event_id: str | None = None
        self._partial = b""
        self.is_lost = False  # the server has said that it cannot go on

    def whole_events(self, data: bytes) -> bytes:
        """What `data` completes: a part of an event would come a second time."""
        events, separator, self._partial = (self._partial + data).rpartition(b"\n\n")
        for line in reversed(events.split(b"\n")):
            if line.startswith(b"id: "):
                self._event_id, self._until_s = line[4:].decode(), None
                # Another one than the header's, where a GET follows a response.
                self._call_id = self._event_id.partition("/")[0]
                break
        begin, _, last = events.rpartition(b"\n\n")
        if _is_loss(last) and self.may_try():
            self.is_lost = True
            return begin + separator if begin else b""
        return events + separator

    def lost(self) -> Any:
        """The request for the rest. What the server has answered so far counts no more."""
        self._partial, self.is_lost = b"", False
        headers = {
            name: value
            for name, value in self._request.headers.items()
            if name not in ("content-type", "content-length", "transfer-encoding", EVENT_ID)
        }
        if self._event_id is not None:
            headers[EVENT_ID] = self._event_id
        path = f"/v1/penstock/streams/{self._call_id}"
        url = self._request.url.copy_with(raw_path=path.encode())
        extensions = self._request.extensions
        return _http.Request("GET", url, headers=headers, extensions=extensions)

    def may_try(self) -> bool:
        if self._until_s is None:
            self._until_s = time.monotonic() + self._resume_s
        return time.monotonic() < self._until_s


def _is_loss(event: bytes) -> bool:
    has_id = event.startswith(b"id: ") or b"\nid: " in event
    return not has_id and any(mark in event for mark in LOST_MARKS)


def _is_resumable(response: Any) -> bool:
    kind = response.headers.get("content-type", "")
    return response.headers.get(RESUMABLE) == "1" and kind.startswith("text/event-stream")


class ResumingTransport(_http.BaseTransport):
    """Around another transport (`inner`); `resume_s`: longest wait for a lost stream to go on."""

    def __init__(self, inner: Any = None, *, resume_s: float = 60.0):
        self._inner = inner or _http.HTTPTransport()
        self._resume_s = resume_s

    def handle_request(self, request: Any) -> Any:
        response = self._inner.handle_request(request)
        if _is_resumable(response):
            resumption = _Resumption(request, response, self._resume_s)
            response.stream = _Stream(self._inner, response.stream, resumption)
        return response

    def close(self) -> None:
        self._inner.close()


class _Stream(_http.SyncByteStream):
    def __init__(self, transport: Any, stream: Any, resumption: _Resumption):
        self._transport, self._stream, self._resumption = transport, stream, resumption

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                for data in self._stream:
                    whole = self._resumption.whole_events(data)
                    if whole:
                        yield whole
                    if self._resumption.is_lost:
                        raise _http.RemoteProtocolError("the server has ended the stream")
                return
            except _http.TransportError as error:
                self._reconnect(error)

    def _reconnect(self, lost: Exception) -> None:
        """Replace the stream. Raises `lost` if the server does not continue it."""
        self._stream.close()
        while True:
            try:
                response = self._transport.handle_request(self._resumption.lost())
            except _http.TransportError:
                response = None
            if response is not None:
                if response.status_code == 200:
                    self._stream = response.stream
                    return
                response.close()
                if response.status_code not in REFUSALS:
                    raise lost
            if not self._resumption.may_try():
                raise lost
            time.sleep(WAIT_S)

    def close(self) -> None:
        self._stream.close()


class AsyncResumingTransport(_http.AsyncBaseTransport):
    """As ResumingTransport, for asyncio."""

    def __init__(self, inner: Any = None, *, resume_s: float = 60.0):
        self._inner = inner or _http.AsyncHTTPTransport()
        self._resume_s = resume_s

    async def handle_async_request(self, request: Any) -> Any:
        response = await self._inner.handle_async_request(request)
        if _is_resumable(response):
            resumption = _Resumption(request, response, self._resume_s)
            response.stream = _AsyncStream(self._inner, response.stream, resumption)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _AsyncStream(_http.AsyncByteStream):
    def __init__(self, transport: Any, stream: Any, resumption: _Resumption):
        self._transport, self._stream, self._resumption = transport, stream, resumption

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async for data in self._stream:
                    whole = self._resumption.whole_events(data)
                    if whole:
                        yield whole
                    if self._resumption.is_lost:
                        raise _http.RemoteProtocolError("the server has ended the stream")
                return
            except _http.TransportError as error:
                await self._reconnect(error)

    async def _reconnect(self, lost: Exception) -> None:
        """Replace the stream. Raises `lost` if the server does not continue it."""
        await self._stream.aclose()
        while True:
            try:
                response = await self._transport.handle_async_request(self._resumption.lost())
            except _http.TransportError:
                response = None
            if response is not None:
                if response.status_code == 200:
                    self._stream = response.stream
                    return
                await response.aclose()
                if response.status_code not in REFUSALS:
                    raise lost
            if not self._resumption.may_try():
                raise lost
            await asyncio.sleep(WAIT_S)

    async def aclose(self) -> None:
        await self._stream.aclose()
