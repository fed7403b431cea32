"""Who the peer of a TLS connection is: the identity in its certificate, and the check of it.

A certificate of a cluster names its holder in a URI of its subject alternative names:
`penstock://CLUSTER/ROLE/ID`. TLS proves that the peer has the key of the certificate and that the
CA has signed it; what it may be is checked here. Host names play no part within a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from penstock.workers.errors import ConfigError

SCHEME = "penstock"
# server and client: the two ends of a connection from outside. The others are of the cluster.
ROLES = ("server", "client", "worker", "ingress", "gate")
CLUSTER_ROLES = ROLES[2:]
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_URI = re.compile(rf"{SCHEME}://(?P<cluster>{_NAME})/(?P<role>{'|'.join(ROLES)})/(?P<id>{_NAME})")


class WrongPeer(Exception):
    """The peer's certificate names no identity, or not the one that is expected."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a certificate. `id`: one of several in a role; "all" is shared by them."""

    cluster: str
    role: str
    id: str = "all"

    def __post_init__(self) -> None:
        """Raises ConfigError for a name that a URI cannot have as it is."""
        if not _URI.fullmatch(str(self)):
            raise ConfigError(
                f"{self} is no identity: cluster and id have 1 to 63 letters, digits, '.', '_' "
                f"and '-', and begin with a letter or digit; the role is one of {', '.join(ROLES)}"
            )

    def __str__(self) -> str:
        return f"{SCHEME}://{self.cluster}/{self.role}/{self.id}"


def identity_of(certificate: x509.Certificate) -> Identity:
    """The one identity that the certificate names. Raises WrongPeer for none, or for several."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise WrongPeer("its certificate has extensions that cannot be read") from error
    ours = [uri for uri in uris if uri.partition(":")[0].lower() == SCHEME]
    if len(ours) != 1:
        raise WrongPeer(f"its certificate names {len(ours)} identities ({SCHEME}://...), not one")
    match = _URI.fullmatch(ours[0])
    if match is None:
        raise WrongPeer(f"its certificate names no identity of the form {SCHEME}://CLUSTER/ROLE/ID")
    return Identity(match["cluster"], match["role"], match["id"])


def check_serves(certificate: x509.Certificate) -> None:
    """Raise WrongPeer for a certificate with which clients would not connect."""
    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    except (ValueError, x509.DuplicateExtension) as error:
        raise WrongPeer("it has extensions that cannot be read") from error
    if not {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & {
        *usages
    }:
        raise WrongPeer("its extended key usage is not for servers, and every client refuses it")


def check_peer(
    der: bytes | None, *, cluster: str, roles: Collection[str], id: str | None = None
) -> Identity:
    """The identity of a peer, which must be of this cluster and have one of these roles.

    `der`: its certificate, as `ssl.SSLObject.getpeercert(binary_form=True)` returns it after the
    handshake; None: it has shown none. `id`: None: any. Raises WrongPeer, and nothing else.
    """
    if not der:
        raise WrongPeer("it has shown no certificate")
    try:
        certificate = x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise WrongPeer("its certificate cannot be read") from error
    found = identity_of(certificate)
    if found.cluster != cluster:
        raise WrongPeer(f"it is of the cluster {found.cluster!r}, not {cluster!r}")
    if found.role not in roles:
        raise WrongPeer(f"it is a {found.role}, not a {' or '.join(roles)}")
    if id is not None and found.id != id:
        raise WrongPeer(f"it is the {found.role} {found.id!r}, not {id!r}")
    return found
