"""What the gRPC services share: naming a call, its key and deadline, and ending it cleanly.

Knows nothing of any one service's messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from penstock.deployments.ingress.core.call import new_request_id
from penstock.deployments.ingress.core.errors import ApiError, describe
from penstock.deployments.ingress.core.validation import is_client_id
from penstock.deployments.security.api_keys import ApiKeys
from penstock.workers.request import RequestError

Context: TypeAlias = grpc.aio.ServicerContext


class Named:
    """A call, whose id is on its way to the client while the call is prepared.

    Nothing else may be sent before `told` has returned.
    """

    def __init__(self, context: Context):
        self.request_id = new_request_id()
        metadata = (("x-request-id", self.request_id),)
        self._telling = asyncio.ensure_future(context.send_initial_metadata(metadata))

    async def told(self) -> None:
        await self._telling

    async def close(self) -> None:
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[Named]:
    """Names the call to the client at once, and ends it with a clean status if it fails."""
    named = Named(context)
    try:
        yield named
        await named.told()
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        await named.told()
        await abort(context, describe(error, named.request_id), named.request_id)
    finally:
        await named.close()


async def abort(context: Context, error: ApiError, request_id: str) -> None:
    """End the call with what a client is told about `error`. Raises AbortError."""
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


def about(
    context: Context, keys: ApiKeys, request_id: str, client_id: str, id_field: str
) -> dict[str, Any]:
    """What the call itself, rather than its message, says of a Call.

    `client_id` is how the client calls it, in the field `id_field`. Raises RequestError.
    """
    if client_id and not is_client_id(client_id):
        raise RequestError(f"{id_field} has up to 128 of A-Z a-z 0-9 . _ -", param=id_field)
    remaining_s = context.time_remaining()
    return {
        "request_id": request_id,
        "client_id": client_id or None,
        "deadline_s": None if remaining_s is None else time.monotonic() + remaining_s,
        "principal": principal(context, keys),
        "front": "grpc",
    }


def principal(context: Context, keys: ApiKeys) -> str:
    """Who calls; "" where the server has no keys."""
    return keys.principal(metadata_value(context.invocation_metadata(), "authorization")) or ""


def metadata_value(metadata: Any, name: str) -> str | None:
    """The first value of that name."""
    for key, value in metadata or ():
        if key == name:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None
