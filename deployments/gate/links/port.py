"""The gate's port for the ingresses, in the clear or under TLS."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import grpc

from penstock.deployments.gate.links.tls import server_credentials
from penstock.deployments.security.cluster_links import ClusterCertificate, der_of
from penstock.protos.penstock.internal.v1 import gate_pb2_grpc
from penstock.workers.errors import ConfigError

log = logging.getLogger("penstock.gate")


@dataclass(frozen=True, slots=True)
class GatePort:
    """An open port. `certs_dir`: the setting that it was opened with."""

    address: str
    server: grpc.aio.Server
    certs_dir: str | None
    certificate: ClusterCertificate | None

    @property
    def shown(self) -> bytes:
        """The newest certificate (DER); empty: connections are in the clear."""
        return b"" if self.certificate is None else der_of(self.certificate.newest())


async def open_port(
    servicer: gate_pb2_grpc.GateServicer, host: str, certs_dir: str | None
) -> GatePort:
    """Serve on a free port of `host`. Raises ConfigError for certificates that cannot be used."""
    server, certificate = grpc.aio.server(), None
    gate_pb2_grpc.add_GateServicer_to_server(servicer, server)
    if certs_dir is None:
        port = server.add_insecure_port(f"{host}:0")
    else:
        try:
            certificate = ClusterCertificate(certs_dir, "gate")
        except ConfigError as error:
            log.error("the gate cannot listen: %s", error)
            raise
        port = server.add_secure_port(f"{host}:0", server_credentials(certificate))
    await server.start()
    log.info("the gate listens on %s:%d", host, port)
    return GatePort(f"{host}:{port}", server, certs_dir, certificate)
