"""The edge of the HTTP interface, between uvicorn and the routes: ids, API keys, errors.

`context_of` makes the CallContext of a request for the routes. Plain ASGI: access is decided by the
raw scope, not by objects that are built from headers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping
from functools import partial
from typing import Any

from penstock.deployments.ingress.core.bounds.limits import OpenCall, OpenCalls, Turns
from penstock.deployments.ingress.core.call import CallContext, is_client_id, new_request_id
from penstock.deployments.ingress.core.errors import describe
from penstock.deployments.ingress.core.tracing import RequestTrace, Tracer
from penstock.deployments.ingress.http.asgi import (
    App,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    header,
    only_head,
    send_error,
)
from penstock.deployments.ingress.http.events import error_format_of
from penstock.deployments.ingress.http.listener.hosts import AllowedHosts
from penstock.deployments.security.api_keys import (
    ANYONE,
    NOBODY,
    ApiKeys,
    Caller,
    check_access,
)
from penstock.deployments.security.roles import PUBLIC_PATHS, Access, need_of_route
from penstock.workers.request import RequestError

STREAMS_PATH = "/v1/penstock/streams/"
_NO_SNIFF = (b"x-content-type-options", b"nosniff")  # no browser takes an answer for a page
CLIENT_ID_HEADERS = (b"x-client-request-id", b"x-request-id")
TIMEOUT_HEADER = b"x-request-timeout-ms"
TIMINGS_HEADER = b"x-penstock-timings"  # 1: have `usage.timings` in the answer
MAX_TIMEOUT_MS = 24 * 3600 * 1000
TRACE_HEADER = b"traceresponse"  # of W3C's Trace Context, level 2
MAX_PATH_CHARS = 200


class EdgeMiddleware:
    """The outermost app: gives each request an id, checks its key, and answers errors.

    `open_calls` bounds the requests that may cost much: POSTs, and streams that are continued.
    `turns`: these begin in turns, so that many at once hold no others up.

    Sets `request_id`, `client_id`, `principal` and `caller` in the scope's state, and echoes the
    ids. Access is denied by default: roles.py says which method and path asks for which role, and
    what it does not know asks for the role admin. `has_route`: whether the app has an endpoint for
    a scope; for what has none the app answers 404 or 405 to any valid key.

    `quota_headers`: of a tenant, for answers to a POST to one of `generation_paths`.

    `tracer`: with it a POST to one of these, and a stream that is continued, is traced from when
    its key was accepted until all of its answer was sent; None: there are no traces.

    `hosts`: the names to which a server without keys answers; None: any.

    HEAD is answered as GET is, without the body, under the same access rules.

    A POST to one of `fast_paths` calls that endpoint and not `app`, whose routing, dependencies and
    wrappers around each chunk cost as much as the rest of a short request.
    """

    def __init__(
        self,
        app: App,
        keys: ApiKeys,
        num_errors_returned: Counter[str],
        open_calls: OpenCalls,
        turns: Turns,
        has_route: Callable[[Scope], bool],
        fast_paths: Mapping[str, App] | None = None,
        hosts: AllowedHosts | None = None,
        quota_headers: Callable[[str], Headers] | None = None,
        generation_paths: Collection[str] = (),
        tracer: Tracer | None = None,
    ):
        self._app = app
        self._keys = keys
        self._num_errors_returned = num_errors_returned
        self._open_calls = open_calls
        self._turns = turns
        self._has_route = has_route
        self._fast_paths = fast_paths or {}
        self._hosts = hosts
        self._quota_headers = quota_headers
        self._generation_paths = frozenset(generation_paths)
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope, send = only_head(scope, send)
        path = scope["path"]
        error_format = error_format_of(path)
        ids = (header(scope, name) for name in CLIENT_ID_HEADERS)
        client_id = next((each for each in ids if each and is_client_id(each)), None)
        request_id = new_request_id()
        id_headers: Headers = [(name, request_id.encode()) for name in error_format.id_headers]
        id_headers.append(_NO_SNIFF)
        if client_id is not None:
            id_headers.append((b"x-client-request-id", client_id.encode()))

        status = 0  # of the answer, once it has begun
        quota_headers: Callable[[], Headers] | None = None  # made when the answer begins

        async def send_with_ids(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                further = id_headers if quota_headers is None else [*id_headers, *quota_headers()]
                message = {**message, "headers": [*message.get("headers", ()), *further]}
            await send(message)

        try:
            if self._hosts is not None:
                self._hosts.check(scope)
            caller = self._admitted(scope)
        except RequestError as error:
            refusal = describe(error, request_id, self._num_errors_returned)
            await send_error(send_with_ids, refusal, request_id, error_format)
            return
        scope.setdefault("state", {}).update(
            request_id=request_id, client_id=client_id, principal=caller.tenant, caller=caller
        )
        if self._quota_headers is not None and path in self._generation_paths:
            quota_headers = partial(self._quota_headers, caller.tenant)
        is_work = scope["method"] == "POST" or path.startswith(STREAMS_PATH)
        fast_path = self._fast_paths.get(path) if is_work else None
        open_call: OpenCall | None = None
        trace: RequestTrace | None = None
        try:
            if is_work:  # health, status and the like are answered also under overload
                open_call = scope["state"]["open_call"] = self._open_calls.enter()
                if self._tracer is not None and self._is_traced(path):
                    trace = scope["state"]["trace"] = begin_trace(self._tracer, scope)
                    id_headers.append((TRACE_HEADER, trace.response.encode()))
                await self._turns.wait()
            await (fast_path or self._app)(scope, receive, send_with_ids)
        except ClientGone:
            return
        except Exception as error:
            failure = describe(error, request_id, self._num_errors_returned)
            if trace is not None:
                trace.fail(failure.code)
            if not status:
                id_headers += scope["state"].get("error_headers", ())
                await send_error(send_with_ids, failure, request_id, error_format)
        finally:
            if open_call is not None:
                open_call.leave()
            if trace is not None:
                if status:
                    trace.annotate({"http.response.status_code": status})
                trace.end()

    def _is_traced(self, path: str) -> bool:
        return path in self._generation_paths or path.startswith(STREAMS_PATH)

    def _admitted(self, scope: Scope) -> Caller:
        """Who calls. Raises RequestError unless the caller may use the route."""
        method, path = scope["method"], scope["path"]
        need = need_of_route(method, path)
        is_served = need is not None or self._has_route(scope)
        is_public = need is Access.PUBLIC or (path in PUBLIC_PATHS and not is_served)
        try:
            caller = self._keys.caller(_offered_key(scope))
        except RequestError:
            if is_public:
                return NOBODY
            raise
        if is_served:
            check_access(caller, need, f"{method} {ascii(path[:100])[1:-1]}")
        return caller


def _offered_key(scope: Scope) -> str | None:
    """The `authorization` header, or the key in the header that Anthropic's clients send."""
    authorization, key = header(scope, b"authorization"), header(scope, b"x-api-key")
    return f"Bearer {key}" if authorization is None and key is not None else authorization


def begin_trace(tracer: Tracer, scope: Scope) -> RequestTrace:
    """The trace of a request, named by OpenTelemetry's conventions for HTTP servers."""
    state, path = scope["state"], scope["path"]
    method = "HEAD" if state.get("is_head") else scope["method"]
    route = f"{STREAMS_PATH}{{request_id}}" if path.startswith(STREAMS_PATH) else path
    about = {
        "http.request.method": method,
        "http.route": route,
        "url.path": path[:MAX_PATH_CHARS],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
        "penstock.request.id": state["request_id"],
    }
    if state["client_id"] is not None:
        about["penstock.client_request.id"] = state["client_id"]
    if state["principal"]:
        about["penstock.tenant"] = state["principal"]
    parent, vendors = header(scope, b"traceparent"), header(scope, b"tracestate")
    return tracer.begin(f"{method} {route}", about, parent, vendors)


def context_of(scope: Scope) -> CallContext:
    """From EdgeMiddleware's entries in the scope, and from headers. Raises RequestError."""
    state = scope["state"]
    caller = state.get("caller", ANYONE)  # none for calls from within the process
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
        key_id=caller.key_id,
        max_priority=caller.max_priority,
        deadline_s=deadline_s,
        front="http",
        wants_timings=header(scope, TIMINGS_HEADER) == "1",
        trace=state.get("trace"),
    )
