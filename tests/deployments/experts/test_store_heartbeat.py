"""A worker's heartbeats, while the expert store does not answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from penstock.deployments.experts import client as store_client
from penstock.deployments.experts.client import ExpertStoreClient
from penstock.deployments.experts.spec import StoreSpec
from penstock.deployments.supervision.registry import Registry
from penstock.deployments.worker.replica import WorkerReplica
from penstock.deployments.worker.store_heartbeat import StoreHeartbeat
from penstock.workers.stats import EngineStats, ExpertStats, WorkerInfo

INFO = WorkerInfo("127.0.0.1:1", 7, "token", 1, "builtin-moe", 64)


class HungStore:
    """The handle of an actor that is stopped: calls are sent, and none is answered."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.heartbeat = SimpleNamespace(remote=self._remote)

    def _remote(self, *_: Any) -> asyncio.Future[int]:
        self.num_calls += 1
        return asyncio.get_running_loop().create_future()


def test_a_hung_expert_store_does_not_silence_its_workers(monkeypatch: Any) -> None:
    """The registry hears each heartbeat at once; the store is asked again, one call at a time."""
    monkeypatch.setattr(store_client, "CALL_TIMEOUT_S", 0.2)
    store = HungStore()
    client = ExpertStoreClient(StoreSpec("app", "builtin-moe", "fp32", "cpu", "/dev/shm"))
    client._handle = store
    registry = Registry()

    async def worker_beat(info: WorkerInfo, stats: EngineStats) -> None:
        registry.worker_beat(info, stats)
        heard.append(asyncio.get_running_loop().time())

    heard: list[float] = []
    worker: Any = SimpleNamespace(hottest_experts=lambda _: ())
    replica: Any = SimpleNamespace(
        _node="node",
        _registry=SimpleNamespace(worker_beat=worker_beat),
        _stores=[StoreHeartbeat(client, worker, 1)],
    )
    stats = EngineStats(experts=ExpertStats(4, 15, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0))

    async def scenario() -> float:
        began_s = asyncio.get_running_loop().time()
        for _ in range(5):
            await WorkerReplica._announce(replica, INFO, stats)
        took_s = asyncio.get_running_loop().time() - began_s
        await asyncio.sleep(0)
        assert store.num_calls == 1
        await asyncio.sleep(0.4)
        await WorkerReplica._announce(replica, INFO, stats)
        await asyncio.sleep(0)
        assert store.num_calls == 2
        return took_s

    assert asyncio.run(scenario()) < 0.2
    assert len(heard) == 6
    assert [info.epoch for info, _ in registry.view().workers] == [7]
