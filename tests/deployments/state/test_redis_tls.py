"""TLS to Redis: who is trusted, whose name is checked, and certificates that are replaced."""

from __future__ import annotations

import subprocess

import pytest

from penstock.deployments.state.store import StateDown
from tests.deployments.state.servers import BUDGET, RedisServer, redis_backend, until


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def certify(folder, names="IP:127.0.0.1"):
    """A CA, and a certificate and key of it for both ends."""
    folder.mkdir(exist_ok=True)
    ca = ("-keyout", folder / "ca.key", "-out", folder / "ca.pem", "-subj", "/CN=a test's CA")
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *ca)
    (folder / "names").write_text(f"subjectAltName={names}\n")
    request = ("-keyout", folder / "key.pem", "-out", folder / "csr", "-subj", "/CN=redis")
    openssl("req", "-newkey", "rsa:2048", "-nodes", *request)
    signer = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial")
    made = ("-extfile", folder / "names", "-days", "2", "-out", folder / "cert.pem")
    openssl("x509", "-req", "-in", folder / "csr", *signer, *made)
    return folder


def server_of(folder, certificates):
    files = {"cert": "cert.pem", "key": "key.pem", "ca-cert": "ca.pem"}
    flags = [
        word for name, file in files.items() for word in (f"--tls-{name}-file", certificates / file)
    ]
    return RedisServer(folder, *map(str, flags))


def backend(server, certificates, **settings):
    return redis_backend(
        server,
        state_url=f"rediss://127.0.0.1:{server.port}/0",
        state_ca_file=str(certificates / "ca.pem"),
        **settings,
    )


async def reach(store):
    return await until(lambda: store.put("a", b"1", **BUDGET), within_s=10)


def test_both_ends_show_certificates_which_can_be_replaced(tmp_path):
    certificates = certify(tmp_path / "now")
    server = server_of(tmp_path / "redis", certificates).start(is_tls=True)
    files = {f"state_{name}_file": str(certificates / f"{name}.pem") for name in ("cert", "key")}

    async def scenario(store):
        await reach(store)
        server.kill()
        certify(certificates)  # another CA, in the same files
        server.start(is_tls=True)
        await reach(store)

    async def without(store):
        with pytest.raises(StateDown):
            await store.get("a", **BUDGET)

    try:
        backend(server, certificates, **files).run(scenario)
        backend(server, certificates).run(without)  # the server wants one
    finally:
        server.kill()


@pytest.mark.parametrize("case", ["another CA", "another name"])
def test_a_server_that_is_not_the_right_one_is_refused(tmp_path, case):
    names = "DNS:elsewhere" if case == "another name" else "IP:127.0.0.1"
    own = certify(tmp_path / "own", names)
    trusted = certify(tmp_path / "trusted") if case == "another CA" else own
    server = server_of(tmp_path / "redis", own)
    server.flags += ["--tls-auth-clients", "no"]
    server.start(is_tls=True)

    async def scenario(store):
        async def is_refused():
            try:
                await store.get("a", **BUDGET)
            except StateDown as error:
                if "certificate verify failed" in str(error):
                    return True
                raise
            raise AssertionError("it was trusted")

        await until(is_refused, within_s=10)

    try:
        backend(server, trusted).run(scenario)
    finally:
        server.kill()
