"""Web pages of other origins: which browsers may show them the answers of this server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress.http.listener.hosts import AllowedHosts
from penstock.workers.errors import ConfigError
from penstock.workers.request import FinishReason
from tests.deployments.security.keys import bearer, key_of
from tests.deployments.serving import ScriptedBackend, Serving

APP, EVIL = "https://app.example.com:8443", "https://evil.example"
KEY, RECORD = key_of()
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def preflight(server: Serving, origin: str, method: str = "POST") -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization, content-type, x-request-timeout-ms",
    }
    return httpx.options(server.base_url + CHAT, headers=headers)


def ask(server: Serving, origin: str, **headers: str) -> httpx.Response:
    headers["origin"] = origin
    return httpx.post(server.base_url + CHAT, json=BODY, headers=headers, timeout=30)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Serving]:
    backend = ScriptedBackend([5], FinishReason.STOP)
    with Serving(backend, api_keys=[RECORD], origins=(APP,)) as server:
        yield server


@pytest.fixture(scope="module")
def keyless() -> Iterator[Serving]:
    """As a server on loopback is without keys."""
    backend = ScriptedBackend([5], FinishReason.STOP)
    with Serving(backend, hosts=AllowedHosts((), (APP,)), origins=(APP,)) as server:
        yield server


@pytest.mark.parametrize("kind", ["keyed", "keyless"])
def test_a_preflight_needs_no_key(kind: str, request: pytest.FixtureRequest) -> None:
    server: Serving = request.getfixturevalue(kind)
    for method in ("GET", "HEAD", "POST", "DELETE"):
        answer = preflight(server, APP, method)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == APP
        assert method in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    assert preflight(server, APP, "PUT").status_code == 400
    for origin in (EVIL, "null", APP.upper(), f"{APP}.evil.example", "https://app.example.com"):
        refused = preflight(server, origin)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


def test_answers_and_errors_can_be_read_by_the_page(keyed: Serving) -> None:
    answer = ask(keyed, APP, **bearer(KEY))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == APP
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert answer.headers["vary"] == "Origin"
    refused = ask(keyed, APP)
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["access-control-allow-origin"] == APP


def test_a_stream_can_be_read_by_the_page(keyed: Serving) -> None:
    headers = {"origin": APP, **bearer(KEY)}
    answer = httpx.post(keyed.base_url + CHAT, json={**BODY, "stream": True}, headers=headers)
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_key_works_from_everywhere_and_its_answer_cannot_be_read(keyed: Serving) -> None:
    answer = ask(keyed, EVIL, **bearer(KEY))
    assert answer.status_code == 200  # the key decides; the browser keeps it from the page
    assert "access-control-allow-origin" not in answer.headers


def test_a_server_without_keys_lets_in_the_same_origins(keyless: Serving) -> None:
    answer = ask(keyless, APP)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == APP
    for origin in (EVIL, "null", APP.removesuffix(":8443"), APP.replace("https", "http")):
        refused = ask(keyless, origin)
        assert refused.status_code == 421, origin
        assert "access-control-allow-origin" not in refused.headers
    # The page's server may not give itself a name that leads here.
    assert ask(keyless, APP, host="evil.example").status_code == 421
    assert ask(keyless, "http://localhost:3000").status_code == 200


def test_all_origins() -> None:
    backend = ScriptedBackend([5], FinishReason.STOP)
    with Serving(backend, hosts=AllowedHosts((), "*"), origins=("*",)) as server:
        for origin in (EVIL, "null"):
            assert preflight(server, origin).headers["access-control-allow-origin"] == "*"
            answer = ask(server, origin)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "*"


def test_without_the_option_nothing_is_allowed() -> None:
    backend = ScriptedBackend([5], FinishReason.STOP)
    with Serving(backend, api_keys=[RECORD]) as server:
        assert preflight(server, APP).status_code == 401
        answer = ask(server, APP, **bearer(KEY))
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "given",
    [
        *("app.example.com", "https://", "https://app.example.com/", "HTTPS://app.example.com"),
        *("https://App.example.com", "https://*.example.com", "null", "https://a@b", "//a"),
        *("https://a b", "https://a?", "https://a#b", "https://ok.example, evil"),
    ],
)
def test_what_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^allowed_origins: .* is no origin"):
        ServeConfig(allowed_origins=given)


def test_origins_are_listed_with_commas() -> None:
    given = " https://a.example ,http://[::1]:3000,app://local, "
    expected = ("https://a.example", "http://[::1]:3000", "app://local")
    assert ServeConfig(allowed_origins=given).origins == expected
    assert ServeConfig().origins == ServeConfig(allowed_origins="").origins == ()


def test_all_origins_need_keys() -> None:
    with pytest.raises(ConfigError, match=r"^allowed_origins \*: without API keys"):
        ServeConfig(allowed_origins="*").check_access()
    with pytest.raises(ConfigError, match=r"^allowed_origins \*: without API keys"):
        ServeConfig(allowed_origins="https://a.example,*").check_access()
    ServeConfig(allowed_origins="https://a.example").check_access()
    ServeConfig(allowed_origins="*", api_keys_file="keys").check_access()
    ServeConfig(allowed_origins="*", insecure=True).check_access()
