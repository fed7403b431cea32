"""A certificate, its key and a CA from files; they are replaced without a restart.

A server has one outer context for its whole life, which has no certificate: at each handshake it
switches to the newest inner context. A context in use is never changed, since a wrong pair would
break it for all connections. Running connections keep what they began with.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cryptography import x509

from penstock.deployments.options import SecurityOptions
from penstock.deployments.security.certificate_files import (
    TLS_SETTINGS,
    CertificateFiles,
    Stamp,
)
from penstock.deployments.security.handshake import handshake
from penstock.deployments.security.identity import WrongPeer, check_serves
from penstock.workers.errors import ConfigError

RELOAD_S = 10.0
NUM_READS = 5  # of files that change while they are read
WARN_S = 7 * 86_400.0  # before a certificate expires

log = logging.getLogger("penstock.security")
Check = Callable[[x509.Certificate], None]  # raises WrongPeer; why it cannot be used


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCertificate:
    """What the files had when they were read, proven to work. `cert`, `key`, `ca`: PEM."""

    stamp: Stamp
    cert: bytes
    key: bytes
    ca: bytes | None
    expires_at_s: float  # since 1970
    server: ssl.SSLContext
    client: ssl.SSLContext | None  # None: without a CA no server can be trusted


class Certificates:
    """One certificate with its key, and the CA whose certificates peers must show.

    `server_context` is of a server. With a CA it asks its clients for a certificate of it, and
    `client_context` gives contexts for clients of servers of the same CA. `current` is for what
    takes PEM. All methods may be called from any thread.
    """

    def __init__(
        self,
        cert_file: str,
        key_file: str,
        ca_file: str | None = None,
        *,
        settings: tuple[str, str, str] = TLS_SETTINGS,
        ca_signs_own: bool = False,
        check: Check = check_serves,
        reload_s: float = RELOAD_S,
    ):
        """Load the files. `ca_signs_own`: the CA must have signed this certificate, too, as within
        a cluster. `check`: of the first certificate and of each new one. Raises ConfigError that
        names the file's setting and the remedy."""
        self._files = CertificateFiles(cert_file, key_file, ca_file, settings)
        self._load = partial(load, self._files, ca_signs_own=ca_signs_own, check=check)
        self._reload_s = reload_s
        self._failed: tuple[str, Stamp | None] | None = None  # what the last look found
        self.reload_failed = False
        self.current = self._load()
        self._told_of: tuple[float, bool] | None = None  # when it expires, whether it has
        self._tell_expiry()
        self.server_context = _context(ssl.PROTOCOL_TLS_SERVER)
        if ca_file is not None:  # a connection has it from the context that it begins with
            self.server_context.verify_mode = ssl.CERT_REQUIRED
        self.server_context.sni_callback = self._use_newest

    @property
    def wants_client_certificates(self) -> bool:
        return self._files.ca is not None

    @property
    def expires_s(self) -> float:
        """Seconds until the certificate in use expires; negative: it has."""
        return self.current.expires_at_s - time.time()

    @property
    def complaint(self) -> str:
        """Why new files are refused (`reload_failed`); empty: they are not."""
        return self._failed[0] if self._failed is not None and self.reload_failed else ""

    def client_context(self) -> ssl.SSLContext:
        """For new connections to servers whose certificate the CA has signed; shows the own one.

        It does not compare host names: check the peer with `identity.check_peer`. Call it for each
        connection, for the newest certificate. Raises ConfigError without a CA.
        """
        if self.current.client is None:
            raise ConfigError(f"{self._files.settings[2]} is needed to connect with servers")
        return self.current.client

    def reload(self) -> bool:
        """Look at the files once; True: new ones are in use from now on. Blocks for milliseconds.

        Files that cannot be used are left alone, and reported if the next look finds the same: a
        replacement writes one file after the other.
        """
        stamp = None
        try:
            stamp = self._files.stamp()
            if stamp != self.current.stamp:
                self.current = self._load()
                log.info(
                    "%s %s: a new certificate is in use; it expires in %.1f days",
                    *(self._files.settings[0], self._files.cert, self.expires_s / 86_400),
                )
                self._failed, self.reload_failed = None, False
                self._tell_expiry()
                return True
            self._tell_expiry()
        except ConfigError as error:
            failed = (str(error), stamp)
            if failed != self._failed:
                self._failed = failed
            elif not self.reload_failed:
                self.reload_failed = True
                log.error("the new certificate is refused, and the old one stays: %s", error)
            return False
        self._failed, self.reload_failed = None, False
        return False

    def _tell_expiry(self) -> None:
        """Warn once of a certificate that expires soon, and once more when it has."""
        state = (self.current.expires_at_s, self.expires_s <= 0)
        if self.expires_s < WARN_S and state != self._told_of:
            self._told_of = state
            what, days = f"{self._files.settings[0]} {self._files.cert}", self.expires_s / 86_400
            if self.expires_s > 0:
                log.warning("%s expires in %.1f days", what, days)
            else:
                log.error("%s has expired: new connections fail until it is replaced", what)

    async def run(self) -> None:
        """Look at the files each `reload_s` seconds, in a thread. Never returns."""
        while True:
            await asyncio.sleep(self._reload_s)
            await asyncio.to_thread(self.reload)

    def _use_newest(self, connection: Any, name: str | None, outer: ssl.SSLContext) -> None:
        """Called in each handshake, also of clients that name no server."""
        connection.context = self.current.server


def client_certificates(options: SecurityOptions) -> Certificates | None:
    """Of the listeners for clients; None: they have no TLS. Blocks. Raises ConfigError."""
    if options.tls_cert_file is None or options.tls_key_file is None:
        return None
    return Certificates(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)


def load(
    files: CertificateFiles, *, ca_signs_own: bool = False, check: Check = check_serves
) -> LoadedCertificate:
    """The files, checked: they exist, belong together, have not expired, a handshake works, and
    `check` has nothing against the certificate. Raises ConfigError."""
    for _ in range(NUM_READS):
        stamp = files.stamp()
        loaded = _load(files, stamp, ca_signs_own, check)
        if files.stamp() == stamp:
            return loaded
    raise ConfigError(f"{files.settings[0]} {files.cert} changes all the time; replace it once")


def _load(
    files: CertificateFiles, stamp: Stamp, ca_signs_own: bool, check: Check
) -> LoadedCertificate:
    pem = files.read()
    files.check_key_mode()
    expires_at_s = _expiry(files, pem[0])
    server, bare = (_context(ssl.PROTOCOL_TLS_SERVER) for _ in range(2))
    client = None if files.ca is None else _context(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, bare, client):
        if context is not None:
            _load_pair(context, files)
    if client is not None:
        for context in (server, client):
            context.verify_mode = ssl.CERT_REQUIRED
            _load_ca(context, files)
    try:
        if ca_signs_own and client is not None:
            handshake(server, client)
        else:
            handshake(bare, _context(ssl.PROTOCOL_TLS_CLIENT))
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", None) or error.reason or error
        raise ConfigError(
            f"{files.settings[0]} {files.cert} cannot be used for TLS 1.3: {why}"
            + (f"; {files.settings[2]} {files.ca} must have signed it" if ca_signs_own else "")
        ) from None
    try:
        check(x509.load_pem_x509_certificates(pem[0])[0])
    except WrongPeer as error:
        raise ConfigError(f"{files.settings[0]} {files.cert}: {error}") from None
    ca = pem[2] if files.ca is not None else None
    return LoadedCertificate(stamp, pem[0], pem[1], ca, expires_at_s, server, client)


def _context(protocol: int) -> ssl.SSLContext:
    """TLS 1.3 without session tickets: each handshake proves who the peer is, and rotates."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def _load_pair(context: ssl.SSLContext, files: CertificateFiles) -> None:
    """Raises ConfigError."""
    of_cert, of_key, _ = files.settings
    try:
        context.load_cert_chain(files.cert, files.key, password="")
    except (OSError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{of_key} {files.key} is not the key of the certificate in {of_cert} "
                f"{files.cert}; name the two that were made together"
            ) from None
        raise ConfigError(
            f"{of_cert} {files.cert} and {of_key} {files.key} cannot be used together: both must "
            f"be in PEM, and the key without a password ({error})"
        ) from None


def _load_ca(context: ssl.SSLContext, files: CertificateFiles) -> None:
    """Raises ConfigError."""
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{files.settings[2]} {files.ca} has no certificate of a CA in PEM: {error}"
        ) from None


def _expiry(files: CertificateFiles, pem: bytes) -> float:
    """When the first certificate expires, in seconds since 1970. Raises ConfigError."""
    setting = f"{files.settings[0]} {files.cert}"
    try:
        leaf = x509.load_pem_x509_certificates(pem)[0]
    except (ValueError, IndexError):
        raise ConfigError(f"{setting} has no certificate in PEM") from None
    begin_s, end_s = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    if begin_s > time.time():
        raise ConfigError(
            f"{setting} is not valid before {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; "
            "is this machine's clock right?"
        )
    if end_s <= time.time():
        raise ConfigError(
            f"{setting} expired at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; get a new one "
            "(of `penstock certs init`: penstock certs renew DIR)"
        )
    return end_s
