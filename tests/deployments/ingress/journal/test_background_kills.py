"""`kill -9` of the ingress that runs a response in the background: another process goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.ingress.journal.server import JournalServer
from tests.deployments.ingress.journal.test_responses import LONG, begun, ended, events, said
from tests.deployments.ingress.journal.test_resume import RESPONSES, events_of
from tests.deployments.state.servers import RedisServer

pytestmark = pytest.mark.timeout(400)  # each start of a server loads torch


def first_events(http: httpx.Client, num: int) -> list[Any]:
    with http.stream("POST", RESPONSES, json={**LONG, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return events_of(response.iter_lines(), num)[0]


def client(server: JournalServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60)


def test_another_server_goes_on_with_what_a_killed_one_ran(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis").start()
    url = f"redis://127.0.0.1:{redis.port}/0"
    first, second = JournalServer(url), JournalServer(url)
    first.start()
    try:
        with second, client(first) as of_first, client(second) as of_second:
            first.wait()
            alone = ended(of_second, begun(of_second))
            own = first_events(of_first, 12)
            waiting = begun(of_first)  # nobody asks for this one before it has ended
            first.kill()
            path = f"{RESPONSES}/{own[0]['response']['id']}"
            rest = events(of_second, path, 11)
            assert [e["sequence_number"] for e in own + rest] == list(range(len(own + rest)))
            assert said(rest[-1]["response"]) == said(alone)
            assert of_second.get(path).json() == rest[-1]["response"]
            begin_s = time.monotonic()
            assert said(ended(of_second, waiting)) == said(alone)
            assert time.monotonic() - begin_s < 60
            deltas = [e for e in own + rest if e["type"] == "response.output_text.delta"]
            assert "".join(e["delta"] for e in deltas) == alone["output"][0]["content"][0]["text"]
    finally:
        first.kill()
        redis.kill()


def test_the_next_process_on_a_folder_goes_on_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with JournalServer(f"sqlite://{tmp_path}") as server, client(server) as http:
        alone = ended(http, begun(http))
        own = first_events(http, 12)
        waiting = begun(http)
        server.kill()
        server.start()
        server.wait()
        path = f"{RESPONSES}/{own[0]['response']['id']}"
        rest = events(http, path, own[-1]["sequence_number"])
        assert [e["sequence_number"] for e in own + rest] == list(range(len(own + rest)))
        assert said(http.get(path).json()) == said(ended(http, waiting)) == said(alone)
