"""What the gate's predictor has learnt outlives the gate: in Redis, which may be away."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from penstock.deployments.config import ServeConfig
from penstock.deployments.gate import server as gate_server
from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.prediction import predictor_file
from penstock.deployments.prediction.features import Features
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.url import redis_options
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from tests.deployments.state.servers import RedisServer, redis_backend

FEATURES = Features("m", "alice")


@pytest.fixture
def redis(tmp_path):
    running = RedisServer(
        tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always"
    ).start()
    yield running
    running.kill()


def predicted(server):
    return server.service.learner.predictor.predict(FEATURES).cumulative


async def learn(server, num=40):
    learner = server.service.learner
    features = pb.Features(model="m", tenant="alice")
    learner.labels.extend(
        pb.Label(request_id=f"r{n}", features=features, length=30 + n, ended="stop")
        for n in range(num)
    )
    async with asyncio.timeout(60):
        while learner.num_learnt < num:
            await asyncio.sleep(0.02)


def test_a_gate_on_another_machine_predicts_as_the_last_one(redis):
    setup = GateSetup(host="127.0.0.1", state=redis_backend(redis).options)

    async def live(num):
        server = GateServer(setup)
        await server.where(setup)
        before = predicted(server)
        await learn(server, num)
        await server.save()
        after = predicted(server)
        await server.close()
        return before, after

    fresh, learnt = asyncio.run(live(40))
    restarted, _ = asyncio.run(live(0))
    assert np.allclose(learnt, restarted, rtol=1e-5)
    assert not np.allclose(fresh, restarted, rtol=1e-2)


def test_a_redis_that_is_away_at_the_start_is_not_overwritten(redis, monkeypatch):
    setup = GateSetup(host="127.0.0.1", state=redis_backend(redis).options)

    async def first():
        server = GateServer(setup)
        await server.where(setup)
        await learn(server)
        await server.save()
        learnt = predicted(server)
        await server.close()
        return learnt

    async def second():
        redis.kill()
        server = GateServer(setup)
        await server.where(setup)  # a gate without its store admits requests all the same
        await learn(server, 1)
        await server.save()
        away = predicted(server)
        assert "cannot take the predictor from the state store" in server.snapshot_fault
        redis.start()
        async with asyncio.timeout(60):
            while not np.allclose(predicted(server), learnt, rtol=1e-5):
                await asyncio.sleep(0.1)
                await server.save()
        assert server.snapshot_fault == ""
        await server.close()
        return away

    learnt = asyncio.run(first())
    assert not np.allclose(asyncio.run(second()), learnt, rtol=1e-2)


def test_only_a_redis_is_passed_to_the_gate(tmp_path):
    assert redis_options(ServeConfig()) is None
    assert redis_options(ServeConfig(state_url=f"sqlite://{tmp_path}/s")) is None
    config = ServeConfig(state_url="redis://host:1/2", state_prefix="x:")
    options = redis_options(config)
    assert options is not None
    assert (options.state_url, options.state_prefix) == ("redis://host:1/2", "x:")
    setup = GateSetup(state=options)
    assert setup.digest == GateSetup(state=replace(options)).digest != GateSetup().digest


def test_the_gate_saves_by_and_by(redis, monkeypatch):
    monkeypatch.setattr(gate_server, "SNAPSHOT_S", 0.05)
    backend = redis_backend(redis)
    setup = GateSetup(host="127.0.0.1", state=backend.options, snapshot_key="predictor/x")

    async def live():
        server = GateServer(setup)
        await server.where(setup)
        await learn(server)
        store = await open_store(backend.options)
        async with asyncio.timeout(60):
            while await store.get("predictor/x", budget_s=5.0) is None:
                await asyncio.sleep(0.02)
        await store.close()
        await server.close()

    asyncio.run(live())


def test_a_file_that_cannot_be_written_is_said_once(tmp_path, caplog):
    """And is written when it can be, though nothing more was learnt."""
    folder = tmp_path / "away"
    setup = GateSetup(host="127.0.0.1", snapshot_file=str(folder / "lengths.npz"))

    async def live():
        server = GateServer(setup)
        await server.where(setup)
        await learn(server, 3)
        assert server.snapshot_fault == ""
        for _ in range(3):
            await server.save()
        assert caplog.text.count("cannot save the predictor") == 1
        assert "set predictor_file to" in caplog.text and server.snapshot_fault in caplog.text
        folder.mkdir()
        await server.save()
        assert server.snapshot_fault == ""
        await server.close()

    asyncio.run(live())
    assert (folder / "lengths.npz").exists()


def test_what_has_just_ended_is_learnt_before_the_last_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(gate_server, "LABELS_S", 1000.0)  # nothing is learnt by and by
    setup = GateSetup(host="127.0.0.1", snapshot_file=str(tmp_path / "lengths.npz"))

    async def live():
        server = GateServer(setup)
        await server.where(setup)
        ended = pb.Label(request_id="r", features=pb.Features(model="m"), length=30, ended="stop")
        server.service.learner.labels.extend([ended] * 20)
        await server.save()
        await server.close()
        return server.service.learner.num_learnt

    assert asyncio.run(live()) == 20
    assert ("m",) in predictor_file.load(setup.snapshot_file).ends.groups


def test_an_automatic_file_is_of_the_model_that_is_deployed(tmp_path, monkeypatch):
    """An update to another model keeps the gate, and not the file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    old = GateSetup(host="127.0.0.1", snapshot_file="auto", snapshot_of=("app", "old"))
    new = replace(old, snapshot_of=("app", "new"), generation=1)

    async def live():
        server = GateServer(old)
        for setup in (old, new):
            await server.where(setup)
            num = server.service.learner.num_learnt
            await learn(server, num + 3)
            await server.save()
        await server.close()

    asyncio.run(live())
    names = sorted(each.name for each in (tmp_path / "penstock").iterdir())
    assert [name.rpartition("_")[0] for name in names] == ["app_new", "app_old"]
