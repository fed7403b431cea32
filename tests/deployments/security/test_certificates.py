"""Certificates that rotate, by real handshakes with one server context; and wrong files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from penstock.deployments.security.authority import make_all, new_authority, new_leaf, renew_all
from penstock.deployments.security.certificate_files import CertificateFiles
from penstock.deployments.security.certificates import Certificates, load
from penstock.deployments.security.handshake import handshake
from penstock.deployments.security.identity import Identity
from penstock.workers.errors import ConfigError

CLUSTER_SETTINGS = ("cluster_cert_file", "cluster_key_file", "cluster_ca_file")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_all(tmp_path / "certs", "test", days=30)
    return tmp_path / "certs"


def of_server(folder: Path, **options: object) -> Certificates:
    files = (str(folder / "server.crt"), str(folder / "server.key"))
    return Certificates(*files, **options)  # type: ignore[arg-type]


def of_role(folder: Path, role: str) -> Certificates:
    files = (str(folder / f"{role}.crt"), str(folder / f"{role}.key"), str(folder / "ca.crt"))
    return Certificates(*files, settings=CLUSTER_SETTINGS, ca_signs_own=True)


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "ca.crt"))


def serial(end: ssl.SSLObject) -> int:
    """Of the certificate that the peer has shown."""
    der = end.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def serial_in(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def shown_by(certificates: Certificates, client: ssl.SSLContext) -> int:
    return serial(handshake(certificates.server_context, client)[1])


def test_a_handshake_shows_the_certificate_that_is_the_newest_then(folder: Path):
    certificates = of_server(folder)
    client = trusting(folder)
    client.check_hostname = False  # and so without SNI
    first = serial_in(folder / "server.crt")
    assert shown_by(certificates, client) == first
    assert not certificates.reload()
    running = handshake(certificates.server_context, client)
    outer = certificates.server_context
    renew_all(folder, days=30)
    assert shown_by(certificates, client) == first  # nobody has looked yet
    assert certificates.reload() and not certificates.reload()
    second = serial_in(folder / "server.crt")
    assert second != first and shown_by(certificates, client) == second
    assert certificates.server_context is outer
    server, end = running
    assert serial(end) == first and server.version() == "TLSv1.3"


def test_the_reader_of_the_files_follows_them_on_the_event_loop(folder: Path):
    async def scenario() -> None:
        certificates = of_server(folder, reload_s=0.01)
        task = asyncio.ensure_future(certificates.run())
        renew_all(folder, days=30)
        while shown_by(certificates, trusting_any_name(folder)) != serial_in(folder / "server.crt"):
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(scenario(), 60))


def trusting_any_name(folder: Path) -> ssl.SSLContext:
    context = trusting(folder)
    context.check_hostname = False
    return context


def test_tls_1_2_is_refused_and_no_ticket_is_given(folder: Path):
    certificates = of_server(folder)
    old = trusting_any_name(folder)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        handshake(certificates.server_context, old)
    assert certificates.server_context.num_tickets == 0
    assert certificates.current.server.num_tickets == 0


def test_a_ca_makes_a_client_certificate_necessary_and_rotates_too(folder: Path, tmp_path: Path):
    pair = (str(folder / "server.crt"), str(folder / "server.key"))
    ca = tmp_path / "clients.crt"
    shutil.copy(folder / "ca.crt", ca)
    certificates = Certificates(*pair, str(ca))
    without = trusting_any_name(folder)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        handshake(certificates.server_context, without)
    known, unknown = trusting_any_name(folder), trusting_any_name(folder)
    known.load_cert_chain(folder / "client.crt", folder / "client.key")
    make_all(tmp_path / "other", "test", days=30)
    unknown.load_cert_chain(tmp_path / "other" / "client.crt", tmp_path / "other" / "client.key")
    handshake(certificates.server_context, known)
    with pytest.raises(ssl.SSLError):
        handshake(certificates.server_context, unknown)
    shutil.copy(tmp_path / "other" / "ca.crt", ca)
    assert certificates.reload()
    handshake(certificates.server_context, unknown)  # the other way round, on the same context
    with pytest.raises(ssl.SSLError):
        handshake(certificates.server_context, known)
    server_leaf = trusting_any_name(tmp_path / "other")
    server_leaf.load_verify_locations(folder / "ca.crt")
    other = tmp_path / "other"
    server_leaf.load_cert_chain(other / "server.crt", other / "server.key")
    with pytest.raises(ssl.SSLError, match=r"(?i)purpose|unsupported"):
        handshake(certificates.server_context, server_leaf)  # it may serve only


def test_two_ends_of_a_cluster_prove_each_other(folder: Path, tmp_path: Path):
    worker, ingress = of_role(folder, "worker"), of_role(folder, "ingress")
    server, client = handshake(worker.server_context, ingress.client_context())
    assert serial(server) == serial_in(folder / "ingress.crt")
    assert serial(client) == serial_in(folder / "worker.crt")
    make_all(tmp_path / "other", "test", days=30)
    stranger = of_role(tmp_path / "other", "ingress")
    with pytest.raises(ssl.SSLError):
        handshake(worker.server_context, stranger.client_context())
    with pytest.raises(ssl.SSLError):
        handshake(of_role(tmp_path / "other", "worker").server_context, ingress.client_context())
    with pytest.raises(ConfigError, match="tls_client_ca_file"):
        of_server(folder).client_context()
    shutil.copy(tmp_path / "other" / "ca.crt", folder / "ca.crt")
    with pytest.raises(ConfigError, match=r"cluster_ca_file .* must have signed it"):
        of_role(folder, "worker")


def make_wrong_key(folder: Path) -> None:
    shutil.copy(folder / "client.key", folder / "server.key")


def make_open_key(folder: Path) -> None:
    renew_all(folder, days=30)
    (folder / "server.key").chmod(0o644)


def make_no_key(folder: Path) -> None:
    (folder / "server.key").unlink()


def make_no_pem(folder: Path) -> None:
    (folder / "server.crt").write_bytes(b"\x00\xff" * 99)


def make_half_pem(folder: Path) -> None:
    path = folder / "server.crt"
    path.write_bytes(path.read_bytes()[:300])


def make_no_key_pem(folder: Path) -> None:
    (folder / "server.key").write_text("none")


def make_expired(folder: Path) -> None:
    renew_all(folder, days=1e-9)


def make_of_client(folder: Path) -> None:
    for ending in ("crt", "key"):
        shutil.copy(folder / f"client.{ending}", folder / f"server.{ending}")


def make_empty(folder: Path) -> None:
    (folder / "server.crt").write_text("")


WRONG = [
    (make_wrong_key, r"tls_key_file \S+ is not the key of the certificate in tls_cert_file"),
    (make_open_key, r"tls_key_file \S+ can be read or written by every user.*chmod 600"),
    (make_no_key, r"tls_key_file \S+ cannot be read: No such file"),
    (make_no_pem, r"tls_cert_file \S+ has no certificate in PEM"),
    (make_half_pem, r"tls_cert_file \S+ has no certificate in PEM"),
    (make_no_key_pem, r"tls_cert_file \S+ and tls_key_file \S+ cannot be used together"),
    (make_expired, r"tls_cert_file \S+ expired at .*certs renew"),
    (make_of_client, r"tls_cert_file \S+: its extended key usage is not for servers"),
    (make_empty, r"tls_cert_file \S+ has no certificate in PEM"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG, ids=[each.__name__ for each, _ in WRONG])
def test_wrong_files_are_refused_at_the_start_and_left_alone_later(
    folder: Path, spoil, message, caplog: pytest.LogCaptureFixture
):
    certificates = of_server(folder)
    first, client = serial_in(folder / "server.crt"), trusting_any_name(folder)
    shutil.copytree(folder, folder.with_name("good"))
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        of_server(folder)
    assert not certificates.reload() and not certificates.reload_failed  # perhaps half written
    assert not certificates.reload() and certificates.reload_failed
    assert not certificates.reload() and certificates.reload_failed
    assert shown_by(certificates, client) == first
    errors = [each for each in caplog.records if each.levelname == "ERROR"]
    assert len(errors) == 1 and "the old one stays" in errors[0].message
    for name in ("server.key", "server.crt"):
        shutil.copy(folder.with_name("good") / name, folder / name)
    certificates.reload()
    assert not certificates.reload_failed
    assert shown_by(certificates, client) == first


def test_a_ca_file_without_a_certificate_is_refused(folder: Path, tmp_path: Path):
    (tmp_path / "ca.crt").write_text("none")
    files = (str(folder / "server.crt"), str(folder / "server.key"), str(tmp_path / "ca.crt"))
    with pytest.raises(ConfigError, match=r"tls_client_ca_file \S+ has no certificate of a CA"):
        Certificates(*files)


def test_a_key_with_a_password_is_refused_without_asking_for_it(folder: Path):
    from cryptography.hazmat.primitives import serialization

    path = folder / "server.key"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="the key without a password"):
        of_server(folder)


def test_a_replacement_by_a_link_is_seen(folder: Path, tmp_path: Path):
    """As a volume of Kubernetes does it: names that never change lead to another folder."""
    shutil.copytree(folder, tmp_path / "first")
    mount = tmp_path / "mount"
    mount.symlink_to(tmp_path / "first")
    certificates = of_server(mount)
    renew_all(folder, days=30)
    link = tmp_path / "link"
    link.symlink_to(folder)
    os.replace(link, mount)
    assert certificates.reload()
    client = trusting_any_name(folder)
    assert shown_by(certificates, client) == serial_in(folder / "server.crt")


def test_a_certificate_that_nobody_replaces_is_warned_of_once_and_when_it_has_expired(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    certificates = of_server(folder)
    for days, text in ((0, ""), (24, "expires in 6.0 days"), (29, ""), (31, "has expired")):
        caplog.clear()
        now_s = certificates.current.expires_at_s - (30 - days) * 86_400
        monkeypatch.setattr("time.time", lambda now_s=now_s: now_s)
        for _ in range(2):
            assert not certificates.reload()
        assert len(caplog.messages) == bool(text) and text in caplog.text
    monkeypatch.undo()
    assert not certificates.reload_failed


def test_pem_and_contexts_are_of_the_same_files(folder: Path):
    files = CertificateFiles(str(folder / "server.crt"), str(folder / "server.key"))
    loaded = load(files)
    assert loaded.cert == (folder / "server.crt").read_bytes()
    assert loaded.key == (folder / "server.key").read_bytes()
    assert loaded.ca is None and loaded.client is None
    days = of_server(folder).expires_s / 86_400
    assert 29.9 < days < 30


def test_a_chain_with_an_intermediate_ca_serves(folder: Path, tmp_path: Path):
    """The file has the leaf first; the CA below it is sent along."""
    authority = new_authority("test")
    leaf = new_leaf(authority, Identity("test", "server"), ["localhost"], days=1)
    leaf.write(tmp_path, "server")
    authority.write(tmp_path, "ca")
    path = tmp_path / "server.crt"
    path.write_bytes(path.read_bytes() + (tmp_path / "ca.crt").read_bytes())
    certificates = of_server(tmp_path)
    client = trusting_any_name(tmp_path)
    assert shown_by(certificates, client) == leaf.certificate.serial_number
