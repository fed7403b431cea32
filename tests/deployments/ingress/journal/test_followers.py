"""Who reads an answer that was generated for another connection is no further request: it uses no
worker and no quota, and does not count among the generated ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.journal import background
from penstock.deployments.security.records import QuotaLimits
from tests.deployments.ingress.journal.server import SlowBackend
from tests.deployments.ingress.journal.test_responses import ended, events
from tests.deployments.ingress.journal.test_resume import (
    COMPLETIONS,
    RESPONSES,
    events_of,
    resume,
    stream,
    whole_of,
)
from tests.deployments.security.keys import bearer, key_of
from tests.deployments.serving import Serving
from tests.deployments.state.servers import RedisServer
from tests.deployments.waiting import eventually, undisturbed

LONG: dict[str, Any] = {"input": "Of the sea.", "max_output_tokens": 60, "ignore_eos": True}
QUOTAS = QuotaLimits(requests_per_day=100, tokens_per_day=100_000)


class Counting(SlowBackend):
    """Counts the requests that reach workers."""

    num_requests = 0

    async def generate(self, admission: AdmissionRequest) -> Any:
        self.num_requests += 1
        async for delta in super().generate(admission):
            yield delta


class Lengths:
    """A Learner."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def learn(self, request: AdmissionRequest, length: int, ended: str) -> None:
        self.seen.append(length)


class Ingress:
    """A server, a client of it, and what it has counted."""

    def __init__(self, stack: ExitStack, url: str, key: str, record: Any):
        self.backend, self.lengths = Counting(), Lengths()
        stack.callback(self.backend.stop)
        serving = Serving(self.backend, state_url=url, api_keys=[record])
        self.serving = stack.enter_context(serving)
        self.core = serving.core
        self.core.runtimes[0].learner = self.lengths
        client = httpx.Client(base_url=serving.base_url, timeout=60, headers=bearer(key))
        self.http = stack.enter_context(client)

    def counts(self) -> dict[str, Any]:
        """Of requests: at workers, ended, learnt, and of their tokens."""
        engines = self.core.metrics.engines.values()
        return {
            "at workers": self.backend.num_requests,
            "ended": sum(sum(each.num_finished.values()) for each in engines),
            "left by clients": self.core.metrics.num_disconnects,
            "learnt": len(self.lengths.seen),
            "tokens": sum(each.num_generated_tokens for each in engines),
        }


def quota_left(ingress: Ingress) -> int:
    """Requests, after a further one."""
    answer = ingress.http.post(COMPLETIONS, json={"prompt": "It was", "max_tokens": 1})
    return int(answer.headers["x-ratelimit-remaining-requests"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ingress, Ingress]]:
    """Neither takes over what the other runs, however long the machine stands still."""
    redis = RedisServer(tmp_path_factory.mktemp("redis")).start()
    url = f"redis://127.0.0.1:{redis.port}/0"
    key, record = key_of("acme", quotas=QUOTAS)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(background, "LEASE_S", 60.0)
        yield Ingress(stack, url, key, record), Ingress(stack, url, key, record)
    redis.kill()


def test_a_follower_at_another_ingress_is_no_request(two: tuple[Ingress, Ingress]) -> None:
    first, second = two
    num_left = quota_left(first)
    before = first.counts(), second.counts()
    body = {**LONG, "background": True, "stream": True}
    with first.http.stream("POST", RESPONSES, json=body) as response:
        lines = response.iter_lines()
        own, _ = events_of(lines, 3)
        path = f"{RESPONSES}/{own[0]['response']['id']}"
        with second.http.stream("GET", path, params={"stream": "true"}) as left:
            events_of(left.iter_lines(), 4)  # this one leaves
        followed = events(second.http, path)
        own += events_of(lines)[0]
    assert followed == own
    eventually(lambda: first.counts()["learnt"] > before[0]["learnt"])
    eventually(lambda: second.core.num_running == 0)
    assert second.counts() == before[1]
    counted = {"at workers": 1, "ended": 1, "learnt": 1, "tokens": 60, "left by clients": 0}
    changed = first.counts()
    assert {name: changed[name] - before[0][name] for name in counted} == counted
    assert num_left - quota_left(first) == 2  # the response, and this request


def test_what_is_read_again_is_no_request(two: tuple[Ingress, Ingress]) -> None:
    first, second = two
    call_id, begun, ids = stream(first.http, COMPLETIONS, {"prompt": "It was", "max_tokens": 20})
    eventually(lambda: first.core.num_running == 0)
    assert first.serving.journals is not None
    first.serving.wait(first.serving.journals.flush())
    before = second.counts()
    again, _ = resume(second.http, call_id, None)
    rest, _ = resume(second.http, call_id, ids[3])
    assert whole_of(again) == whole_of(begun) == whole_of(begun[:4] + rest)
    assert second.counts() == before


def test_what_was_made_in_time_can_be_read_after_its_deadline(
    two: tuple[Ingress, Ingress],
) -> None:
    first, second = two
    body = {**LONG, "max_output_tokens": 5, "background": True, "stream": True}

    def attempt() -> None:
        headers, began_s = {"x-request-timeout-ms": "3000"}, time.monotonic()
        answer = first.http.post(RESPONSES, json=body, headers=headers)
        own, _ = events_of(iter(answer.text.splitlines()))
        path = f"{RESPONSES}/{own[0]['response']['id']}"
        assert ended(first.http, path)["status"] == "incomplete"
        time.sleep(max(began_s + 3.2 - time.monotonic(), 0.0))
        assert events(second.http, path) == own

    undisturbed(attempt, 1.0)


def test_what_was_generated_here_a_moment_ago_is_not_generated_again(
    two: tuple[Ingress, Ingress],
) -> None:
    """Not even what waits to be written to the journal. The last test: it writes no more here."""
    first, _ = two
    journals = first.serving.journals
    assert journals is not None
    first.serving.call(lambda: setattr(journals, "_flush_s", 3600.0))
    time.sleep(0.1)
    call_id, begun, ids = stream(first.http, COMPLETIONS, {"prompt": "It was", "max_tokens": 20})
    num_requests = first.backend.num_requests
    rest, _ = resume(first.http, call_id, ids[3])
    assert whole_of(begun) == whole_of(begun[:4] + rest)
    assert first.backend.num_requests == num_requests
