"""A request that ended three workers is refused by every ingress that shares a state store."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deployments.client import Client, ClientError
from penstock.deployments.ingress.dispatch.lost_requests import LostRequests
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.dispatch.shared_refusals import (
    PAUSE_S,
    REMEMBER_S,
    SharedRefusals,
)
from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.store import StateDown
from tests.deployments.ingress.dispatch.test_lost_requests import call
from tests.deployments.ingress.test_continuation import Fatal, Node
from tests.deployments.serving import Serving
from tests.deployments.waiting import eventually

PROMPT = [5, Fatal.TOKEN, 7]
BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.0}


@pytest.fixture
def state_url(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"sqlite://{tmp_path}"


class Down:
    """A store that does not answer."""

    num_asked = 0

    async def get(self, name: str, *, budget_s: float) -> None:
        self.num_asked += 1
        raise StateDown("no answer")

    async def put(self, name: str, value: bytes, **_: Any) -> None:
        raise StateDown("no answer")


def test_what_one_ingress_refuses_another_one_does(run, state_url):
    async def scenario():
        store = await open_store(StateOptions(state_url=state_url))
        first, second = LostRequests(), LostRequests()
        for each in (first, second):
            each.shared = SharedRefusals(store)
        assert not await second.is_refused(call("a").admission, 0.0)
        await first.refuse(call("a"), 0.0)
        assert await second.is_refused(call("again").admission, 0.0)
        assert not await second.is_refused(call("other", temperature=0.5).admission, 0.0)
        await store.close()

    run(scenario())


def test_the_store_is_asked_only_while_a_refusal_may_be_there(run, state_url):
    now = 0.0

    async def scenario():
        nonlocal now
        shared = SharedRefusals(await open_store(StateOptions(state_url=state_url)), lambda: now)
        assert shared.asks()  # a refusal may be older than this ingress
        now = REMEMBER_S + 1.0
        assert not shared.asks()
        shared.saw_loss()
        assert shared.asks()
        await shared._store.close()

    run(scenario())


def test_without_an_answer_of_the_store_each_ingress_knows_its_own(run):
    now = 0.0

    async def scenario():
        nonlocal now
        down, lost = Down(), LostRequests()
        lost.shared = SharedRefusals(down, lambda: now)  # type: ignore[arg-type]
        await lost.refuse(call("a"), 0.0)
        assert await lost.is_refused(call("again").admission, 0.0)
        for _ in range(3):
            assert not await lost.is_refused(call("b", temperature=0.5).admission, 0.0)
        assert down.num_asked == 1  # the others did not wait for it
        now = PAUSE_S + 0.1
        assert not await lost.is_refused(call("b", temperature=0.5).admission, 0.0)
        assert down.num_asked == 2

    run(scenario())


@contextlib.contextmanager
def ingress(state_url: str, nodes: list[Node]):
    """Both front ends over a pool with these workers, and a refusal store of their own."""
    pool = WorkerPool("test", lost_wait_s=30.0)
    with Serving(pool, state_url=state_url, max_model_len=512) as servers:
        assert servers.journals is not None
        store = servers.journals.store
        servers.call(lambda: setattr(pool.lost_requests, "shared", SharedRefusals(store)))
        servers.call(lambda: pool.update([node.channel.info for node in nodes]))
        eventually(lambda: pool.num_connected == len(nodes))
        try:
            yield servers, pool
        finally:  # its links run on the loop of the servers, which is closed with them
            servers.wait(pool.close())


def over_http(servers: Serving) -> None:
    answer = httpx.post(f"{servers.base_url}/v1/completions", json=BODY, timeout=120)
    assert answer.status_code == 500, answer.text
    assert answer.json()["error"]["code"] == "request_killed_workers"
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


def over_grpc(servers: Serving) -> None:
    with Client(servers.grpc_target) as client, pytest.raises(ClientError) as raised:
        client.complete(PROMPT, max_tokens=4, temperature=0.0)
    assert raised.value.code == "request_killed_workers"
    assert raised.value.status.name == "ABORTED"


def test_an_ingress_that_has_just_begun_refuses_it_on_both_front_ends(model, state_url):
    """The first ingress loses three workers to it; at the second no worker computes anything."""
    nodes: list[Node] = [Fatal(model), Fatal(model)]
    is_over = threading.Event()
    with ingress(state_url, nodes) as (servers, pool):

        def replace_workers() -> None:
            while not is_over.wait(0.05):
                for i, node in enumerate(nodes):
                    if not node.thread.alive:
                        nodes[i] = Fatal(model)
                infos = [node.channel.info for node in nodes]
                servers.call(partial(pool.update, infos))

        replacing = threading.Thread(target=replace_workers)
        replacing.start()
        over_http(servers)
        over_grpc(servers)
        num_refused = pool.lost_requests.num_refused
        is_over.set()
        replacing.join()
        servers.call(lambda: None)
    assert num_refused in (1, 2)  # the two requests may have the same parameters
    fresh = Node(model)
    with ingress(state_url, [fresh]) as (servers, pool):
        over_http(servers)
        over_grpc(servers)
        assert pool.lost_requests.num_refused == 0
        assert httpx.post(
            f"{servers.base_url}/v1/completions", json={**BODY, "prompt": [5, 6, 7]}, timeout=60
        ).is_success
    assert fresh.engine.stats().num_prompt_tokens == 2
    for node in (*nodes, fresh):
        node.stop()
