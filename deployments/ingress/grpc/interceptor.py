"""Checks of every call before its method runs: the API key, and whether the message can be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from penstock.deployments.ingress.core.call import new_request_id
from penstock.deployments.ingress.core.errors import CATALOGUE, ServiceError, describe
from penstock.deployments.ingress.core.limits import OpenCalls
from penstock.deployments.ingress.grpc import health
from penstock.deployments.ingress.grpc.calls import Context, abort, metadata_value
from penstock.deployments.security.api_keys import ApiKeys
from penstock.workers.request import RequestError

Handler: TypeAlias = grpc.RpcMethodHandler
Find: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]


class Guard(grpc.aio.ServerInterceptor):
    """Denies by default: without an API key only the health service is open.

    `open_calls` bounds all calls but those of health and reflection.
    """

    def __init__(self, keys: ApiKeys, num_errors_returned: Counter[str], open_calls: OpenCalls):
        self._keys = keys
        self._errors = num_errors_returned
        self._open_calls = open_calls

    async def intercept_service(
        self, continuation: Find, details: grpc.HandlerCallDetails
    ) -> Handler | None:
        offered = metadata_value(details.invocation_metadata, "authorization")
        is_open = details.method.startswith(f"/{health.SERVICE}/")
        if is_open:
            return _reading(await continuation(details), self._errors, None)
        refusal: RequestError | ServiceError = _error("invalid_api_key")
        if self._keys.principal(offered) is not None:
            try:
                self._open_calls.check_room()  # before the message is read
                return _reading(await continuation(details), self._errors, self._open_calls)
            except ServiceError as overloaded:
                refusal = overloaded

        async def refuse(_: Any, context: Context) -> None:
            await _refuse(context, refusal, self._errors)

        return grpc.stream_stream_rpc_method_handler(refuse)


class _Unreadable:
    """In place of a message whose bytes are not of the method's type."""


def _reading(
    handler: Handler | None, errors: Counter[str], open_calls: OpenCalls | None
) -> Handler | None:
    """`handler`, but an unreadable message ends in INVALID_ARGUMENT; gRPC alone says UNKNOWN.

    The call counts among `open_calls` while it runs.
    """
    if handler is None or handler.request_streaming:
        return handler

    def read(content: bytes) -> Any:
        try:
            return handler.request_deserializer(content)
        except DecodeError:
            return _Unreadable()

    async def entered(request: Any, context: Context) -> AbstractContextManager[object]:
        if isinstance(request, _Unreadable):
            await _refuse(context, _error("invalid_message"), errors)
        if open_calls is None:
            return nullcontext()
        try:
            return open_calls.enter(request.ByteSize())
        except ServiceError as refusal:
            await _refuse(context, refusal, errors)
            raise

    async def one(request: Any, context: Context) -> Any:
        with await entered(request, context):
            return await handler.unary_unary(request, context)

    async def many(request: Any, context: Context) -> None:
        with await entered(request, context):
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


def _error(code: str) -> RequestError:
    return RequestError(CATALOGUE[code].message, code=code)


async def _refuse(
    context: Context, refusal: RequestError | ServiceError, errors: Counter[str]
) -> None:
    request_id = new_request_id()
    await abort(context, describe(refusal, request_id, errors), request_id)
