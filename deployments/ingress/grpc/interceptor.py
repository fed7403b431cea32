"""Checks of every call before its method runs: the API key, and whether the message can be read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from penstock.deployments.ingress.core.bounds.limits import OpenCalls, Turns
from penstock.deployments.ingress.core.call import new_request_id
from penstock.deployments.ingress.core.errors import CATALOGUE, ServiceError, describe
from penstock.deployments.ingress.grpc.calls import Context, abort, metadata_value
from penstock.deployments.security.api_keys import ApiKeys, check_access
from penstock.deployments.security.roles import RPCS, Access
from penstock.workers.request import RequestError

Handler: TypeAlias = grpc.RpcMethodHandler
Find: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]


class Guard(grpc.aio.ServerInterceptor):
    """Denies by default: security/roles.py says which method asks for which role, and what it does
    not know asks for the role admin.

    Counts the calls that run, since grpc.aio does not say how many connections a server has.

    `open_calls` bounds all calls but those of health and reflection; they begin in `turns`.
    """

    def __init__(
        self,
        keys: ApiKeys,
        num_errors_returned: Counter[str],
        open_calls: OpenCalls,
        turns: Turns,
    ):
        self._keys = keys
        self._errors = num_errors_returned
        self._open_calls = open_calls
        self._turns = turns
        self.num_calls = 0  # that run now, each of them a stream of some connection
        self.num_begun = 0  # calls that gRPC has handed over, refused ones included

    async def intercept_service(
        self, continuation: Find, details: grpc.HandlerCallDetails
    ) -> Handler | None:
        self.num_begun += 1
        need = RPCS.get(details.method)
        handler = await continuation(details)
        if need is Access.PUBLIC:
            return _reading(handler, self._errors, self._enter_freely, None)
        try:
            caller = self._keys.caller(metadata_value(details.invocation_metadata, "authorization"))
            if handler is not None:  # else gRPC answers UNIMPLEMENTED
                check_access(caller, need, ascii(details.method[:100])[1:-1])
            self._open_calls.check_room()  # before the message is read
        except (RequestError, ServiceError) as error:
            refusal = error
        else:
            return _reading(handler, self._errors, self._enter, self._turns)

        async def refuse(_: Any, context: Context) -> None:
            await _refuse(context, refusal, self._errors)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _enter(self, num_bytes: int) -> AbstractContextManager[None]:
        return self._counted(self._open_calls.enter(num_bytes))

    def _enter_freely(self, num_bytes: int) -> AbstractContextManager[None]:
        return self._counted(nullcontext())

    @contextmanager
    def _counted(self, call: AbstractContextManager[object]) -> Iterator[None]:
        with call:
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
    enter: Callable[[int], AbstractContextManager[object]],
    turns: Turns | None,
) -> Handler | None:
    """`handler`, but an unreadable message ends in INVALID_ARGUMENT; gRPC alone says UNKNOWN.

    It reads its one message itself (`_message_of`), as a method does that takes a stream of them.
    `enter`: makes the context that a call with a message of so many bytes runs in. It raises
    ServiceError where there is no room for the call. `turns`: in which calls begin.
    """
    if handler is None or handler.request_streaming:
        return handler

    def read(content: bytes) -> Any:
        try:
            return handler.request_deserializer(content)
        except DecodeError:
            return _Unreadable()

    async def entered(request: Any, context: Context) -> AbstractContextManager[object]:
        if isinstance(request, _Unreadable) or request is grpc.aio.EOF:
            await _refuse(context, _error("invalid_message"), errors)
        try:
            return enter(request.ByteSize())
        except ServiceError as refusal:
            await _refuse(context, refusal, errors)
            raise

    async def answer(_: Any, context: Context) -> None:
        request = await _message_of(context)
        with await entered(request, context):
            if turns is not None:
                await turns.wait()
            if not handler.response_streaming:
                await context.write(await handler.unary_unary(request, context))
                return
            answers = handler.unary_stream(request, context)
            if not isinstance(answers, AsyncGenerator):  # it writes by itself
                await answers
                return
            # Closed at once when the client leaves, rather than when it is next collected.
            async with aclosing(answers):
                async for each in answers:
                    await context.write(each)

    return grpc.stream_stream_rpc_method_handler(
        answer, request_deserializer=read, response_serializer=handler.response_serializer
    )


async def _message_of(context: Context) -> Any:
    """The only message of a call; `grpc.aio.EOF` where the client ends without one.

    gRPC's own way would leak 80 bytes for each call that a client cancels before its message is
    there (https://github.com/grpc/grpc/issues/43360): the read is cancelled with the call. Here it
    ends by itself, which the end of the call makes it do at once.
    """
    reading = asyncio.ensure_future(context.read())
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        reading.add_done_callback(_forget)
        raise


def _forget(reading: asyncio.Future[Any]) -> None:
    """Look at how a read ended that nothing waits for: asyncio would report it otherwise."""
    if not reading.cancelled():
        reading.exception()


def _error(code: str) -> RequestError:
    return RequestError(CATALOGUE[code].message, code=code)


async def _refuse(
    context: Context, refusal: RequestError | ServiceError, errors: Counter[str]
) -> None:
    request_id = new_request_id()
    await abort(context, describe(refusal, request_id, errors), request_id)
