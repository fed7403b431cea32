"""What the gRPC services share: a call's id, API key and deadline, and its end with a status."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from penstock.deployments.ingress.core.call import CallContext, is_client_id, new_request_id
from penstock.deployments.ingress.core.errors import ApiError, describe
from penstock.deployments.ingress.core.tracing import RequestTrace, Tracer
from penstock.deployments.security.api_keys import ApiKeys, Caller
from penstock.workers.request import RequestError

Context: TypeAlias = grpc.aio.ServicerContext


class Named:
    """A call whose request id is being sent to the client while the call is prepared.

    Nothing else may be sent before `id_sent` has returned. `waits`: the id is sent by `send_id`,
    once it is known whether the stream can be continued. `trace`: of the call; None: it is not
    traced.
    """

    def __init__(self, context: Context, *, waits: bool = False, trace: RequestTrace | None = None):
        self.request_id = new_request_id()
        self.trace = trace
        self._context = context
        self._sending: asyncio.Future[None] | None = None
        if not waits:
            self.send_id()

    def send_id(self, *, is_resumable: bool = False) -> asyncio.Future[None]:
        """Begin to send the id, unless that has begun. `is_resumable`: the stream has a journal,
        from which any ingress can continue it."""
        if self._sending is None:
            metadata = [("x-request-id", self.request_id)]
            if is_resumable:
                metadata.append(("x-penstock-resumable", "1"))
            if self.trace is not None:
                metadata.append(("traceresponse", self.trace.response))
            sending = self._context.send_initial_metadata(metadata)
            self._sending = asyncio.ensure_future(sending)
        return self._sending

    async def id_sent(self) -> None:
        await self.send_id()

    async def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)


@asynccontextmanager
async def answering(
    context: Context,
    num_errors_returned: Counter[str],
    *,
    waits: bool = False,
    trace: RequestTrace | None = None,
) -> AsyncIterator[Named]:
    """Send the request id; if the call fails, end it with a status and count its code.

    `waits`: not at once, see `Named`. `trace`: of the call, which ends here.
    """
    named = Named(context, waits=waits, trace=trace)
    status = "CANCELLED"  # unless it comes to an end
    try:
        yield named
        await named.id_sent()
        status = "OK"
    except grpc.aio.AbortError:
        status = "UNKNOWN"
        raise
    except Exception as error:
        failure = describe(error, named.request_id, num_errors_returned)
        status = failure.entry.grpc_status
        if trace is not None:
            trace.fail(failure.code)
        await named.id_sent()
        await abort(context, failure, named.request_id)
    finally:
        await named.close()
        if trace is not None:
            about = {"rpc.response.status_code": status, "penstock.request.id": named.request_id}
            trace.annotate(about)
            trace.end()


def begin_trace(tracer: Tracer | None, context: Context, method: str) -> RequestTrace | None:
    """The trace of a call, named by OpenTelemetry's conventions; None: there are no traces.

    `method`: with its service, as penstock.v1.InferenceService/Chat.
    """
    if tracer is None:
        return None
    metadata = context.invocation_metadata()
    parent, vendors = (metadata_value(metadata, name) for name in ("traceparent", "tracestate"))
    about = {"rpc.system.name": "grpc", "rpc.method": method}
    return tracer.begin(method, about, parent, vendors)


async def abort(context: Context, error: ApiError, request_id: str) -> None:
    """End the call with the status and metadata of `error`. Raises AbortError."""
    trailing: list[tuple[str, Any]] = [("error-code", error.code), ("request-id", request_id)]
    if error.param is not None:
        trailing.append(("error-param", error.param))
    if error.retry_after_s is not None:
        trailing += _when_to_retry(error, error.retry_after_s)
    status = grpc.StatusCode[error.entry.grpc_status]
    await context.abort(status, error.message, trailing_metadata=tuple(trailing))


def _when_to_retry(error: ApiError, seconds: float) -> list[tuple[str, Any]]:
    """What gRPC's own retries read, and the standard details, google.rpc.RetryInfo."""
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(seconds * 1000))
    code: int = grpc.StatusCode[error.entry.grpc_status].value[0]
    details = status_pb2.Status(code=code, message=error.message)
    details.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return [
        ("grpc-retry-pushback-ms", str(round(seconds * 1000))),
        ("grpc-status-details-bin", details.SerializeToString()),
    ]


def context_of(
    context: Context,
    keys: ApiKeys,
    request_id: str,
    client_id: str,
    id_field: str,
    *,
    wants_timings: bool = False,
    trace: RequestTrace | None = None,
) -> CallContext:
    """The context of a gRPC call, from its metadata and deadline.

    `client_id` is the client's own name of the request, in the field `id_field`. `trace`: of the
    call. Raises RequestError.
    """
    if client_id and not is_client_id(client_id):
        raise RequestError(f"{id_field} has up to 128 of A-Z a-z 0-9 . _ -", param=id_field)
    remaining_s, caller = context.time_remaining(), caller_of(context, keys)
    if trace is not None:
        if caller.tenant:
            trace.annotate({"penstock.tenant": caller.tenant})
        if client_id:
            trace.annotate({"penstock.client_request.id": client_id})
    return CallContext(
        request_id=request_id,
        client_id=client_id or None,
        principal=caller.tenant,
        key_id=caller.key_id,
        max_priority=caller.max_priority,
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
        front="grpc",
        wants_timings=wants_timings,
        trace=trace,
    )


def caller_of(context: Context, keys: ApiKeys) -> Caller:
    """Who calls. Raises RequestError where the key has ended since the call was let in."""
    return keys.caller(metadata_value(context.invocation_metadata(), "authorization"))


def metadata_value(metadata: Any, name: str) -> str | None:
    """The first value of that name."""
    for key, value in metadata or ():
        if key == name:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None
