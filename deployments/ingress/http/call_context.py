"""The CallContext of an HTTP request: ids, principal, deadline and what its headers ask for."""

from __future__ import annotations

import time

from penstock.deployments.ingress.core.call import CallContext
from penstock.deployments.ingress.http.body import Scope, header
from penstock.workers.request import RequestError

TIMEOUT_HEADER = b"x-request-timeout-ms"
TIMINGS_HEADER = b"x-penstock-timings"  # 1: have `usage.timings` in the answer
MAX_TIMEOUT_MS = 24 * 3600 * 1000


def context_of(scope: Scope) -> CallContext:
    """From what EdgeMiddleware put into the scope, and from headers. Raises RequestError."""
    state = scope["state"]
    deadline_s = None
    timeout_ms = header(scope, TIMEOUT_HEADER)
    if timeout_ms is not None:
        if not (timeout_ms.isascii() and timeout_ms.isdigit() and len(timeout_ms) <= 8):
            timeout_ms = "0"
        if not 1 <= int(timeout_ms) <= MAX_TIMEOUT_MS:
            raise RequestError(
                f"{TIMEOUT_HEADER.decode()} must be whole milliseconds, 1 to {MAX_TIMEOUT_MS}",
                param=TIMEOUT_HEADER.decode(),
            )
        deadline_s = time.monotonic() + int(timeout_ms) / 1000
    return CallContext(
        request_id=state["request_id"],
        client_id=state["client_id"],
        principal=state["principal"],
        deadline_s=deadline_s,
        front="http",
        wants_timings=header(scope, TIMINGS_HEADER) == "1",
    )
