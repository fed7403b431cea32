"""The gate under TLS: ingresses and gate of one cluster connect, others and other roles do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.gate.wire import GateAddress
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.security.authority import make_all, renew_all
from penstock.deployments.security.cluster_links import ClusterCertificate, Role
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from tests.deployments.waiting import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    make_all(made, "test", days=20)
    return made


class Ingress:
    """A GateClient and its task."""

    def __init__(self, gate: GateServer, setup: GateSetup, certificate: ClusterCertificate | None):
        self.told: list[GateAddress] = []

        async def where() -> GateAddress:
            self.told.append(await gate.where(setup))
            return self.told[-1]

        self.client = GateClient("test", where, certificate=certificate)
        self._running = asyncio.ensure_future(self.client.run())

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


def of(folder: Path, role: Role, reload_s: float = 10.0) -> ClusterCertificate:
    return ClusterCertificate(str(folder), role, reload_s=reload_s)


def test_an_ingress_connects_and_asks(folder: Path) -> None:
    setup = GateSetup(host="127.0.0.1", certs_dir=str(folder))

    async def scenario() -> pb.ExplainResponse | None:
        gate = GateServer(setup)
        ingress = Ingress(gate, setup, of(folder, "ingress"))
        await until(lambda: ingress.client.is_connected)
        answer = await ingress.client.explain(5)
        await ingress.close()
        await gate.close()
        return answer

    assert isinstance(asyncio.run(scenario()), pb.ExplainResponse)


@pytest.mark.parametrize("kind", ["no certificate", "of a worker", "of another cluster"])
def test_what_is_no_ingress_of_the_cluster_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Although each knows the token."""
    setup = GateSetup(host="127.0.0.1", certs_dir=str(folder))
    certificate = None
    if kind == "of a worker":
        certificate = of(folder, "worker")
    elif kind == "of another cluster":
        make_all(tmp_path, "test", days=20)
        certificate = of(tmp_path, "ingress")

    async def scenario() -> bool:
        gate = GateServer(setup)
        ingress = Ingress(gate, setup, certificate)
        await until(lambda: len(ingress.told) >= 3)
        is_refused = not gate._links and not ingress.client.is_connected
        await ingress.close()
        await gate.close()
        return is_refused

    assert asyncio.run(scenario())
    why = {
        "no certificate": "it has cluster_certs_dir, and this ingress has not",
        "of a worker": "it is a worker, not a ingress",
        "of another cluster": "no CA in cluster_certs_dir has signed its certificate",
    }[kind]
    assert sum(why in each.message for each in caplog.records) == 1


def test_a_server_with_another_certificate_of_the_cluster_is_not_the_gate(folder: Path) -> None:
    """A worker that could answer at the gate's address, and even knew the token."""
    setup = GateSetup(host="127.0.0.1", certs_dir=str(folder))

    async def scenario() -> tuple[bool, int]:
        gate, rogue = GateServer(setup), GateServer(setup)
        told, other = await gate.where(setup), await rogue.where(setup)
        rogue._token = gate._token
        renewed = folder.parent / "renewed"
        make_all(renewed, "test", days=20)
        wrong = replace(told, address=other.address, certificate=_der(folder, "worker"))

        async def where() -> GateAddress:
            return wrong

        client = GateClient("test", where, certificate=of(folder, "ingress"))
        running = asyncio.ensure_future(client.run())
        await asyncio.sleep(1.0)
        result = client.is_connected, len(rogue._links)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await gate.close()
        await rogue.close()
        return result

    assert asyncio.run(scenario()) == (False, 0)


def _der(folder: Path, role: Role) -> bytes:
    from penstock.deployments.security.cluster_links import der_of

    return der_of(of(folder, role).newest())


def test_new_certificates_are_taken_and_streams_go_on(tmp_path: Path) -> None:
    make_all(tmp_path, "test", days=20)
    setup = GateSetup(host="127.0.0.1", certs_dir=str(tmp_path))

    async def scenario() -> None:
        gate = GateServer(setup)
        first = Ingress(gate, setup, of(tmp_path, "ingress", reload_s=0.0))
        await until(lambda: first.client.is_connected)
        assert gate._port is not None and gate._port.certificate is not None
        gate._port.certificate._reload_s = 0.0
        renew_all(tmp_path, days=20)
        second = Ingress(gate, setup, of(tmp_path, "ingress"))
        await until(lambda: second.client.is_connected)
        assert second.told[-1].certificate == _der(tmp_path, "gate") != first.told[-1].certificate
        assert first.client.is_connected and len(first.told) == 1
        for ingress in (first, second):
            await ingress.close()
        await gate.close()

    asyncio.run(scenario())


def test_a_deployment_with_certificates_changes_the_port(folder: Path) -> None:
    clear = GateSetup(host="127.0.0.1", generation=1)
    secret = replace(clear, certs_dir=str(folder), generation=2)

    async def scenario() -> None:
        gate = GateServer(clear)
        before = Ingress(gate, clear, None)
        await until(lambda: before.client.is_connected)
        after = Ingress(gate, secret, of(folder, "ingress"))
        await until(lambda: after.client.is_connected)
        await until(lambda: not before.client.is_connected)
        for ingress in (before, after):
            await ingress.close()
        await gate.close()

    asyncio.run(scenario())
