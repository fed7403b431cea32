"""Refuses runtime environments, on a Ray that has no agent which could make them.

A program of a user may connect to the Ray of `penstock serve` and ask for an environment (pip, a
working directory, variables). The raylet then asks its agent over HTTP, and ends with every process
if none answers within 30 s. So the driver answers, on a thread: the program gets an error that says
what to do, and the server goes on.
"""

from __future__ import annotations

import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

log = logging.getLogger("penstock.serve")

REASON = (
    "the Ray that `penstock serve` starts makes no runtime environments; start Ray with "
    "`ray start --head`, serve on it with `penstock serve --ray-address auto`, and use that"
)
LONGEST_S = 5.0  # for a request to arrive
LARGEST_BYTES = 1 << 20


class NoEnvironments:
    """Answers the raylet's requests from `listen` on, until it is closed."""

    def __init__(self) -> None:
        self._server: ThreadingHTTPServer | None = None

    def listen(self, host: str) -> int:
        """The port. `host`: the node's address, to which the raylet connects. Raises OSError."""
        self.close()  # of a first try to start Ray
        self._server = ThreadingHTTPServer((host, 0), _Refusal)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, name="no-environments", daemon=True).start()
        return self._server.server_address[1]

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Refusal(BaseHTTPRequestHandler):
    timeout = LONGEST_S

    def do_POST(self) -> None:
        """Refuse an environment; there is none to delete either, and none to list."""
        from ray.core.generated import runtime_env_agent_pb2 as messages

        if not 0 <= int(self.headers.get("Content-Length", 0)) <= LARGEST_BYTES:
            self.send_error(413)
            return
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        replies = {
            "/get_or_create_runtime_env": messages.GetOrCreateRuntimeEnvReply(
                status=messages.AGENT_RPC_STATUS_FAILED, error_message=REASON
            ),
            "/delete_runtime_env_if_possible": messages.DeleteRuntimeEnvIfPossibleReply(),
            "/get_runtime_envs_info": messages.GetRuntimeEnvsInfoReply(),
        }
        reply = replies.get(self.path)
        if reply is None:
            self.send_error(404)
            return
        body = reply.SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
