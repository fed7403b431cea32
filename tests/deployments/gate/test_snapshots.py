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
from penstock.deployments.prediction.features import Features
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
        redis.start()
        async with asyncio.timeout(60):
            while not np.allclose(predicted(server), learnt, rtol=1e-5):
                await asyncio.sleep(0.1)
                await server.save()
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
        await asyncio.sleep(0.5)
        await server.close()

    asyncio.run(live())
    assert backend.run(lambda store: store.get("predictor/x", budget_s=5.0)) is not None
