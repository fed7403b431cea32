"""The port for operators: metrics for Prometheus, and probes for an orchestrator.

A small HTTP listener on threads of its own: a scrape delays no token, and no request a probe.
"""

from __future__ import annotations

import errno
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.registry import Collector

from penstock.deployments.ingress.metrics.probes import Probes

MAX_PORTS = 64  # tried from the first one on
SLOW_CLIENT_S = 10.0  # a client that is silent for this long is disconnected


class MetricsPage:
    """What Prometheus reads of one ingress: a collector, and this process. Any thread may ask."""

    def __init__(self, collector: Collector):
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """In the plain text format."""
        return generate_latest(self._registry)


class MetricsServer:
    """A listener for Prometheus and, with `probes`, for GET /live, /ready and /health."""

    def __init__(
        self, collector: Collector, host: str, first_port: int, probes: Probes | None = None
    ):
        """Listens on `first_port`, or on the next one that is free (0: on any).

        Each ingress replica of a machine has its own counts; a port shared by several would answer
        now with one replica's, now with another's. Raises OSError if no port is free.
        """
        page = MetricsPage(collector)
        checks: dict[str, Callable[[], str]] = {}
        if probes is not None:
            ready = probes.why_not_ready
            checks = {"/live": probes.why_not_live, "/ready": ready, "/health": ready}
        ports = range(first_port, min(first_port + MAX_PORTS, 65536)) if first_port else (0,)
        for port in ports:
            try:
                self._listener = _Listener((host, port), page, checks)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or port == ports[-1]:
                    raise
        self.port = int(self._listener.server_address[1])
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._thread = threading.Thread(
            target=self._listener.serve_forever, name="penstock-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        page: MetricsPage,
        checks: Mapping[str, Callable[[], str]],
    ):
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.page, self.checks = page, checks
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """GET /metrics, always in the plain text format, whatever the Accept header says; and probes.

    The client library's own server would turn `vllm:` into `vllm_` in the newer format, which is
    the one that Prometheus asks for first.
    """

    server: _Listener
    timeout = SLOW_CLIENT_S
    server_version, sys_version = "penstock", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, CONTENT_TYPE_PLAIN_0_0_4, self.server.page.text())
        elif path in self.server.checks:
            reason = self.server.checks[path]()
            body = {"status": "unavailable", "reason": reason} if reason else {"status": "ok"}
            text = json.dumps(body).encode()
            self._answer(503 if reason else 200, "application/json", text)
        else:
            self.send_error(404)

    do_HEAD = do_GET  # `_answer` and `send_error` leave the body out

    def _answer(self, status: int, content_type: str, text: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: there is a scrape every few seconds."""
