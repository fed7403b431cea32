"""HEAD: what GET would answer, without the body, on every route that has GET."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.deployments.ingress.core.request_metrics import RequestMetrics
from penstock.deployments.ingress.metrics.collector import PenstockCollector
from penstock.deployments.ingress.metrics.probes import Probes
from penstock.deployments.ingress.metrics.server import MetricsServer
from penstock.deployments.security.roles import ROUTES, Access, Role
from penstock.workers.request import FinishReason
from tests.deployments.ingress.journal.test_resume import COMPLETIONS, events_of
from tests.deployments.security.keys import bearer, key_of
from tests.deployments.serving import ScriptedBackend, Serving

PATHS = [path for method, path in ROUTES if method == "GET"]
KEY, RECORD = key_of()
METRICS_KEY, METRICS_RECORD = key_of(roles=[Role.METRICS])
# Of one answer, and not of what is asked for.
OF_ONE_ANSWER = {"x-request-id", "date", "transfer-encoding"}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("data")
    backend = ScriptedBackend([5], FinishReason.STOP)
    keys = [RECORD, METRICS_RECORD]
    with Serving(backend, api_keys=keys, data_dir=folder, metrics=lambda: b"up 1\n") as running:
        yield running


def both(url: str, **headers: str) -> tuple[httpx.Response, httpx.Response]:
    return httpx.get(url, headers=headers), httpx.head(url, headers=headers)


def headers_of(answer: httpx.Response) -> dict[str, str]:
    return {name: each for name, each in answer.headers.items() if name not in OF_ONE_ANSWER}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", [None, KEY, METRICS_KEY], ids=["none", "bare", "metrics"])
def test_status_and_headers_are_those_of_get(serving: Serving, path: str, key: str | None) -> None:
    url = serving.base_url + path.replace("{model:path}", "builtin").replace("{", "").rstrip("}")
    got, head = both(url, **({} if key is None else bearer(key)))
    assert got.status_code != 405 and got.content
    if ROUTES["GET", path] is not Access.PUBLIC and key is None:
        assert got.status_code == 401
    assert head.status_code == got.status_code
    given, known = headers_of(head), headers_of(got)
    if path.startswith("/v1/penstock/"):  # with times, whose digits differ
        del given["content-length"], known["content-length"]
    assert given == known
    assert head.content == b""


def test_no_byte_of_a_body_is_sent(serving: Serving) -> None:
    """A client takes such a byte for the begin of the next answer."""
    host, _, port = serving.base_url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n"
            b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"  # without a key
            b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    page, refused, live, end = received.split(b"\r\n\r\n")
    assert page.startswith(b"HTTP/1.1 200") and b"text/html" in page
    assert refused.startswith(b"HTTP/1.1 401") and live.startswith(b"HTTP/1.1 200")
    assert end == b'{"status":"ok"}'


def test_a_path_without_get_refuses_head(serving: Serving) -> None:
    refused = httpx.head(serving.base_url + "/v1/chat/completions", headers=bearer(KEY))
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert httpx.head(serving.base_url + "/nowhere", headers=bearer(KEY)).status_code == 404


def test_the_size_of_a_file_is_told_and_the_file_is_not_read(serving: Serving) -> None:
    line = b'{"method": "POST", "url": "/v1/completions", "body": {"prompt": 1}}\n'
    with httpx.Client(base_url=serving.base_url, headers=bearer(KEY)) as http:
        file = http.post(
            "/v1/files", files={"file": ("a.jsonl", line * 5000)}, data={"purpose": "batch"}
        ).json()
        head = http.head(f"/v1/files/{file['id']}/content")
        assert head.headers["content-length"] == str(len(line) * 5000) and head.content == b""
        ranged = http.head(f"/v1/files/{file['id']}/content", headers={"range": "bytes=0-9"})
        assert (ranged.status_code, ranged.headers["content-length"]) == (206, "10")


def test_head_takes_no_stream_over(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    backend = ScriptedBackend([5], 0.2, [6], 0.2, [7], 0.2, [8], FinishReason.STOP)
    url = f"sqlite://{tmp_path}"
    with (
        Serving(backend, state_url=url) as servers,
        httpx.Client(base_url=servers.base_url, timeout=60) as http,
        http.stream("POST", COMPLETIONS, json={"prompt": "It was", "stream": True}) as response,
    ):
        lines = response.iter_lines()
        events_of(lines, 1)
        path = f"{servers.base_url}/v1/penstock/streams/{response.headers['x-request-id']}"
        head = httpx.head(path)
        assert head.status_code == 200 and head.content == b""
        assert head.headers["x-penstock-resumable"] == "1"
        assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "content-length" not in head.headers
        assert events_of(lines)[0][-1] == "[DONE]"  # and not the error resumed_elsewhere
        got, head = both(path)
        assert headers_of(got) == headers_of(head)
        assert httpx.head(path[:-1]).status_code == 404


def test_the_metrics_port_answers_head() -> None:
    probes = Probes(lambda: True)
    probes.note()
    collector = PenstockCollector(RequestMetrics("m", 9), tuple)
    server = MetricsServer(collector, "127.0.0.1", 0, probes)
    try:
        for path, status in (("/metrics", 200), ("/live", 200), ("/nowhere", 404)):
            got, head = both(f"http://{server.address}{path}")
            assert head.status_code == got.status_code == status
            assert got.content and head.content == b""
            assert head.headers["content-type"] == got.headers["content-type"]
            assert int(head.headers["content-length"]) > 0
    finally:
        server.close()
