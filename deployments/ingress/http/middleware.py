"""The edge of the HTTP interface, between uvicorn and the routes: ids, API keys, errors.

Plain ASGI: what decides on access reads the raw scope, not objects that are built from headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from penstock.deployments.ingress.core.call import new_request_id
from penstock.deployments.ingress.core.errors import describe
from penstock.deployments.ingress.core.validation import is_client_id
from penstock.deployments.ingress.http.body import ClientGone, Receive, Scope, header
from penstock.deployments.ingress.http.errors import error_format_of
from penstock.deployments.ingress.http.sse import App, Headers, Send, send_error
from penstock.deployments.security.api_keys import ApiKeys
from penstock.workers.request import RequestError

CLIENT_ID_HEADERS = (b"x-client-request-id", b"x-request-id")


class EdgeMiddleware:
    """The outermost app: names each request, checks its key, and answers each failure inside.

    Sets `request_id`, `client_id` and `principal` in the scope's state, and echoes the ids. Access
    is denied by default: a path is open without a key only if it is one of `public_paths` exactly.

    A POST to one of `fast_paths` goes straight to that endpoint and not to `app`, whose routing,
    dependencies and wrappers around each chunk cost as much as the rest of a short request.
    """

    def __init__(
        self,
        app: App,
        keys: ApiKeys,
        num_errors_returned: Counter[str],
        public_paths: Collection[str] = (),
        fast_paths: Mapping[str, App] | None = None,
    ):
        self._app = app
        self._keys = keys
        self._num_errors_returned = num_errors_returned
        self._public_paths = frozenset(public_paths)
        self._fast_paths = fast_paths or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        ids = (header(scope, name) for name in CLIENT_ID_HEADERS)
        client_id = next((each for each in ids if each and is_client_id(each)), None)
        error_format = error_format_of(scope["path"])
        id_headers: Headers = [(name, request_id.encode()) for name in error_format.id_headers]
        if client_id is not None:
            id_headers.append((b"x-client-request-id", client_id.encode()))

        has_started = False

        async def send_with_ids(message: MutableMapping[str, Any]) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message = {**message, "headers": [*message.get("headers", ()), *id_headers]}
            await send(message)

        principal = self._keys.principal(_offered_key(scope))
        if principal is None and scope["path"] not in self._public_paths:
            refusal = describe(_missing_key(), request_id, self._num_errors_returned)
            await send_error(send_with_ids, refusal, request_id, error_format)
            return
        scope.setdefault("state", {}).update(
            request_id=request_id, client_id=client_id, principal=principal or ""
        )
        try:
            await self._endpoint(scope)(scope, receive, send_with_ids)
        except ClientGone:
            return
        except Exception as error:
            failure = describe(error, request_id, self._num_errors_returned)
            if not has_started:
                id_headers += scope["state"].get("error_headers", ())
                await send_error(send_with_ids, failure, request_id, error_format)

    def _endpoint(self, scope: Scope) -> App:
        if scope["method"] == "POST":
            return self._fast_paths.get(scope["path"], self._app)
        return self._app


def _missing_key() -> RequestError:
    return RequestError(
        "this server requires an API key: 'Authorization: Bearer <key>'", code="invalid_api_key"
    )


def _offered_key(scope: Scope) -> str | None:
    """What `authorization` says; without it, a key as Anthropic's clients send it."""
    authorization, key = header(scope, b"authorization"), header(scope, b"x-api-key")
    return f"Bearer {key}" if authorization is None and key is not None else authorization
