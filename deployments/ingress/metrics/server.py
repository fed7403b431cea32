"""The port that Prometheus scrapes: a small HTTP listener on a thread of its own, so that a scrape
does not use the ingress's event loop.
"""

from __future__ import annotations

import errno
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.registry import Collector

MAX_PORTS = 64  # tried from the first one on
SLOW_CLIENT_S = 10.0  # a client that is silent for this long is disconnected


class MetricsServer:
    """A listener for Prometheus, on a thread of its own: a scrape delays no token."""

    def __init__(self, collector: Collector, host: str, first_port: int):
        """Listens on `first_port`, or on the next one that is free (0: on any).

        Each ingress replica of a machine has its own counts; a port shared by several would answer
        now with one replica's, now with another's. Raises OSError if no port is free.
        """
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        ports = range(first_port, min(first_port + MAX_PORTS, 65536)) if first_port else (0,)
        for port in ports:
            try:
                self._listener = _Listener((host, port), registry)
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

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry):
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.registry = registry
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """GET /metrics, always in the plain text format, whatever the Accept header says.

    The client library's own server would turn `vllm:` into `vllm_` in the newer format, which is
    the one that Prometheus asks for first.
    """

    server: _Listener
    timeout = SLOW_CLIENT_S
    server_version, sys_version = "penstock", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        text = generate_latest(self.server.registry)
        self.send_response(200)
        self.send_header("content-type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: there is a scrape every few seconds."""
