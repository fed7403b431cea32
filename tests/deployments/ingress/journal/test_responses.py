"""Responses of several ingresses over one store: each finds, follows and continues them all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deployments.ingress.core.errors import CATALOGUE
from penstock.deployments.ingress.journal import background
from tests.deployments.ingress.journal.server import SlowBackend
from tests.deployments.ingress.journal.test_journals import KEYS, http_of
from tests.deployments.ingress.journal.test_resume import RESPONSES, events_of
from tests.deployments.serving import EngineBackend, Serving
from tests.deployments.state.servers import RedisServer
from tests.deployments.waiting import eventually

BODY: dict[str, Any] = {"input": "Of the sea.", "max_output_tokens": 8, "temperature": 1.0}
LONG = {**BODY, "max_output_tokens": 150, "ignore_eos": True, "seed": 4, "background": True}
RUNNING = ("queued", "in_progress")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def two(redis: RedisServer) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of two servers over one store."""
    url = f"redis://127.0.0.1:{redis.port}/0"
    backends = SlowBackend(), SlowBackend()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(background, "LEASE_S", 60.0)  # however long the machine stands still
        servers = [stack.enter_context(Serving(b, state_url=url, api_keys=KEYS)) for b in backends]
        first, second = (stack.enter_context(http_of(server)) for server in servers)
        yield first, second
    for backend in backends:
        backend.stop()


def begun(http: httpx.Client, **changed: Any) -> str:
    """The path of a new response in the background."""
    answer = http.post(RESPONSES, json=LONG | changed)
    assert answer.status_code == 200, answer.text
    return f"{RESPONSES}/{answer.json()['id']}"


def ended(http: httpx.Client, path: str) -> dict[str, Any]:
    end_s = time.monotonic() + 90
    while True:
        answer = http.get(path)
        assert answer.status_code == 200, answer.text
        if answer.json()["status"] not in RUNNING:
            return dict(answer.json())
        assert time.monotonic() < end_s, "did not end in time"
        time.sleep(0.05)


def events(http: httpx.Client, path: str, after: int | None = None) -> list[Any]:
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    with http.stream("GET", path, params=query) as response:
        assert response.status_code == 200, response.read()
        return events_of(response.iter_lines())[0]


def said(body: dict[str, Any]) -> Any:
    return [item.get("content") for item in body["output"]], body["usage"]["output_tokens"]


def test_every_ingress_knows_a_response(two: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = two
    made = first.post(RESPONSES, json=BODY).json()
    path = f"{RESPONSES}/{made['id']}"
    assert second.get(path).json() == made == first.get(path).json()
    items = second.get(f"{path}/input_items").json()
    assert items == first.get(f"{path}/input_items").json()
    assert items["data"][0]["content"][0]["text"] == BODY["input"]
    more = {**BODY, "input": "Go on.", "previous_response_id": made["id"], "seed": 1}
    answers = [each.post(RESPONSES, json=more).json() for each in two]
    assert said(answers[0]) == said(answers[1])
    inputs = first.get(f"{RESPONSES}/{answers[1]['id']}/input_items").json()["data"]
    assert [item["role"] for item in inputs] == ["user", "assistant", "user"]
    assert second.delete(path).json()["deleted"]
    for each in two:
        assert each.get(path).status_code == 404
        refused = each.post(RESPONSES, json=more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            404,
            "previous_response_id",
        )


def test_only_its_caller_finds_a_response(two: tuple[httpx.Client, httpx.Client]) -> None:
    path = f"{RESPONSES}/{two[0].post(RESPONSES, json=BODY).json()['id']}"
    stranger = {"Authorization": f"Bearer {KEYS[1]}"}
    for each in two:
        assert each.get(path, headers=stranger).status_code == 404
        assert each.delete(path, headers=stranger).status_code == 404
        assert each.post(f"{path}/cancel", headers=stranger).status_code == 404
        query = {"stream": "true"}
        assert each.get(path, params=query, headers=stranger).status_code == 404
    unstored = two[0].post(RESPONSES, json={**BODY, "store": False}).json()
    assert two[1].get(f"{RESPONSES}/{unstored['id']}").status_code == 404


def test_another_ingress_follows_and_ends_what_runs(
    two: tuple[httpx.Client, httpx.Client],
) -> None:
    first, second = two
    path = begun(first, stream=False, max_output_tokens=450)  # it runs until it is cancelled
    assert second.get(path).json()["status"] in RUNNING
    cancelled = second.post(f"{path}/cancel").json()
    assert cancelled["status"] == "cancelled" and ended(first, path) == cancelled
    assert second.post(f"{path}/cancel").json() == cancelled
    gone = begun(first, max_output_tokens=450)
    assert second.delete(gone).json()["deleted"]
    eventually(lambda: first.get(gone).status_code == 404)

    with first.stream("POST", RESPONSES, json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        own, _ = events_of(lines, 5)
        path = f"{RESPONSES}/{own[0]['response']['id']}"
        followed = events(second, path, 2)  # until the end, while the first one generates
        own += events_of(lines)[0]
    assert followed == own[3:]
    assert own[-1]["response"] == second.get(path).json() == ended(first, path)
    assert events(second, path) == own and events(first, path, 7) == own[8:]


def test_a_server_that_ends_hands_its_responses_over(
    redis: RedisServer, two: tuple[httpx.Client, httpx.Client]
) -> None:
    _, second = two
    alone = ended(second, begun(second))
    backend = SlowBackend()
    url = f"redis://127.0.0.1:{redis.port}/0"
    with Serving(backend, state_url=url, api_keys=KEYS) as third, http_of(third) as http:
        path = begun(http)
        eventually(lambda: len(said_so_far(http, path)) > 10, 60)
        assert third.journals is not None
    backend.stop()
    begin_s = time.monotonic()
    after = ended(second, path)
    assert said(after) == said(alone) and after["status"] == alone["status"]
    assert time.monotonic() - begin_s < 60


def test_what_is_handed_over_keeps_its_deadline(
    redis: RedisServer, two: tuple[httpx.Client, httpx.Client]
) -> None:
    _, second = two
    backend = SlowBackend()
    url = f"redis://127.0.0.1:{redis.port}/0"
    with Serving(backend, state_url=url, api_keys=KEYS) as third, http_of(third) as http:
        deadline = {"x-request-timeout-ms": "2500"}
        body = LONG | {"max_output_tokens": 480}

        def begun_in_time() -> str | None:
            """Its path; None: the machine stood still until its deadline."""
            answer = http.post(RESPONSES, json=body, headers=deadline)
            assert answer.status_code == 200, answer.text
            path = f"{RESPONSES}/{answer.json()['id']}"
            while http.get(path).json()["status"] in RUNNING:
                if len(said_so_far(http, path)) > 10:
                    return path
                time.sleep(0.01)
            return None

        paths = (begun_in_time() for _ in range(5))
        path = next(each for each in paths if each is not None)
    backend.stop()
    after = ended(second, path)
    assert after["status"] == "failed", after["status"]
    assert after["error"]["message"] == CATALOGUE["deadline_exceeded"].message


def said_so_far(http: httpx.Client, path: str) -> str:
    output = http.get(path).json()["output"]
    return "".join(part["text"] for item in output for part in item["content"])


def test_without_an_answer_of_the_store(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path).start()
    backend = EngineBackend()
    url = f"redis://127.0.0.1:{redis.port}/0"
    with Serving(backend, state_url=url) as serving, http_of(serving, None) as http:
        made = http.post(RESPONSES, json=BODY).json()
        assert made["store"] is True
        redis.kill()
        for refused in (
            http.get(f"{RESPONSES}/{made['id']}"),
            http.post(RESPONSES, json=LONG),
            http.post(RESPONSES, json={**BODY, "previous_response_id": made["id"]}),
            http.post(RESPONSES, json={**BODY, "store": True}),
        ):
            assert refused.status_code == 503, refused.text
            assert refused.json()["error"]["code"] == "state_unavailable"
        assert http.post(RESPONSES, json={**BODY, "store": False}).status_code == 200
        answer = http.post(RESPONSES, json=BODY)
        assert answer.status_code == 200 and answer.json()["store"] is False
        with http.stream("POST", RESPONSES, json={**BODY, "stream": True}) as response:
            assert response.headers["x-penstock-resumable"] == "0"
            last = events_of(response.iter_lines())[0][-1]["response"]
            # The server has drawn the seed: the answer may end by itself.
            assert last["status"] in ("incomplete", "completed") and last["store"] is False
        redis.start()
        eventually(lambda: http.post(RESPONSES, json={**BODY, "store": True}).is_success)
    redis.kill()
    backend.stop()
