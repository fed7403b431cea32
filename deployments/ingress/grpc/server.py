"""The gRPC server: its options, and the services that it serves over one request core.

The services are penstock.v1 (inference.py), the Open Inference Protocol, health and reflection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.deployments.ingress.core.service import MAX_BODY_BYTES, RequestCore
from penstock.deployments.ingress.grpc import health, inference, open_inference
from penstock.deployments.ingress.grpc.interceptor import Guard
from penstock.deployments.ingress.grpc.messages import MAX_ANSWER_BYTES
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.certificates import Certificates, LoadedCertificate
from penstock.protos.penstock.v1 import inference_pb2_grpc

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 1),  # several ingress replicas share a port
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message stays small
    ("grpc.keepalive_time_ms", 30_000),  # detects clients that vanished without closing
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
TLS_OPTIONS = (("grpc.server_handshake_timeout_ms", 5_000),)
ARRIVED_S = 1.0  # longest wait of a server that stops for calls which have arrived
PROMPT_S = 0.01  # an event loop takes what has arrived in this time, unless it is late
FURTHER_CALLS = 1024  # health, reflection, and calls that are being refused


class GrpcServer:
    """A running server. `port` is the port that it listens on, also where 0 was requested."""

    def __init__(self, server: grpc.aio.Server, port: int, health: health.Health, guard: Guard):
        self._server = server
        self._health = health
        self._guard = guard
        self.port = port

    @property
    def num_calls(self) -> int:
        """Calls that run now."""
        return self._guard.num_calls

    async def stop(self, grace_s: float = 0.0) -> None:
        """Report NOT_SERVING, take no new calls, and let running ones end for up to `grace_s`."""
        self._health.is_stopping = True
        await self._take_arrived()
        await self._server.stop(grace_s)

    async def _take_arrived(self) -> None:
        """Wait for calls that have arrived while the event loop was late: gRPC hands over one at
        a time, and answers CANCELLED to those that wait for it when the server stops."""
        now_s = asyncio.get_running_loop().time
        until_s, is_late, num = now_s() + ARRIVED_S, True, -1
        while (is_late or num != self._guard.num_begun) and now_s() < until_s:
            num, before_s = self._guard.num_begun, now_s()
            await asyncio.sleep(PROMPT_S)
            is_late = now_s() - before_s > 1.5 * PROMPT_S


async def start_server(
    core: RequestCore,
    address: str,
    *,
    keys: ApiKeys | None = None,
    journals: Journals | None = None,
    certificates: Certificates | None = None,
) -> GrpcServer:
    """Serve `core` on `address` ("127.0.0.1:8001"; port 0 for any). TLS with `certificates`.

    `keys`: those that are accepted, in the metadata `authorization: Bearer <key>`, for what
    security/roles.py says; None: every caller is accepted. `journals`: of streams; None: none can
    be continued. Raises RuntimeError if the address cannot be bound.
    """
    keys = keys or ApiKeys()
    guard = Guard(keys, core.metrics.num_errors_returned, core.open_calls, core.turns)
    server = grpc.aio.server(
        interceptors=[guard],
        options=SERVER_OPTIONS if certificates is None else SERVER_OPTIONS + TLS_OPTIONS,
        # Of all connections; the request core's bound comes first, and says when to try again.
        maximum_concurrent_rpcs=core.open_calls.max_calls + FURTHER_CALLS,
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        inference.InferenceService(core, keys, journals), server
    )
    reported_health = health.Health(core, ("", inference.SERVICE, open_inference.SERVICE))
    health_pb2_grpc.add_HealthServicer_to_server(reported_health, server)
    open_inference.add_to(server, core, keys)
    names = (inference.SERVICE, open_inference.SERVICE, health.SERVICE, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    if certificates is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials_of(certificates))
    await server.start()
    return GrpcServer(server, port, reported_health, guard)


def credentials_of(certificates: Certificates) -> grpc.ServerCredentials:
    """Of a server that shows the newest certificate in each handshake. TLS 1.2 or 1.3.

    gRPC's Python interface has no setting for the version.
    """
    served = certificates.current

    def newest() -> Any:
        """Called in each handshake, in a thread of gRPC's; None: as before."""
        nonlocal served
        if certificates.current is served:
            return None
        served = certificates.current
        return _configuration(served)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served), newest, certificates.wants_client_certificates
    )


def _configuration(loaded: LoadedCertificate) -> Any:
    return grpc.ssl_server_certificate_configuration(
        ((loaded.key, loaded.cert),), root_certificates=loaded.ca
    )
