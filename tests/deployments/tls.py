"""Certificates for the tests of TLS, and what a server shows to a new connection."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import uvloop
from cryptography import x509

from penstock.deployments.client.tls import ClientTls
from penstock.deployments.security.certificates import Certificates

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)  # that of Ray's actors is uvloop's


def certificates_of(folder: Path, *, client_ca: bool = False) -> Certificates:
    ca = str(folder / "ca.crt") if client_ca else None
    return Certificates(str(folder / "server.crt"), str(folder / "server.key"), ca)


def tls_of(folder: Path, *, shows: bool = False) -> ClientTls:
    pair = (str(folder / "client.crt"), str(folder / "client.key")) if shows else (None, None)
    return ClientTls(str(folder / "ca.crt"), *pair)


def serial_in(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def shown(port: int, folder: Path) -> int:
    """The serial number of the certificate that a new connection gets."""
    context = tls_of(folder).context()
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        der = secure.getpeercert(binary_form=True)
        assert der is not None and secure.version() == "TLSv1.3"
        return x509.load_der_x509_certificate(der).serial_number


def shown_by_grpc(target: str, folder: Path) -> int:
    """As `shown`, for the gRPC port, which speaks HTTP/2 only."""
    host, _, port = target.rpartition(":")
    context = tls_of(folder).context()
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        der = secure.getpeercert(binary_form=True)
        assert der is not None and secure.selected_alpn_protocol() == "h2"
        return x509.load_der_x509_certificate(der).serial_number
