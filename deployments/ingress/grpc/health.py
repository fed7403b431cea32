"""grpc.health.v1, answered from the request core: SERVING means: send requests here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.grpc.calls import Context

SERVICE = "grpc.health.v1.Health"
POLL_S = 0.25
MAX_WATCHERS = 64  # no key is asked for, and each of them wakes the event loop four times a second


class Health(health_pb2_grpc.HealthServicer):
    """`names`: the services that may be asked for, "" for the server itself among them."""

    def __init__(self, core: RequestCore, names: Collection[str]):
        self._core = core
        self._names = names
        self.is_stopping = False
        self.num_watchers = 0

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if self.num_watchers >= MAX_WATCHERS:
            why = f"{MAX_WATCHERS} clients watch already; use Check, or try again"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self.num_watchers += 1
        try:
            sent = None
            while True:
                status = self._status(request.service)
                if status != sent:
                    sent = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await asyncio.sleep(POLL_S)
        finally:
            self.num_watchers -= 1

    def _status(self, service: str) -> int:
        statuses = health_pb2.HealthCheckResponse
        if service not in self._names:
            return statuses.SERVICE_UNKNOWN
        serves = self._core.ready() and not self.is_stopping
        return statuses.SERVING if serves else statuses.NOT_SERVING
