"""A server without keys answers to its own names: web pages cannot reach it by theirs."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from penstock.deployments.ingress.http.listener.hosts import AllowedHosts
from tests.deployments.serving import ScriptedBackend, Serving


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(ScriptedBackend(), hosts=AllowedHosts(["my-tunnel.example"])) as made:
        yield made


def ask(serving: Serving, host: str, origin: str | None = None, method: str = "GET") -> int:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    return httpx.request(method, serving.base_url + "/v1/models", headers=headers).status_code


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "LOCALHOST:80"),
        *("my-tunnel.example", "My-Tunnel.Example:443"),
    ],
)
def test_its_own_names(serving: Serving, host: str) -> None:
    assert ask(serving, host) == 200
    assert ask(serving, host, f"http://{host}") == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"),
        *("evil.example#localhost", "localhost@evil.example", "[::1", "", "127.0.0.2", "0"),
    ],
)
def test_other_names_and_origins_are_refused(serving: Serving, host: str) -> None:
    assert ask(serving, host) == 421
    assert ask(serving, "localhost", f"http://{host}") == 421
    assert ask(serving, host, "http://localhost") == 421


def test_a_page_without_origin_of_its_own_is_refused_and_the_error_says_what_to_do(
    serving: Serving,
) -> None:
    headers = {"host": "localhost", "origin": "null"}
    answer = httpx.post(serving.base_url + "/v1/chat/completions", json={}, headers=headers)
    assert answer.status_code == 421
    error = answer.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert "'null'" in error["message"] and "allowed_hosts" in error["message"]


def test_no_answer_may_be_taken_for_a_page_or_framed(serving: Serving) -> None:
    for path in ("/v1/models", "/docs", "/", "/nowhere", "/health"):
        answer = httpx.get(serving.base_url + path)
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"], path
    for path in ("/docs", "/"):
        answer = httpx.get(serving.base_url + path)
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("limit", ["000000001" + "0" * 5000, "00000000019999999999", "0", "-1", ""])
@pytest.mark.parametrize("path", ["/v1/penstock/queue", "/v1/responses/resp_x/input_items"])
def test_a_number_of_many_digits_is_refused(serving: Serving, path: str, limit: str) -> None:
    answer = httpx.get(f"{serving.base_url}{path}?limit={limit}")
    assert answer.status_code in (400, 404)  # 404: looked for first
    assert answer.json()["error"]["code"] in ("invalid_value", "not_found")
