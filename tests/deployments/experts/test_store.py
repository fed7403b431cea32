"""The expert store of a node: restarts, statistics, repair of damage; and a real store, killed."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from penstock.deployments.cli import main as cli
from penstock.deployments.cli.experts import table
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.experts import store as expert_store
from penstock.deployments.experts.client import ExpertStoreClient
from penstock.deployments.experts.remote import RemoteExperts
from penstock.deployments.experts.spec import StoreSpec, app_folder, remove_all
from penstock.deployments.experts.store import ExpertStore
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.expert_file import CorruptedExpert, ExpertFile
from penstock.workers.models.loader import load_model
from penstock.workers.stats import ExpertStats, LayerAccuracy
from tests.deployments.ports import free_port
from tests.workers.checkpoints import make_checkpoint
from tests.workers.experts.moe_cases import flip

STATS = ExpertStats(4, 15, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)


@pytest.fixture
def spec(tmp_path):
    return StoreSpec("test/app", str(make_checkpoint("olmoe")), "fp32", "cpu", str(tmp_path))


def files_of(spec):
    return sorted(path.name for path in app_folder(spec.folder, spec.app_name).iterdir())


def stats(**changes):
    return dataclasses.replace(STATS, **changes)


def refuse(*_: object) -> None:
    raise LoadError("packed otherwise")


@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_loads_once_and_finds_its_file_again(spec, weights, monkeypatch):
    spec = dataclasses.replace(spec, weights=weights)
    store = ExpertStore(spec)
    manifest = store.manifest()
    assert store.manifest() is manifest
    view = store.view()
    assert (view.num_loads, view.epoch, view.pid) == (1, 1, os.getpid())
    reborn = ExpertStore(spec)
    assert reborn.manifest() == manifest and reborn.view().num_loads == 0
    assert manifest.is_packed == (weights == "int4")
    if manifest.is_packed:  # a release that packs otherwise does not believe it
        monkeypatch.setattr(expert_store.PackedExperts, "check", refuse)
        assert ExpertStore(spec).view().num_loads == 1
    assert app_folder(spec.folder, spec.app_name).parent == Path(spec.folder), "no way out of it"
    remove_all(spec.folder, spec.app_name)
    assert not list(Path(spec.folder).iterdir())


def test_what_an_earlier_life_left_is_not_believed_blindly(spec, monkeypatch):
    manifest = ExpertStore(spec).manifest()
    path = Path(manifest.path)
    with path.open("ab") as file:  # cut off or grown: not what was written
        file.write(b"x")
    reborn = ExpertStore(spec)
    assert len(ExpertFile(reborn.manifest()).rows(0, 0)) == manifest.inner
    assert reborn.view().num_loads == 1
    monkeypatch.setattr(
        expert_store.CheckpointExperts, "identity", lambda *_: "of other files by now"
    )
    again = ExpertStore(spec)
    assert again.manifest().checkpoint == "of other files by now"
    assert again.view().num_loads == 1 and len(files_of(spec)) == 2


def test_reload(spec):
    store = ExpertStore(spec)
    old = store.manifest()
    kept = ExpertFile(old)
    new = store.reload()
    assert (new.epoch, new.digests()) == (2, old.digests())
    assert not Path(old.path).exists() and len(files_of(spec)) == 2
    assert np.array_equal(kept.rows(1, 1), ExpertFile(new).rows(1, 1)), "old maps stay good"
    assert ExpertStore(spec).manifest() == new


def test_damage_that_a_worker_tells_of_is_mended(spec):
    clock = [100.0]
    store = ExpertStore(spec, clock=lambda: clock[0])
    manifest = store.manifest()
    flip(Path(manifest.path), manifest.entries[3].offset)
    key = manifest.entries[3].layer, manifest.entries[3].expert
    with pytest.raises(CorruptedExpert):
        ExpertFile(manifest).rows(*key)
    assert store.heartbeat(7, STATS, []) == 1
    store.heartbeat(7, stats(num_corrupted=2), [])
    deadline_s = time.monotonic() + 60
    while store.manifest().epoch == 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert len(ExpertFile(store.manifest()).rows(*key)) == manifest.inner
    clock[0] += 60
    # It has not changed over yet, or its damage is of the old epoch: no reason to read again.
    assert store.heartbeat(7, stats(num_corrupted=5), []) == 2
    assert store.heartbeat(7, stats(num_corrupted=5, epoch=2), []) == 2
    assert store.view().num_loads == 2


def test_hints_and_idleness(spec):
    clock = [5.0]
    store = ExpertStore(spec, clock=lambda: clock[0])
    assert store.hints() == [] and store.idle_s() == 0
    store.heartbeat(1, STATS, [(0, 1, 5), (2, 2, 4)])
    store.heartbeat(2, STATS, [(2, 2, 3), (1, 0, 1)])
    assert store.hints() == [(2, 2), (0, 1), (1, 0)]
    clock[0] += 30
    assert store.idle_s() == 30 and store.view().num_workers == 0


def test_a_store_waits_for_the_workers_that_start(spec):
    clock = [5.0]
    store = ExpertStore(spec, clock=lambda: clock[0])
    clock[0] += 100
    assert store.idle_s() == 100  # made, and without a request
    for _ in range(2):
        store.manifest_for_start()
    clock[0] += 300  # they load the dense weights
    assert store.idle_s() == 0
    store.heartbeat(1, STATS, [])
    clock[0] += 70
    store.heartbeat(1, STATS, [])
    assert store.idle_s() == 0  # the second is still under way
    clock[0] += expert_store.START_S
    assert store.idle_s() == expert_store.START_S  # and has died


def test_pack(spec):
    store = ExpertStore(spec)
    expert_file = ExpertFile(store.manifest())
    requests = [(0, 1, np.arange(112)), (2, 3, np.array([5, 0, 39])), (1, 1, np.arange(0))]
    packed = store.pack(requests)
    inner = expert_file.manifest.inner
    rows = packed.reshape(-1, expert_file.manifest.row_bytes)
    assert np.array_equal(rows[:inner], expert_file.rows(0, 1))
    assert np.array_equal(rows[inner:], expert_file.rows(2, 3)[[5, 0, 39]])
    assert store.view().num_packed_bytes == packed.nbytes
    assert store.pack([]).shape == (0,)


class Near:
    """A client whose store is in this process; counts questions."""

    def __init__(self, store):
        self.store, self.num_requested = store, []

    def pack(self, requests):
        self.num_requested.append(len(requests))
        return self.store.pack(requests)


@pytest.mark.parametrize(
    ("mode", "weights", "copies"),
    [
        ("exact", "fp32", ""),
        ("quantized", "fp32", "int8"),
        ("quantized", "fp32", "int4"),
        ("exact", "int4", ""),
    ],
)
def test_a_worker_on_another_node(spec, mode, weights, copies, monkeypatch):
    """The same bits as from a map; one question brings all that a layer waits for."""
    from tests.workers.experts.test_modes import teacher_forced

    store = ExpertStore(dataclasses.replace(spec, copies=copies, weights=weights))
    client = Near(store)
    remote = RemoteExperts(client, store.manifest())

    def run(**options):
        settings = ExpertSettings(
            num_slots=15, prefetch=False, mode=mode, copies=copies or "int8",
            manifest=store.manifest(), **options,
        )  # fmt: skip
        model = load_model(spec.model, weights=weights, progress=False, experts=settings)
        got = teacher_forced(model, list(range(3, 17)), mode, 14)
        assert model.routed is not None
        model.routed.close()
        return got

    assert torch.equal(run(source=remote), run())
    # From one to five experts a layer, each of one chunk: never a question for each of them alone.
    assert max(client.num_requested) > 1 and sum(client.num_requested) > len(client.num_requested)
    assert len(remote.at(store.reload()).rows(1, 1)) == store.manifest().num_rows
    flip(Path(store.manifest().path), store.manifest().entries[0].offset)
    monkeypatch.setattr(store, "_file", ExpertFile(store.manifest()))
    with pytest.raises(CorruptedExpert, match="layer 0, expert 0 is corrupted"):
        remote.rows(0, 0)
    copied = pickle.loads(pickle.dumps(CorruptedExpert("it is", 2, 3)))
    assert (str(copied), copied.layer, copied.expert) == ("it is", 2, 3)


def test_table():
    layer = LayerAccuracy(1, 10, 7, 4, 2, 20, 15)
    seen = stats(
        num_hits=3, num_misses=1, num_withheld=5, num_sparse_neurons=200, num_skipped_neurons=50,
        by_layer=(layer,),
    )  # fmt: skip
    text = "\n".join(table("w", dataclasses.asdict(seen)))
    assert "cached 75.0 %" in text and "skipped 25.0 %" in text and "for 5 layers" in text
    assert text.splitlines()[-1].split() == ["1", "70.0", "%", "50.0", "%", "75.0", "%"]


def test_models_that_have_no_such_experts(spec):
    dense = dataclasses.replace(spec, model="builtin")
    with pytest.raises(ConfigError, match="this one is dense"):
        ExpertStore(dense).manifest()
    twice = dataclasses.replace(spec, weights="int8", copies="int4")
    with pytest.raises(ConfigError, match=r"with int4 copies .*weights is int8"):
        ExpertStore(twice).manifest()


def test_killed_under_load(capsys):
    """Two workers and their store: it is killed, streams go on, it comes back and reads nothing.

    The oracle is the same prompt before. In the end nothing is left in shared memory.
    """
    engine = EngineConfig(
        model="builtin-moe", weights="fp32", device="cpu", num_blocks=300, max_num_seqs=8,
        threads=1, expert_cache_gb=0.006, expert_prefetch="on",
    )  # fmt: skip
    port = free_port()
    config = ServeConfig(
        engine=engine, http_port=port, grpc_port=free_port(), metrics_port=0, num_workers=2,
        app_name="penstock-experts-test", drain_s=2.0,
    )  # fmt: skip
    body = {"prompt": list(range(9, 19)), "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}"

    def ask():
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
        return answer["choices"][0]["text"]

    def workers():
        return [s.experts for _, s in cluster.view().workers]

    cluster = Cluster(config)
    client = ExpertStoreClient(StoreSpec(config.app_name, "builtin-moe", "fp32", "cpu", "/dev/shm"))
    folder = app_folder("/dev/shm", config.app_name)
    try:
        cluster.start_ray()
        cluster.deploy()
        cluster.wait_until_up(lambda _: None)
        view, want = client.call_now("view"), ask()
        assert view.num_loads == 1 and len(list(folder.iterdir())) == 2
        got: list[str] = []
        asking = [threading.Thread(target=lambda: got.append(ask())) for _ in range(6)]
        for thread in asking:
            thread.start()
        time.sleep(0.2)
        os.kill(view.pid, signal.SIGKILL)
        for thread in asking:
            thread.join()
        assert got == [want] * 6
        reborn = client.manifest()
        assert client.call_now("view").num_loads == 0 and reborn.epoch == 1
        far = RemoteExperts(client, reborn)
        some = [(0, 3, np.array([4, 5, 300])), (3, 1, np.arange(352))]
        for mine, theirs in zip(far.gather(some), ExpertFile(reborn).gather(some), strict=True):
            assert np.array_equal(mine, theirs)
        assert cli.main(["experts", "--reload", "--url", url]) == 0
        assert "32 experts read again, epoch 2" in capsys.readouterr().out
        deadline_s = time.monotonic() + 60
        while {each.epoch for each in workers()} != {2}:
            assert time.monotonic() < deadline_s, "workers do not follow to the new epoch"
            assert [ask(), ask()] == [want] * 2
        assert all(each.num_misses and each.by_layer for each in workers())
        status = httpx.get(f"{url}/v1/penstock/status").json()
        assert {each["experts"]["num_experts"] for each in status["workers"]} == {32}
    finally:
        cluster.stop()
    assert not folder.exists()
