"""The certificate with which a process takes part in the cluster's own connections.

`cluster_certs_dir` has a certificate for each role, as `penstock certs init` makes it. Worker,
ingress and gate connect by TLS then, each proves its role, and a new certificate is taken for the
next connection; those that stand go on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from penstock.deployments.security.authority import hosts_of
from penstock.deployments.security.certificates import (
    RELOAD_S,
    Certificates,
    LoadedCertificate,
)
from penstock.deployments.security.identity import (
    Identity,
    WrongPeer,
    check_peer,
    identity_of,
)
from penstock.workers.channel.encrypted import TlsEnd

SETTING = "cluster_certs_dir"
Role = Literal["worker", "ingress", "gate"]
ROLES: tuple[Role, ...] = ("worker", "ingress", "gate")


class ClusterCertificate:
    """Of one role, in one process. All methods may be called from any thread."""

    def __init__(self, folder: str, role: Role, *, reload_s: float = RELOAD_S):
        """Load ROLE.crt, ROLE.key and ca.crt. Raises ConfigError, also where the certificate is of
        another role."""
        cert, key, ca = (
            str(Path(folder) / name) for name in (f"{role}.crt", f"{role}.key", "ca.crt")
        )
        self._role, self._cluster = role, ""
        self._certificates = Certificates(
            *(cert, key, ca),
            settings=(SETTING,) * 3,
            ca_signs_own=True,
            check=self._check_own,
            reload_s=reload_s,
        )
        self._reload_s = reload_s
        self._looked_s = time.monotonic()
        self._looking = threading.Lock()

    def _check_own(self, leaf: x509.Certificate) -> None:
        """Raise WrongPeer for a certificate of another role, or of another cluster than before."""
        own = identity_of(leaf)
        if own.role != self._role:
            raise WrongPeer(f"it is of the role {own.role}, and must be of {self._role}")
        if self._cluster not in ("", own.cluster):
            raise WrongPeer(f"it is of the cluster {own.cluster!r}, not {self._cluster!r}")
        self._cluster = own.cluster

    @property
    def certificates(self) -> Certificates:
        """For its metrics, and to look at the files while there are no new connections."""
        return self._certificates

    def newest(self) -> LoadedCertificate:
        """What is in the files, looked at now and then."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= self._reload_s and self._looking.acquire(blocking=False):
            try:
                self._looked_s = now_s
                self._certificates.reload()
            finally:
                self._looking.release()
        return self._certificates.current

    def server_end(self, peer: Role) -> TlsEnd:
        """For a new connection that is accepted; the other end must have the role `peer`."""
        newest = self.newest()
        return TlsEnd(newest.server, self.checks(peer), is_server=True, certificate=der_of(newest))

    def client_end(self, peer: Role) -> TlsEnd:
        """For a new connection to a `peer`."""
        client = self.newest().client
        assert client is not None, "there is a CA"
        return TlsEnd(client, self.checks(peer))

    def checks(self, peer: Role) -> Callable[[bytes], Identity]:
        """Raises WrongPeer for a certificate (DER) that is not of a `peer` of this cluster."""
        return partial(check_peer, cluster=self._cluster, roles=(peer,))

    def check_told(self, der: bytes, peer: Role) -> str:
        """The name in the certificate of a `peer` that is to be trusted alone, before a connection.

        Raises WrongPeer unless it is of that role and a CA of this cluster has signed it.
        """
        self.checks(peer)(der)
        leaf = x509.load_der_x509_certificate(der)
        for authority in x509.load_pem_x509_certificates(self.newest().ca or b""):
            with contextlib.suppress(ValueError, TypeError, InvalidSignature):
                leaf.verify_directly_issued_by(authority)
                return _name_in(leaf)
        raise WrongPeer(f"no CA in {SETTING} has signed its certificate")


def _name_in(leaf: x509.Certificate) -> str:
    """A host name, or else the common name. Raises WrongPeer."""
    if hosts := hosts_of(leaf):
        return hosts[0]
    for attribute in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME):
        return str(attribute.value)
    raise WrongPeer("its certificate has no name")


@functools.lru_cache(maxsize=4)
def der_of(loaded: LoadedCertificate) -> bytes:
    """The certificate itself, without those of intermediate CAs."""
    leaf = x509.load_pem_x509_certificates(loaded.cert)[0]
    return leaf.public_bytes(serialization.Encoding.DER)
