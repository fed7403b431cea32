"""`penstock certs`, run as a user runs it, and the settings and flags that its files are for."""

from __future__ import annotations

import json
import re
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from penstock.deployments.cli.main import main
from penstock.deployments.cli.server import ServerError, _why, connect
from penstock.deployments.client.tls import ClientTls
from penstock.deployments.config import config_from
from penstock.deployments.preflight import check_before_start
from penstock.deployments.security.authority import make_all
from penstock.deployments.security.certificates import Certificates
from penstock.deployments.security.identity import ROLES, identity_of
from penstock.workers.errors import ConfigError
from penstock.workers.request import FinishReason
from tests.deployments.ports import free_port
from tests.deployments.serving import ScriptedBackend, Serving

SCRIPT = ([100], [101], FinishReason.STOP)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert (
        main(["certs", "init", str(tmp_path / "c"), "--cluster", "east", "--host", "a.example"])
        == 0
    )
    return tmp_path / "c"


def leaf(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_init_writes_what_its_text_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "new" / "certs"
    init = ["certs", "init", str(folder), "--cluster", "east", "--host", "a.example"]
    assert main(init) == 0
    text = capsys.readouterr().out
    assert f"--tls-cert-file {folder}/server.crt --tls-key-file {folder}/server.key" in text
    assert f"--ca-file {folder}/ca.crt" in text and f"certs renew {folder}" in text
    names = ("ca", *ROLES)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.{suffix}" for name in names for suffix in ("crt", "key")
    )
    assert all((folder / f"{name}.key").stat().st_mode & 0o777 == 0o600 for name in names)
    for role in ROLES:
        found = leaf(folder / f"{role}.crt")
        assert str(identity_of(found)) == f"penstock://east/{role}/all"
        life = found.not_valid_after_utc - found.not_valid_before_utc
        assert life.days == 30 and found.public_key().curve.name == "secp256r1"  # type: ignore[union-attr]
    listed = re.search(r"server\.crt +\S+server/all +(.*?)  ", text)
    assert listed and listed[1] == "localhost, a.example, 127.0.0.1, ::1"


def test_openssl_finds_the_certificates_strictly_right(folder: Path):
    """Later Pythons verify by the letter of RFC 5280."""
    from penstock.deployments.security.handshake import handshake

    server = Certificates(str(folder / "server.crt"), str(folder / "server.key"))
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    client.check_hostname = False
    handshake(server.server_context, client)


def test_init_overwrites_only_if_asked_to(folder: Path, capsys: pytest.CaptureFixture[str]):
    before = (folder / "ca.key").read_bytes()
    assert main(["certs", "init", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "certs renew" in error and "--overwrite" in error
    assert (folder / "ca.key").read_bytes() == before
    assert main(["certs", "init", str(folder), "--overwrite"]) == 0
    assert (folder / "ca.key").read_bytes() != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "a/b"], "is no identity"),
        (["--cluster", ""], "is no identity"),
        (["--host", "https://x"], "neither a DNS name nor an IP address"),
        (["--host", "a b"], "neither a DNS name nor an IP address"),
        (["--host", ""], "neither a DNS name nor an IP address"),
        (["--host", "x:8000"], "neither a DNS name nor an IP address"),
    ],
)
def test_wrong_names_are_refused_before_a_file_is_written(
    arguments, message, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["certs", "init", str(tmp_path / "c"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_renew_keeps_the_names_and_the_ca(folder: Path, capsys: pytest.CaptureFixture[str]):
    names = [path.name for path in folder.glob("*.crt")]
    before = {name: leaf(folder / name) for name in names}
    keys = {path.name: path.read_bytes() for path in folder.glob("*.key")}
    (folder / "gate.crt").unlink()  # this machine has no gate
    assert main(["certs", "renew", str(folder), "--days", "7"]) == 0
    assert "new: server, client, worker, ingress; " in capsys.readouterr().out
    assert not (folder / "gate.crt").exists()
    for name in set(names) - {"gate.crt"}:
        after = leaf(folder / name)
        same_names = [
            each.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            for each in (before[name], after)
            if name != "ca.crt"
        ]
        assert len({str(sorted(map(str, each))) for each in same_names}) <= 1
        key = name.replace(".crt", ".key")
        is_new = (folder / key).read_bytes() != keys[key]
        assert is_new == (name != "ca.crt")
        assert (after.serial_number != before[name].serial_number) == (name != "ca.crt")
        assert (folder / key).stat().st_mode & 0o777 == 0o600
    (folder / "ca.key").unlink()
    assert main(["certs", "renew", str(folder)]) == 2
    assert "ca.key cannot be read" in capsys.readouterr().err


def test_a_ca_key_that_others_can_read_signs_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "ca.key").chmod(0o644)
    assert main(["certs", "renew", str(folder)]) == 2
    assert "chmod 600" in capsys.readouterr().err


def test_show(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main(["certs", "show", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "CN=Penstock CA of east (CA)" in text and "in 30 days" in text
    assert main(["certs", "renew", str(folder), "--days", "0.000000001"]) == 0
    capsys.readouterr()
    assert main(["certs", "show", str(folder / "gate.crt")]) == 1
    assert "penstock://east/gate/all" in (text := capsys.readouterr().out) and "EXPIRED" in text
    (tmp_path / "none").mkdir()
    assert main(["certs", "show", str(tmp_path / "none")]) == 2
    assert "has no *.crt files" in capsys.readouterr().err
    assert main(["certs", "show", str(folder / "ca.key")]) == 2
    assert "has no certificate in PEM" in capsys.readouterr().err


def settings(folder: Path, **changed: str | None) -> dict[str, object]:
    files = {
        "tls_cert_file": str(folder / "server.crt"),
        "tls_key_file": str(folder / "server.key"),
    }
    ports = {"http_port": free_port(), "grpc_port": free_port(), "model": "builtin"}
    given = {**files, **changed}
    return {**ports, **{name: value for name, value in given.items() if value is not None}}


def test_settings_are_checked_before_anything_starts(folder: Path):
    check_before_start(config_from(settings(folder)))
    check_before_start(config_from(settings(folder, tls_client_ca_file=str(folder / "ca.crt"))))
    for missing, other in (("tls_cert_file", "tls_key_file"), ("tls_key_file", "tls_cert_file")):
        with pytest.raises(ConfigError, match=f"{other} needs {missing}"):
            config_from(settings(folder, **{missing: None}))
    with pytest.raises(ConfigError, match="tls_client_ca_file needs tls_cert_file"):
        config_from({"tls_client_ca_file": str(folder / "ca.crt")})
    for changed, message in (
        ({"tls_key_file": str(folder / "worker.key")}, "tls_key_file .* is not the key"),
        ({"tls_cert_file": str(folder / "no.crt")}, "tls_cert_file .*no.crt cannot be read"),
        ({"tls_client_ca_file": str(folder / "ca.key")}, "tls_client_ca_file .* no certificate"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_before_start(config_from(settings(folder, **changed)))
    (folder / "server.key").chmod(0o640)
    check_before_start(config_from(settings(folder)))
    (folder / "server.key").chmod(0o604)
    with pytest.raises(ConfigError, match="chmod 600"):
        check_before_start(config_from(settings(folder)))


def test_the_files_are_found_from_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    config = config_from({"tls_cert_file": "server.crt", "tls_key_file": "server.key"})
    assert config.with_absolute_paths().tls_key_file == str(folder / "server.key")


def test_commands_reach_a_server_with_tls(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ca = str(folder / "ca.crt")
    pair = ["--cert-file", str(folder / "client.crt"), "--key-file", str(folder / "client.key")]
    certificates = Certificates(str(folder / "server.crt"), str(folder / "server.key"), ca)
    with Serving(ScriptedBackend(*SCRIPT), certificates=certificates) as serving:
        grpc_url = f"grpcs://{serving.grpc_target}"
        capsys.readouterr()
        for url in (serving.base_url, grpc_url):
            flags = ["--url", url, "--ca-file", ca, *pair]
            capsys.readouterr()
            assert main(["models", *flags]) == 0
            assert capsys.readouterr().out == "builtin\n"
            assert main(["complete", "Hello", *flags]) == 0
            assert capsys.readouterr().out.strip()
            bench = ["bench", "serve", "--num-requests", "2", "--rate", "99", "--no-progress"]
            bench += ["--json", str(tmp_path / "bench.json"), "--input-len", "9"]
            assert main([*bench, "--output-len", "2", *flags]) == 0
            figures = json.loads((tmp_path / "bench.json").read_text())["figures"]
            assert figures["num_completed"] == 2
        capsys.readouterr()
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        (tmp_path / "in").write_text(json.dumps({**line, "body": {"prompt": "Hello"}}) + "\n")
        batch = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--no-progress"]
        flags = ["--url", serving.base_url, "--ca-file", ca, *pair]
        assert main([*batch, *flags]) == 0
        assert json.loads((tmp_path / "out").read_text())["response"]["status_code"] == 200


def test_a_connection_that_cannot_be_made_says_what_to_change(folder: Path):
    ca = str(folder / "ca.crt")
    client = (str(folder / "client.crt"), str(folder / "client.key"))
    certificates = Certificates(str(folder / "server.crt"), str(folder / "server.key"), ca)

    def error(url: str, tls: ClientTls | None = None) -> str:
        with pytest.raises(ServerError) as raised, connect(url, tls=tls) as server:
            server.models()
        return str(raised.value)

    with Serving(ScriptedBackend(*SCRIPT), certificates=certificates) as serving:
        secure = (serving.base_url, f"grpcs://{serving.grpc_target}")
        for url in secure:
            assert "is not trusted" in error(url) and "--ca-file" in error(url)
        assert all("--cert-file FILE" in error(url, ClientTls(ca)) for url in secure)
        shown = ClientTls(ca, *client)
        for url in secure:  # the certificate has no such name
            told = error(url.replace("127.0.0.1", "0.0.0.0"), shown)
            assert "is for other host names" in told and "--ca-file" not in told, told
        stranger = folder.with_name("stranger")
        make_all(stranger, "test", days=1)
        refused = ClientTls(ca, str(stranger / "client.crt"), str(stranger / "client.key"))
        expired = (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired"
        )
        assert "certs renew" in _why(secure[0], expired)
        assert all("refuses --cert-file" in error(url, refused) for url in secure)
        assert "write https://" in error(secure[0].replace("https", "http"))
        assert "write grpcs://" in error(secure[1].replace("grpcs", "grpc"))
    with Serving(ScriptedBackend(*SCRIPT)) as serving:
        assert "does not speak TLS" in error(serving.base_url.replace("http", "https"))
    for flags, message in (
        (ClientTls(str(folder / "none")), "ca_file .*none cannot be used"),
        (ClientTls(ca, client[0]), "cert_file and key_file belong together"),
        (ClientTls(ca, client[0], str(folder / "server.key")), "cannot be used together"),
    ):
        with pytest.raises(ValueError, match=message):
            flags.context()


def test_tls_flags_need_a_tls_url(folder: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--ca-file", str(folder / "ca.crt")]
    assert main(["models", "--url", "http://127.0.0.1:1", *flags]) == 2
    assert "https://host:port" in capsys.readouterr().err
    assert main(["models", "--url", "https://127.0.0.1:1", "--ca-file", "/none"]) == 2
    assert "ca_file /none cannot be used" in capsys.readouterr().err
