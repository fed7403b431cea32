"""Ingresses of two deployments share a gate: newer settings are in force, and none is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.supervision.registry import Registry
from penstock.deployments.supervision.view import IngressInfo

OLD = GateSetup(host="127.0.0.1", max_queued=10, longest_wait_s=5.0, generation=1)
NEW = GateSetup(
    host="127.0.0.1", max_queued=20, admission="reserve_max", may_wake=True, generation=2
)


class Watched(GateClient):
    """Counts its connections, and asks the gate again for its address all the time."""

    num_connections = 0

    async def _serve_stream(self, stream: Any, token: str) -> None:
        self.num_connections += 1
        await super()._serve_stream(stream, token)


@contextlib.asynccontextmanager
async def ends(gate: GateServer, *setups: GateSetup) -> AsyncIterator[list[Watched]]:
    clients = [Watched(f"in{n}", partial(gate.where, each)) for n, each in enumerate(setups)]
    running = [asyncio.ensure_future(each.run()) for each in clients]
    try:
        async with asyncio.timeout(60):
            while not all(each.is_connected for each in clients):
                await asyncio.sleep(0.01)
        yield clients
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await gate.close()


def test_two_ingresses_with_different_settings_stay_connected():
    """V10: each made the gate begin anew with its own settings, 23 times in 5 s."""

    async def scenario() -> tuple[list[int], list[bool], GateSetup, bool]:
        gate = GateServer(OLD)
        async with ends(gate, OLD, NEW, OLD) as clients:
            service = gate.service
            for _ in range(20):  # whatever makes them ask again
                for setup in (OLD, NEW):
                    await gate.where(setup)
                await asyncio.sleep(0.05)
            connected = [each.is_connected for each in clients]
            numbers = [each.num_connections for each in clients]
            return numbers, connected, gate.service.setup, gate.service is service

    numbers, connected, setup, is_same = asyncio.run(scenario())
    assert numbers == [1, 1, 1] and all(connected)
    assert setup == NEW and is_same


def test_newer_settings_are_in_force_at_once_and_what_waits_stays():
    async def scenario() -> tuple[Any, ...]:
        gate = GateServer(OLD)
        where = await gate.where(OLD)
        service = gate.service
        waiting = service.gate.queue
        before = (
            where.generation,
            where.digest == OLD.digest,
            service.gate.settings.longest_wait_s,
        )
        where = await gate.where(NEW)
        after = (where.generation, where.digest == NEW.digest, service.gate.settings.longest_wait_s)
        same = gate.service is service and service.gate.queue is waiting
        limits = (waiting.settings.max_waiting, service.gate.settings.may_wake)
        where = await gate.where(replace(NEW, max_queued=99))  # another command of the same name
        await gate.close()
        return before, after, same, limits, where.digest, service.setup

    before, after, same, limits, digest, setup = asyncio.run(scenario())
    assert before == (1, True, 5.0)
    assert after == (2, True, float("inf"))
    assert same and limits == (20, True)
    assert digest == NEW.digest and setup == NEW


def test_generations_are_numbered_by_their_settings():
    registry = Registry()
    old, new = OLD.digest, NEW.digest
    assert old != new and replace(OLD, generation=7).digest == old
    assert registry.begin() == 0  # who only forgets failures
    assert registry.begin(old) == registry.begin(old) == 1  # Serve may build it again
    assert registry.begin(new) == 2
    assert registry.begin(old) == 3  # a rollback
    restarted = Registry()
    info = IngressInfo("a", 1, "h", "g", 0, generation=3, digest=old)
    restarted.ingress_beat(info)
    restarted.ingress_beat(replace(info, generation=2, digest=new))  # an ingress of before
    assert restarted.begin(old) == 3
    assert restarted.begin(new) == 4


def test_an_ingress_says_once_that_its_settings_are_not_in_force(monkeypatch, caplog):
    from penstock.deployments.gate import actor
    from penstock.deployments.gate.wire import GateAddress

    class Actor:
        class where:
            @staticmethod
            async def remote(_: GateSetup) -> GateAddress:
                return GateAddress("a:1", "t", 1, NEW.generation, NEW.digest)

    monkeypatch.setattr(actor, "named_actor", lambda *_, **__: Actor)

    async def scenario() -> None:
        gate = actor.GateActor("app", OLD)
        for _ in range(3):
            await gate.where()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    (line,) = [each.getMessage() for each in caplog.records]
    assert "keeps the settings of generation 2" in line and "generation 1, are not" in line
