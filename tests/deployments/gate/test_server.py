"""The gate as a Ray actor between an ingress and two workers: killed, suspended, and back again.

All connections between them are under TLS, with certificates as `penstock certs init` makes them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray.exceptions import RayError

from penstock.deployments.client import AsyncClient
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.gate.actor import end_gate
from penstock.deployments.prediction import predictor_file
from penstock.deployments.security.authority import make_all
from penstock.deployments.supervision.actors import NAMESPACE
from penstock.deployments.supervision.processes import is_running
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.request import Request, SamplingParams
from tests.deployments.clusters import await_view, generate, prompt, running
from tests.deployments.ports import free_port

# 40 blocks: 640 tokens on each worker, so that some must wait.
ENGINE = EngineConfig(weights="fp32", device="cpu", num_blocks=40, max_num_seqs=16, threads=1)
SOME_WAIT = 40  # requests: more than two workers run at once, whatever the gate has learnt


class House:
    def __init__(self, cluster: Cluster, config: ServeConfig):
        self.cluster, self.config = cluster, config
        self.url = f"http://127.0.0.1:{config.http_port}"
        self.target = f"127.0.0.1:{config.grpc_port}"

    def pid(self) -> int:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                actor = ray.get_actor(f"{self.config.app_name}-gate", namespace=NAMESPACE)
                return ray.get(actor.pid.remote(), timeout=5)
            except (ValueError, RayError, TimeoutError):
                assert time.monotonic() < deadline_s, "the gate does not come back"
                time.sleep(0.1)

    def snapshot_file(self) -> Path:
        """The gate's own process found the same: Ray's processes inherit XDG_STATE_HOME."""
        file = predictor_file.automatic(self.config.app_name, self.config.model_name)
        assert file is not None
        return Path(file)

    def learn(self, num: int, run: Any) -> None:
        num_before = self.status()["num_learnt"]
        run(answers(self, num, 20))
        deadline_s = time.monotonic() + 20
        while self.status()["num_learnt"] < num_before + num:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)

    def end_gate(self) -> float:
        """What it has left: the chances to end or to be left that it has counted."""
        pid, deadline_s = self.pid(), time.monotonic() + 20
        end_gate(self.config.app_name)
        while is_running(pid):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        saved = predictor_file.load(str(self.snapshot_file()))
        return saved.cancels.groups[()].at_risk.sum() if saved.cancels.groups else 0.0

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/v1/penstock/queue", timeout=30).json()

    def status_when(self, name: str) -> dict[str, Any]:
        """As soon as `name` is neither 0 nor empty in it; after 10 s, as it is."""
        deadline_s = time.monotonic() + 10
        while not (status := self.status())[name] and time.monotonic() < deadline_s:
            pass
        return status

    def await_gate(self, within_s: float = 60) -> None:
        """Until the ingress is connected with it, and it knows both workers."""
        deadline_s = time.monotonic() + within_s
        while len((status := self.status())["workers"]) < 2 or status["breaker"] != "closed":
            assert time.monotonic() < deadline_s, status
            time.sleep(0.1)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    certs = tmp_path_factory.mktemp("certs")
    make_all(certs, "gate-test", days=20)
    config = ServeConfig(
        cluster_certs_dir=str(certs),
        engine=ENGINE,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        num_workers=2,
        app_name="penstock-gate-test",
        gate_answer_ms=1000.0,  # on a machine that is busy with other tests
        drain_s=2.0,
    )
    with running(config) as cluster:
        made = House(cluster, config)
        made.await_gate()
        yield made
        pid = made.pid()
    assert not is_running(pid)


async def answers(house: House, count: int, max_tokens: int, meanwhile: Any = None) -> list[Any]:
    async with AsyncClient(house.target) as client:
        started = [asyncio.Event() for _ in range(count)]
        running = [
            asyncio.ensure_future(generate(client, n, max_tokens, started[n])) for n in range(count)
        ]
        await asyncio.wait(
            [asyncio.ensure_future(each.wait()) for each in started],
            return_when=asyncio.FIRST_COMPLETED,
        )
        if meanwhile is not None:
            meanwhile()
        return await asyncio.gather(*running)


def test_under_tls_the_tokens_are_those_of_an_engine_alone(house, run, model):
    house.await_gate()
    view = await_view(house.cluster, lambda view: len(view.workers) == 2, 120)
    assert all(info.is_encrypted for info, _ in view.workers)
    got = run(answers(house, 6, 40))
    assert [ids for ids, _ in got] == [alone(model, number, 40) for number in range(6)]


def alone(model: Any, number: int, max_tokens: int) -> list[int]:
    """The ids of `generate` by an engine that has nothing else to do."""
    engine = Engine(ENGINE, model)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(Request("alone", tuple(prompt(number)), params))
    ids: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            ids += delta.token_ids
    return ids


def test_a_killed_gate_loses_nothing_and_comes_back(house, run):
    house.await_gate()
    before = house.pid()
    seen: list[Any] = []

    def kill() -> None:
        seen.append(house.status_when("num_waiting"))
        os.kill(before, signal.SIGKILL)

    got = run(answers(house, SOME_WAIT, 150, kill))
    assert [(len(ids), error) for ids, error in got] == [(150, None)] * SOME_WAIT
    assert seen[0]["num_waiting"] >= 1  # some of them waited at the gate that was killed
    assert house.pid() != before
    house.await_gate()
    num_before = house.status()["num_asked"] + house.status()["num_passed"]
    again = run(answers(house, 4, 20))
    assert [(len(ids), error) for ids, error in again] == [(20, None)] * 4
    now = house.status()
    assert now["num_asked"] + now["num_passed"] >= num_before + 4  # by the gate again
    deadline_s = time.monotonic() + 20
    while house.status()["num_learnt"] < 4:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_a_gate_that_hangs_holds_no_request_up(house, run):
    house.await_gate()
    pid = house.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        got = run(answers(house, 12, 40))
        took_s = time.monotonic() - began_s
        status = house.status()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [(len(ids), error) for ids, error in got] == [(40, None)] * 12
    assert status["num_fallback"] >= 1 or status["num_passed"] >= 12
    assert took_s < 60
    house.await_gate()


def test_waiting_requests_are_listed_with_their_reasons(house, run):
    house.await_gate()
    await_view(house.cluster, lambda view: len(view.workers) == 2, 120)
    seen: list[Any] = []
    run(answers(house, SOME_WAIT, 150, lambda: seen.append(house.status_when("waiting"))))
    waiting = seen[0]["waiting"]
    assert waiting and waiting[0]["reason"] in ("memory", "slots", "behind")
    assert waiting[0]["expected_s"] >= 0
    assert seen[0]["gate"] is True


def test_a_gate_begins_with_what_the_one_before_it_had_learnt(house, run, own_state_folder):
    file = house.snapshot_file()
    assert own_state_folder in file.parents
    file.unlink(missing_ok=True)
    house.await_gate()
    house.learn(6, run)
    first = house.end_gate()
    assert first > 0 and file.stat().st_mode & 0o777 == 0o600
    house.await_gate()  # of a cluster that goes on, the ingress makes another one
    house.learn(1, run)
    second = house.end_gate()
    assert second > first  # one answer alone counts for a small part of that
    house.await_gate()
