"""An expert store that is suspended (SIGSTOP) or slow, as an engine on another node sees it."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator

import pytest
import ray
import torch

from penstock.deployments.experts import client as store_client
from penstock.deployments.experts.client import ExpertStoreClient
from penstock.deployments.experts.remote import RemoteExperts
from penstock.deployments.experts.spec import StoreSpec, remove_all
from penstock.deployments.experts.store import StoreActor
from penstock.deployments.supervision.actors import named_actor
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import StoreUnavailable
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.models.loader import load_model
from penstock.workers.request import STORE_UNAVAILABLE, Delta, Request, SamplingParams
from penstock.workers.stats import ExpertStats
from tests.deployments.experts.test_far_store import suspended

STATS = ExpertStats(4, 15, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def ends(engine: Engine, name: str) -> list[Delta]:
    engine.add(Request(name, tuple(range(9, 19)), PARAMS))
    deltas = []
    while engine.has_work():
        deltas += engine.step()
    engine.check()
    return deltas


def ids(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


@pytest.fixture
def far(ray_nodes, request) -> Iterator[ExpertStoreClient]:
    if not ray.is_initialized():
        ray.init(address=ray_nodes.address, log_to_driver=False)
    # Ray takes a while to free one: each attempt of a test has its own.
    name = f"{request.node.name[:30]}-{secrets.token_hex(3)}"
    spec = StoreSpec(name, "builtin-moe", "fp32", "cpu", "/dev/shm", is_single=True)
    made = ExpertStoreClient(spec)
    yield made
    ray.kill(made.actor(), no_restart=True)
    remove_all(spec.folder, spec.app_name)


def test_a_request_that_needs_a_hung_store_ends_with_its_own_error(far, monkeypatch):
    """The first within PACK_S, the next ones at once; the engine goes on, and serves again."""
    torch.set_num_threads(1)
    manifest = far.manifest_for_start()
    pid = far.call_now("view").pid
    settings = ExpertSettings(
        num_slots=8, prefetch=False, manifest=manifest, source=RemoteExperts(far, manifest)
    )
    model = load_model("builtin-moe", weights="fp32", progress=False, experts=settings)
    config = EngineConfig(weights="fp32", device="cpu", num_blocks=300, max_num_seqs=8)
    engine = Engine(config, model)
    expected = ids(ends(engine, "before"))
    with suspended(pid):
        began_s = time.monotonic()
        assert ends(engine, "during")[-1].error == STORE_UNAVAILABLE
        assert time.monotonic() - began_s < store_client.PACK_S + 1.0
        began_s = time.monotonic()
        assert ends(engine, "again")[-1].error == STORE_UNAVAILABLE
        assert time.monotonic() - began_s < 1.0, "each request keeps the engine waiting"
        with pytest.raises(TimeoutError):
            asyncio.run(far.heartbeat(1, STATS, []))
        assert ends(engine, "still")[-1].error == STORE_UNAVAILABLE
        # A worker that starts now.
        monkeypatch.setattr(store_client, "START_TIMEOUT_S", 8.0)
        monkeypatch.setattr(store_client, "ASK_S", 1.0)
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no sign of life for"):
            far.manifest_for_start()
        assert time.monotonic() - began_s < 12.0
        with pytest.raises(StoreUnavailable, match="does not answer 'node' within 1 s"):
            far.is_on_this_node()
    assert asyncio.run(far.heartbeat(1, STATS, [])) == 1
    assert ids(ends(engine, "after")) == expected and len(expected) == PARAMS.max_tokens
    engine.close()


def test_a_store_that_writes_for_long_is_waited_for(far, monkeypatch):
    """It takes longer than all limits, and says in between that it lives."""

    class SlowStore(StoreActor):  # local, so that its code travels to the actor's process
        def manifest(self):
            time.sleep(6.0)
            return super().manifest()

    groups = {store_client.LIVENESS: 1}
    far._handle = named_actor(SlowStore, "slow", far._spec, max_concurrency=8, thread_groups=groups)
    deadline_s = time.monotonic() + 60
    while not far._lives():  # its process starts
        assert time.monotonic() < deadline_s
    monkeypatch.setattr(store_client, "START_TIMEOUT_S", 5.0)
    monkeypatch.setattr(store_client, "ASK_S", 1.0)
    began_s = time.monotonic()
    waiting = [threading.Thread(target=far.manifest) for _ in range(12)]  # more than its threads
    for thread in waiting:
        thread.start()
    assert far.manifest().epoch == 1 and time.monotonic() - began_s > 5.0
    for thread in waiting:
        thread.join()
