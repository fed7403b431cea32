"""What limits an ingress is said while it lasts: a dead store, gate, key file, certificate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.deployments.config import config_from
from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.gate.wire import GateAddress
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.metrics.families import of_keys, of_store
from penstock.deployments.ingress.models import IngressModel
from penstock.deployments.ingress.operator_warnings import WarningSources
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.authority import make_all
from penstock.deployments.security.certificates import Certificates
from penstock.deployments.security.watch import KeyFileWatch
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.store import Store
from penstock.deployments.supervision.view import OperatorWarning
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from tests.deployments import waiting
from tests.deployments.security.keys import key_of
from tests.deployments.state.servers import RedisServer, redis_backend, until
from tests.deployments.tls import certificates_of

NO_KEYS = KeyFileWatch(ApiKeys(), None, lambda: None)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


async def nowhere() -> GateAddress:
    raise AssertionError("the client is never run, so it never connects")


def sources(
    *models: IngressModel,
    store: Store | None = None,
    keys: KeyFileWatch = NO_KEYS,
    **certificates: Certificates,
) -> WarningSources:
    return WarningSources(models, store, keys, certificates)


def texts(of: WarningSources) -> list[str]:
    return [each.text for each in of.now()]


def value(families: Any) -> float:
    (family,) = families
    (sample,) = family.samples
    return float(sample.value)


def test_an_ingress_without_any_of_them_warns_of_nothing() -> None:
    assert sources().now() == ()


def test_a_redis_that_is_killed_is_said_until_it_answers_again(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis").start()

    async def scenario() -> None:
        store = await open_store(redis_backend(server).options)
        try:
            of = sources(store=store)
            assert texts(of) == [] and value(of_store(store.status())) == 1
            server.kill()
            while not of.now():
                await asyncio.sleep(0.02)
            (warning,) = of.now()
            assert (
                "streams are not journaled" in warning.text and value(of_store(store.status())) == 0
            )
            while "cannot be reached" not in warning.detail:  # its reason follows the next attempt
                await asyncio.sleep(0.02)
                (warning,) = of.now()
            assert str(server.port) in warning.detail and str(server.port) not in warning.text
            server.start()
            await until(lambda: store.get("a", budget_s=0.25), within_s=20)
            assert texts(of) == [] and value(of_store(store.status())) == 1
        finally:
            await store.close()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        server.kill()


def test_a_gate_that_is_not_there_is_said_with_its_model_where_there_are_several(run: Run) -> None:
    async def scenario() -> None:
        gate = GateClient("x", where=nowhere)
        configs = [config_from({"served_model_name": name}) for name in ("a", "b")]
        first, second = (
            IngressModel(config, WorkerPool("test"), of)
            for config, of in zip(configs, (gate, None), strict=True)
        )
        assert texts(sources(second)) == [], "a model without a gate lacks none"
        away = "does not answer: requests go to the least-loaded worker"
        assert texts(sources(first)) == [f"the gate {away}"]
        assert texts(sources(second, first)) == [f"the gate of a {away}"]
        await asyncio.gather(first.pool.close(), second.pool.close())

    run(scenario())


def test_what_a_gate_learns_and_cannot_keep_is_said_until_it_can(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "missing"
    setup = GateSetup(host="127.0.0.1", snapshot_file=str(folder / "lengths.npz"))

    async def scenario() -> None:
        gate = GateServer(setup)
        client = GateClient("x", lambda: gate.where(setup))
        asking = asyncio.ensure_future(client.run())
        of = sources(IngressModel(config_from({}), pool := WorkerPool("test"), client))
        await waiting.until(lambda: client.answers)
        ended = pb.Label(request_id="r", features=pb.Features(model="m"), length=30, ended="stop")
        gate.service.learner.labels.append(ended)
        assert of.now() == ()
        await gate.save()
        await waiting.until(of.now)
        (warning,) = of.now()
        assert "answer lengths is not kept" in warning.text
        assert str(folder) in warning.detail and str(folder) not in warning.text
        folder.mkdir()
        await gate.save()
        await waiting.until(lambda: not of.now())
        asking.cancel()
        await asyncio.gather(asking, pool.close(), gate.close(), return_exceptions=True)

    run(scenario())


def test_a_key_file_that_cannot_be_used_is_said_until_it_can(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    _, record = key_of()
    file.write_text(record.as_line() + "\n")
    watch = KeyFileWatch(ApiKeys([record]), str(file), lambda: None)
    of = sources(keys=watch)
    asyncio.run(watch.look())
    assert of.now() == () and value(of_keys(watch)) == 0
    file.write_text("{\n")
    asyncio.run(watch.look())
    (warning,) = of.now()
    assert "keys before it stay in force" in warning.text and value(of_keys(watch)) == 1
    assert str(file) in warning.detail and str(file) not in warning.text
    file.write_text(record.as_line() + "\n")
    asyncio.run(watch.look())
    assert of.now() == () and value(of_keys(watch)) == 0


@pytest.mark.parametrize(("left_days", "said"), [(8, ""), (6.9, "expires within"), (0, "expired")])
def test_a_certificate_is_said_a_week_before_its_end(
    tmp_path: Path, left_days: float, said: str
) -> None:
    make_all(tmp_path, "test", days=30)
    certificates = certificates_of(tmp_path)
    at_s = time.time() + 86_400 * left_days
    certificates.current = replace(certificates.current, expires_at_s=at_s)
    found = texts(sources(clients=certificates))
    assert len(found) == (1 if said else 0)
    assert all("certificate for clients" in text and said in text for text in found)


def test_a_new_certificate_that_is_refused_is_said_until_one_is_taken(tmp_path: Path) -> None:
    make_all(tmp_path, "test", days=30)
    certificates = certificates_of(tmp_path)
    of, good = sources(cluster=certificates), (tmp_path / "server.crt").read_text()
    (tmp_path / "server.crt").write_text("none")
    certificates.reload()
    assert of.now() == (), "it may be half written"
    certificates.reload()
    (warning,) = of.now()
    assert warning == OperatorWarning(
        "a new certificate cannot be used, and the one before it stays (for cluster)",
        certificates.complaint,
    )
    assert "server.crt" in warning.detail
    (tmp_path / "server.crt").write_text(good)
    certificates.reload()
    assert of.now() == ()
