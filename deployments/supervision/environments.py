"""Makes the runtime environments of the Ray of `penstock serve`, in place of Ray's agent for them.

An ingress asks for variables of its own, and a program of a user that connects to this Ray may ask
for more: pip, a working directory. The raylet then asks its agent over HTTP, and ends with every
process if none answers within 30 s. Ray's agent is a process of 47 MB; here a thread of the driver
answers. It sets variables, which takes no more than saying so, and refuses the rest with the
remedy.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

log = logging.getLogger("penstock.serve")

VARIABLES = "env_vars"
REFUSED = (
    "the Ray that `penstock serve` starts makes no runtime environments but env_vars; this one has "
    "{names}. Start Ray with `ray start --head`, serve on it with `penstock serve --ray-address "
    "auto`, and use that"
)
CLOSED_S = 0.1  # longest that `close` waits
LONGEST_S = 5.0  # for a request to arrive
LARGEST_BYTES = 1 << 20


class Environments:
    """Answers the raylet's requests from `listen` on, until it is closed."""

    def __init__(self) -> None:
        self._server: ThreadingHTTPServer | None = None

    def listen(self, host: str) -> int:
        """The port. `host`: the node's address, to which the raylet connects. Raises OSError."""
        self.close()  # of a first try to start Ray
        self._server = _Server((host, 0), _Handler)
        self._server.daemon_threads = True
        serve = partial(self._server.serve_forever, poll_interval=CLOSED_S)
        Thread(target=serve, name="environments", daemon=True).start()
        return self._server.server_address[1]

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(ThreadingHTTPServer):
    """Serves this machine only, though other machines reach the node's address."""

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Of a connection, before it has a thread."""
        return client_address[0] == self.server_address[0]


class _Handler(BaseHTTPRequestHandler):
    timeout = LONGEST_S

    def do_POST(self) -> None:
        """Make an environment; none is kept, so there is nothing to delete or to list."""
        from ray.core.generated import runtime_env_agent_pb2 as messages

        length = int(self.headers.get("Content-Length", 0))
        if not 0 <= length <= LARGEST_BYTES:
            self.send_error(413)
            return
        body = self.rfile.read(length)
        if self.path == "/get_or_create_runtime_env":
            reply = made(messages.GetOrCreateRuntimeEnvRequest.FromString(body))
        elif self.path == "/delete_runtime_env_if_possible":
            reply = messages.DeleteRuntimeEnvIfPossibleReply()
        elif self.path == "/get_runtime_envs_info":
            reply = messages.GetRuntimeEnvsInfoReply()
        else:
            self.send_error(404)
            return
        answer = reply.SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


def made(request: Any) -> Any:
    """Ray's GetOrCreateRuntimeEnvReply to its request: how to start a process with the variables.

    As in `_create_runtime_env` of Ray's agent (_private/runtime_env/agent/runtime_env_agent.py).
    """
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray.core.generated import runtime_env_agent_pb2 as messages

    wanted = json.loads(request.serialized_runtime_env or "{}")
    others = sorted(name for name, value in wanted.items() if value and name != VARIABLES)
    if others:
        return messages.GetOrCreateRuntimeEnvReply(
            status=messages.AGENT_RPC_STATUS_FAILED,
            error_message=REFUSED.format(names=", ".join(others)),
        )
    context = RuntimeEnvContext(env_vars=wanted.get(VARIABLES))
    return messages.GetOrCreateRuntimeEnvReply(
        status=messages.AGENT_RPC_STATUS_OK, serialized_runtime_env_context=context.serialize()
    )
