"""Checks of every call before its method runs: the API key, and whether the message can be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from penstock.deployments.ingress.core.call import new_request_id
from penstock.deployments.ingress.core.errors import CATALOGUE, describe
from penstock.deployments.ingress.grpc import health
from penstock.deployments.ingress.grpc.calls import Context, abort, metadata_value
from penstock.deployments.security.api_keys import ApiKeys
from penstock.workers.request import RequestError

Handler: TypeAlias = grpc.RpcMethodHandler
Find: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]


class Guard(grpc.aio.ServerInterceptor):
    """Denies by default: without an API key only the health service is open.

    Counts the calls that run, since grpc.aio does not say how many connections a server has.
    """

    def __init__(self, keys: ApiKeys, num_errors_returned: Counter[str]):
        self._keys = keys
        self._errors = num_errors_returned
        self.num_calls = 0  # that run now, each of them a stream of some connection

    async def intercept_service(
        self, continuation: Find, details: grpc.HandlerCallDetails
    ) -> Handler | None:
        offered = metadata_value(details.invocation_metadata, "authorization")
        is_open = details.method.startswith(f"/{health.SERVICE}/")
        if is_open or self._keys.principal(offered) is not None:
            return _reading(await continuation(details), self._errors, self._counted)

        async def refuse(_: Any, context: Context) -> None:
            await _refuse(context, "invalid_api_key", self._errors)

        return grpc.stream_stream_rpc_method_handler(refuse)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1


class _Unreadable:
    """In place of a message whose bytes are not of the method's type."""


def _reading(
    handler: Handler | None,
    errors: Counter[str],
    counted: Callable[[], AbstractContextManager[None]],
) -> Handler | None:
    """`handler` within `counted`, with INVALID_ARGUMENT for an unreadable message; gRPC alone says
    UNKNOWN."""
    if handler is None or handler.request_streaming:
        return handler

    def read(content: bytes) -> Any:
        try:
            return handler.request_deserializer(content)
        except DecodeError:
            return _Unreadable()

    async def one(request: Any, context: Context) -> Any:
        if isinstance(request, _Unreadable):
            await _refuse(context, "invalid_message", errors)
        with counted():
            return await handler.unary_unary(request, context)

    async def many(request: Any, context: Context) -> None:
        if isinstance(request, _Unreadable):
            await _refuse(context, "invalid_message", errors)
        with counted():
            answers = handler.unary_stream(request, context)
            if not isinstance(answers, AsyncGenerator):  # it writes by itself
                await answers
                return
            # Closed at once when the client leaves, rather than when it is next collected.
            async with aclosing(answers):
                async for answer in answers:
                    await context.write(answer)

    made, method = (
        (grpc.unary_stream_rpc_method_handler, many)
        if handler.response_streaming
        else (grpc.unary_unary_rpc_method_handler, one)
    )
    return made(method, request_deserializer=read, response_serializer=handler.response_serializer)


async def _refuse(context: Context, code: str, errors: Counter[str]) -> None:
    request_id = new_request_id()
    wrong = RequestError(CATALOGUE[code].message, code=code)
    await abort(context, describe(wrong, request_id, errors), request_id)
