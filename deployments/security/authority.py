"""Makes certificates: a CA for a cluster, and one leaf certificate for each role.

For clusters without a CA of their own. Keys are EC P-256, in PKCS#8 without a password.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.deployments.security.identity import (
    CLUSTER_ROLES,
    ROLES,
    Identity,
    WrongPeer,
    identity_of,
)
from penstock.workers.errors import ConfigError

CA = "ca"
CA_DAYS = 3650
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_BEFORE = datetime.timedelta(minutes=10)  # for clocks that are behind
_SERVES, _CALLS = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_USAGES = {
    "server": [_SERVES],
    "client": [_CALLS],
    **{role: [_SERVES, _CALLS] for role in CLUSTER_ROLES},
}


@dataclass(frozen=True, slots=True)
class Holder:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, folder: Path, name: str) -> None:
        """As NAME.crt and NAME.key (mode 0600), each replaced at once. Raises OSError."""
        key = self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        cert = self.certificate.public_bytes(serialization.Encoding.PEM)
        _replace(folder / f"{name}.key", key, 0o600)
        _replace(folder / f"{name}.crt", cert, 0o644)


def new_authority(cluster: str, days: float = CA_DAYS) -> Holder:
    """A CA that signs leaf certificates only. Raises ConfigError for a wrong name."""
    Identity(cluster, ROLES[0])  # checks the name
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Penstock CA of {cluster}")
    certificate = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Holder(certificate, key)


def new_leaf(
    authority: Holder, identity: Identity, hosts: Sequence[str] = (), *, days: float
) -> Holder:
    """A certificate for `identity`; `hosts`: DNS names and IP addresses. Raises ConfigError.

    It may serve, call, or both, as its role has it, and does not outlive the CA.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(identity))]
    names += [_host(each) for each in hosts]
    issuer = authority.certificate
    certificate = (
        _builder(
            _name(f"{identity.role} of {identity.cluster}"),
            issuer.subject,
            key,
            min(days, CA_DAYS),  # more would be no date at some point
            issuer.not_valid_after_utc,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_USAGES[identity.role]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    return Holder(certificate, key)


def make_all(folder: Path, cluster: str, hosts: Sequence[str] = (), *, days: float) -> None:
    """A new CA and a leaf of each role, in `folder`; `hosts` beside those of this machine.

    Raises ConfigError or OSError.
    """
    authority = new_authority(cluster)
    hosts = list(dict.fromkeys((*LOCAL_HOSTS, *hosts)))
    leaves = {role: _leaf_of(authority, cluster, role, hosts, days) for role in ROLES}
    folder.mkdir(parents=True, exist_ok=True)
    authority.write(folder, CA)
    for role, leaf in leaves.items():
        leaf.write(folder, role)


def renew_all(folder: Path, *, days: float) -> list[str]:
    """New leaf certificates with new keys, names as before; the roles. Raises ConfigError, OSError.

    Only of the leaves that are in `folder`: a machine needs no more than its own.
    """
    authority = read_authority(folder)
    leaves = {}
    for role in ROLES:
        path = folder / f"{role}.crt"
        if path.exists():
            before = read_certificates(path)[0]
            leaves[role] = new_leaf(authority, _identity(path, before), hosts_of(before), days=days)
    if not leaves:
        raise ConfigError(f"{folder} has no leaf certificate ({ROLES[0]}.crt, ...) to renew")
    for role, leaf in leaves.items():
        leaf.write(folder, role)
    return list(leaves)


def read_authority(folder: Path) -> Holder:
    """The CA in a folder that `make_all` wrote. Raises ConfigError."""
    path = folder / f"{CA}.key"
    certificate = read_certificates(folder / f"{CA}.crt")[0]
    try:
        mode, pem = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; new certificates need the key of the CA, "
            "which `penstock certs init` wrote beside it"
        ) from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"{path} can be read or written by every user: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} has no private key without a password, in PEM") from error
    is_pair = isinstance(key, ec.EllipticCurvePrivateKey) and (
        key.public_key() == certificate.public_key()
    )
    if not is_pair:
        raise ConfigError(f"{path} is not the key of the certificate in {folder / CA}.crt")
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Holder(certificate, key)


def read_certificates(path: Path) -> list[x509.Certificate]:
    """All certificates in a file in PEM, at least one. Raises ConfigError."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} has no certificate in PEM") from None


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The DNS names and IP addresses that a server with this certificate may have."""
    with contextlib.suppress(x509.ExtensionNotFound):
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return [
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        ]
    return []


def _leaf_of(
    authority: Holder, cluster: str, role: str, hosts: Sequence[str], days: float
) -> Holder:
    """Of a role; only the one that clients connect with has names of hosts."""
    return new_leaf(
        authority, Identity(cluster, role), hosts if role == "server" else (), days=days
    )


def _identity(path: Path, certificate: x509.Certificate) -> Identity:
    try:
        return identity_of(certificate)
    except WrongPeer as error:
        raise ConfigError(
            f"{path}: {error}; only certificates of `penstock certs` are renewed"
        ) from None


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: float,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(end if latest is None else min(end, latest))
    )


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _host(name: str) -> x509.GeneralName:
    """Raises ConfigError."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    try:
        encoded = name.encode("idna").decode().lower()
    except UnicodeError:
        encoded = ""
    if not encoded or any(c.isspace() or c in ":/@" for c in encoded):
        raise ConfigError(
            f"{name!r} is neither a DNS name nor an IP address; write it without https:// and port"
        )
    return x509.DNSName(encoded)


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Write a file that is never seen half written, nor with a wider mode. Raises OSError."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
