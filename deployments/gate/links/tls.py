"""TLS between the ingresses and the gate: the credentials of gRPC, and who the other end is.

gRPC for Python shows a client nothing of the server's certificate. So the gate tells its own with
its address, over Ray; the ingress checks it, and trusts this one alone on the connection.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

import grpc

from penstock.deployments.gate.wire import GateAddress
from penstock.deployments.security.certificates import LoadedCertificate
from penstock.deployments.security.cluster_links import ClusterCertificate
from penstock.deployments.security.identity import WrongPeer

Options = Sequence[tuple[str, Any]]


def server_credentials(certificate: ClusterCertificate) -> grpc.ServerCredentials:
    """Of the gate: each handshake has the newest certificate, and ingresses must show theirs."""
    served = certificate.newest()

    def newest() -> Any:
        nonlocal served
        before, served = served, certificate.newest()
        return None if served is before else _configuration(served)  # None: as before

    return grpc.dynamic_ssl_server_credentials(_configuration(served), newest, True)


def open_channel(
    gate: GateAddress, certificate: ClusterCertificate | None, options: Options
) -> grpc.aio.Channel:
    """An ingress's channel to the gate; without `certificate`, in the clear. Raises WrongPeer."""
    if certificate is None:
        if gate.certificate:
            raise WrongPeer("it has cluster_certs_dir, and this ingress has not")
        return grpc.aio.insecure_channel(gate.address, options=options)
    if not gate.certificate:
        raise WrongPeer("it has no cluster_certs_dir, and this ingress has")
    name = certificate.check_told(gate.certificate, "gate")
    pem = ssl.DER_cert_to_PEM_cert(gate.certificate).encode()
    own = certificate.newest()
    return grpc.aio.secure_channel(
        gate.address,
        grpc.ssl_channel_credentials(pem, own.key, own.cert),
        options=(*options, ("grpc.ssl_target_name_override", name)),
    )


def check_ingress(context: Any, certificate: ClusterCertificate) -> None:
    """Raise WrongPeer unless the other end of a stream is an ingress of this cluster."""
    shown = context.auth_context().get("x509_pem_cert", (b"",))[0]
    certificate.checks("ingress")(ssl.PEM_cert_to_DER_cert(shown.decode()) if shown else b"")


def _configuration(loaded: LoadedCertificate) -> Any:
    return grpc.ssl_server_certificate_configuration(((loaded.key, loaded.cert),), loaded.ca)
