"""Ingresses with a data folder each, over one state store: each shows and cancels all batches."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deployments.batch.batch_store import BatchSpec, BatchState, BatchStatus
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.journal import batches as module
from penstock.deployments.ingress.journal.batches import SharedBatches
from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store
from penstock.workers.request import FinishReason
from tests.deployments.serving import ScriptedBackend, Serving
from tests.deployments.state.servers import RedisServer
from tests.deployments.waiting import eventually

KEYS = ["one-of-these-keys", "another-of-these-keys"]
PATH = "/v1/completions"
SLOW = ([5], 60.0)
HELD = 8  # max_tokens of requests that wait for `may_go_on`
may_go_on = threading.Event()


class Quick(ScriptedBackend):
    """Answers at once, unless `max_tokens` says otherwise."""

    async def generate(self, admission: Any) -> Any:
        max_tokens = admission.request.params.max_tokens
        while max_tokens == HELD and not may_go_on.is_set():
            await asyncio.sleep(0.01)
        self.script = SLOW if max_tokens == 9 else ([5], FinishReason.STOP)
        async for delta in super().generate(admission):
            yield delta


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def two(
    redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of two ingresses, each with a folder of its own."""
    url = f"redis://127.0.0.1:{redis.port}/0"
    with ExitStack() as stack:
        clients = []
        for name in ("first", "second"):
            folder = tmp_path_factory.mktemp(name)
            serving = Serving(
                Quick(), state_url=url, api_keys=KEYS, data_dir=folder, name=f"ingress-{name}"
            )
            base_url = stack.enter_context(serving).base_url
            headers = {"Authorization": f"Bearer {KEYS[0]}"}
            client = httpx.Client(base_url=base_url, timeout=60, headers=headers)
            clients.append(stack.enter_context(client))
        yield clients[0], clients[1]


def uploaded(http: httpx.Client, num: int = 3, max_tokens: int = 4) -> str:
    body = {"prompt": "The door", "max_tokens": max_tokens}
    lines = [
        json.dumps({"custom_id": f"{n}", "method": "POST", "url": PATH, "body": body})
        for n in range(num)
    ]
    files: Any = {"file": ("in.jsonl", "\n".join(lines)), "purpose": (None, "batch")}
    return str(http.post("/v1/files", files=files).json()["id"])


def created(http: httpx.Client, file_id: str, **headers: str) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
    return http.post("/v1/batches", json=body, headers=headers)


def status_at(http: httpx.Client, batch_id: str) -> str:
    return str(http.get(f"/v1/batches/{batch_id}").json()["status"])


def test_each_ingress_shows_the_batches_of_the_other(two: tuple[httpx.Client, httpx.Client]):
    first, second = two
    may_go_on.clear()
    batch_id = created(first, uploaded(first, max_tokens=HELD)).json()["id"]
    assert status_at(second, batch_id) in ("validating", "in_progress")  # at once
    may_go_on.set()
    eventually(lambda: status_at(second, batch_id) == "completed", 60)
    shown = [each.get(f"/v1/batches/{batch_id}").json() for each in two]
    assert shown[0] == shown[1] and shown[0]["request_counts"]["completed"] == 3
    time.sleep(1.0)  # they are listed by the second in which they were made
    own = created(second, uploaded(second)).json()["id"]
    for each in two:
        listed = [item["id"] for item in each.get("/v1/batches").json()["data"]]
        assert listed.index(own) < listed.index(batch_id)
        page = each.get("/v1/batches", params={"after": own, "limit": 1}).json()
        assert [item["id"] for item in page["data"]] == [batch_id]
        stranger = {"Authorization": f"Bearer {KEYS[1]}"}
        assert each.get(f"/v1/batches/{batch_id}", headers=stranger).status_code == 404
        assert each.get("/v1/batches", headers=stranger).json()["data"] == []


def test_a_batch_is_cancelled_at_any_ingress(two: tuple[httpx.Client, httpx.Client]):
    first, second = two
    batch_id = created(first, uploaded(first, max_tokens=9)).json()["id"]
    eventually(lambda: status_at(second, batch_id) == "in_progress", 60)
    answer = second.post(f"/v1/batches/{batch_id}/cancel").json()
    assert answer["status"] == "cancelling" and answer["cancelling_at"] is not None
    eventually(lambda: status_at(first, batch_id) in ("cancelling", "cancelled"))
    eventually(lambda: status_at(second, batch_id) == "cancelled", 60)
    assert status_at(first, batch_id) == "cancelled"
    again = second.post(f"/v1/batches/{batch_id}/cancel")
    assert again.status_code == 400 and "cancelled and cannot" in again.json()["error"]["message"]


def test_a_file_is_in_one_folder_and_the_error_says_so(two: tuple[httpx.Client, httpx.Client]):
    first, second = two
    file_id = uploaded(first)
    refused = [
        second.get(f"/v1/files/{file_id}/content"),
        second.get(f"/v1/files/{file_id}"),
        created(second, file_id),
    ]
    for each in refused:
        message = each.json()["error"]["message"]
        assert each.status_code == 404
        assert "ingress ingress-first has it" in message and "data_dir must be one" in message
    assert refused[2].json()["error"]["param"] == "input_file_id"
    stranger = {"Authorization": f"Bearer {KEYS[1]}"}
    hidden = second.get(f"/v1/files/{file_id}", headers=stranger).json()["error"]["message"]
    assert "ingress" not in hidden
    batch_id = created(first, file_id).json()["id"]
    eventually(lambda: status_at(second, batch_id) == "completed", 60)
    output = second.get(f"/v1/batches/{batch_id}").json()["output_file_id"]
    message = second.get(f"/v1/files/{output}/content").json()["error"]["message"]
    assert "ingress ingress-first has it" in message
    assert first.delete(f"/v1/files/{file_id}").json()["deleted"]
    assert "ingress" not in second.get(f"/v1/files/{file_id}").json()["error"]["message"]


def test_a_key_creates_one_batch_at_all_ingresses(two: tuple[httpx.Client, httpx.Client]):
    first, second = two
    file_id = uploaded(first)
    made = created(first, file_id, **{"Idempotency-Key": "of both"})
    again = created(second, file_id, **{"Idempotency-Key": "of both"})
    assert again.status_code == 200 and again.json()["id"] == made.json()["id"]
    assert again.headers["idempotent-replayed"] == "true"


SPEC = BatchSpec(
    id=f"batch_{'a' * 32}",
    principal="acme",
    endpoint=PATH,
    input_file_id=f"file-{'b' * 32}",
    completion_window="24h",
    created_at=1_700_000_000,
    expires_at=1_700_086_400,
    metadata={"for": "a test"},
)
STATE = BatchState(num_lines=9, model="builtin").to(BatchStatus.IN_PROGRESS)


@pytest.fixture(params=["embedded", "redis"])
def options(request: Any, tmp_path: Path, redis: RedisServer) -> StateOptions:
    if request.param == "embedded":
        return StateOptions(state_url=f"sqlite://{tmp_path / 'state'}")
    return StateOptions(state_url=f"redis://127.0.0.1:{redis.port}/0", state_prefix=tmp_path.name)


def test_the_newest_state_is_kept_on_every_store(options: StateOptions) -> None:
    async def scenario() -> None:
        store = await open_store(options)
        batches = SharedBatches(store, "an ingress")
        await batches.created(SPEC)
        found = await batches.get(SPEC.id, "acme")
        assert found is not None and (found.spec, found.state) == (SPEC, BatchState())
        for num in range(5):
            newest = BatchState(**{**asdict(STATE), "status": STATE.status, "num_completed": num})
            batches.note(SPEC, newest)
        await batches._flush()
        await batches.created(SPEC)  # it comes late, and changes nothing
        found = await batches.get(SPEC.id, "acme")
        assert found is not None and (found.spec, found.state) == (SPEC, newest)
        assert await batches.get(SPEC.id, "others") is None
        assert await batches.ids("acme") == [(SPEC.created_at, SPEC.id)]
        assert await batches.ids("others") == []
        assert not await batches.is_cancelled(SPEC.id)
        await batches.cancel(SPEC.id)
        await batches.cancel(SPEC.id)
        assert await batches.is_cancelled(SPEC.id)
        found = await batches.get(SPEC.id, "acme")
        assert found is not None and found.state.status is BatchStatus.CANCELLING
        batches.note(SPEC, newest.to(BatchStatus.COMPLETED))
        await batches.close()  # it writes the rest
        after = SharedBatches(store, "another")
        after.note(SPEC, newest)  # of an executor that has lost the folder meanwhile
        await after._flush()
        found = await after.get(SPEC.id, "acme")
        assert found is not None and found.state.status is BatchStatus.COMPLETED
        await after.close()
        await store.close()

    asyncio.run(scenario())


def test_lists_are_bounded_and_changed_by_many(
    options: StateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LISTED", 8)
    monkeypatch.setattr(module, "BUDGET_S", 30.0)  # else a busy machine leaves some to executors
    specs = [
        BatchSpec(**{**asdict(SPEC), "id": f"batch_{n:032x}", "created_at": n}) for n in range(12)
    ]

    async def scenario() -> None:
        store = await open_store(options)
        several = [SharedBatches(store, f"{n}") for n in range(3)]
        await asyncio.gather(*(several[n % 3].created(each) for n, each in enumerate(specs)))
        listed = await several[0].ids("acme")
        assert len(listed) == 8 and set(listed) <= {(each.created_at, each.id) for each in specs}
        for each in several:
            await each.close()
        await store.close()

    asyncio.run(scenario())


def test_without_an_answer_of_redis_it_is_written_later(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis").start()

    async def scenario() -> None:
        store = await open_store(StateOptions(state_url=f"redis://127.0.0.1:{redis.port}/0"))
        batches = SharedBatches(store, "an ingress")
        redis.kill()
        await batches.created(SPEC)
        batches.note(SPEC, STATE)
        assert not await batches.is_cancelled(SPEC.id)
        with pytest.raises(ServiceError) as error:
            await batches.get(SPEC.id, "acme")
        assert error.value.code == "state_unavailable"
        await asyncio.sleep(2 * module.WRITE_S)
        await asyncio.to_thread(redis.start)
        end_s = time.monotonic() + 60
        while True:
            try:
                found = await batches.get(SPEC.id, "acme")
            except ServiceError:
                found = None
            if found is not None:
                break
            assert time.monotonic() < end_s
            await asyncio.sleep(0.1)
        assert found.state == STATE and await batches.ids("acme")
        await batches.close()
        await store.close()

    try:
        asyncio.run(scenario())
    finally:
        redis.kill()
