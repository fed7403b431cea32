"""A proxy between a client and a server of Penstock that keeps the bodies it passes on.

Answers pass as they come, so that a client that streams gets its stream.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

IGNORED = "x-penstock-ignored-fields"
KEPT_HEADERS = ("anthropic-beta", "anthropic-version", "openai-beta", "x-stainless-helper-method")
_OF_ONE_CONNECTION = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@dataclass
class Exchange:
    """One request as the client sent it, and what the server made of it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int
    ignored: list[str]
    error: str = ""
    answer: bytes = field(default=b"", repr=False)


class RecordingProxy:
    """Listens on a port of its own on the loopback. A context manager."""

    def __init__(self, server_url: str, change: Callable[[Any], Any] = lambda body: body):
        """`server_url`: of Penstock, with scheme and port. `change`: makes of the body that the
        client sends the one that the server gets, which is the one recorded."""
        parts = urlsplit(server_url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.exchanges: list[Exchange] = []
        self._change = change
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is printed."""

            def _pass_on(self) -> None:
                proxy.pass_on(self)

            do_GET = do_HEAD = do_POST = do_DELETE = _pass_on

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> RecordingProxy:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        """Send the request to the server, and its answer to the client."""
        size = int(handler.headers.get("content-length") or 0)
        content = handler.rfile.read(size)
        if content:
            content = json.dumps(self._change(json.loads(content))).encode()
        upstream = http.client.HTTPConnection(*self._server, timeout=300)
        headers = {
            name: value
            for name, value in handler.headers.items()
            if name.lower() not in _OF_ONE_CONNECTION | {"host", "accept-encoding"}
        }
        upstream.request(handler.command, handler.path, body=content or None, headers=headers)
        answer = upstream.getresponse()
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_ONE_CONNECTION:
                handler.send_header(name, value)
        handler.send_header("connection", "close")
        handler.end_headers()
        received = b""
        while chunk := answer.read1(65536):
            received += chunk
            handler.wfile.write(chunk)
            handler.wfile.flush()
        handler.close_connection = True
        upstream.close()
        self.exchanges.append(_exchange(handler, content, answer, received))


def _exchange(
    handler: BaseHTTPRequestHandler,
    content: bytes,
    answer: http.client.HTTPResponse,
    received: bytes,
) -> Exchange:
    kept = {name: handler.headers[name] for name in KEPT_HEADERS if name in handler.headers}
    ignored = answer.getheader(IGNORED)
    is_error = answer.status >= 400 or b"\nevent: error" in received
    return Exchange(
        method=handler.command,
        path=handler.path,
        headers=kept,
        body=json.loads(content) if content else None,
        status=answer.status,
        ignored=ignored.split(", ") if ignored else [],
        error=received.decode(errors="replace")[:500] if is_error else "",
        answer=received,
    )
