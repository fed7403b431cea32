"""Two tenants on one server: neither finds out by the prefix cache what the other has asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.deployments.client import Client, ClientError
from penstock.deployments.gate.forecast.prefix_affinity import prefix_marks
from penstock.deployments.ingress.core.validation import cache_domain
from tests.deployments.serving import EngineBackend, Serving

KEYS = ("key-of-alice", "key-of-bob")
ALICE, BOB = KEYS


@pytest.fixture(scope="module")
def serving(backend: EngineBackend) -> Iterator[Serving]:
    with Serving(backend, api_keys=KEYS) as made:
        yield made


def cached(serving: Serving, key: str | None, prompt: Any, **body: Any) -> int:
    """Tokens of the prompt that came from the prefix cache, by a completion."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = httpx.post(
        f"{serving.base_url}/v1/completions",
        json={"prompt": prompt, "max_tokens": 2, "temperature": 0, **body},
        headers=headers,
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt_of(name: str) -> list[int]:
    """A prompt of 128 tokens that no other test sends."""
    return [5 + (n * 7 + sum(map(ord, name)) * 13) % 300 for n in range(128)]


def test_a_guess_of_anothers_prompt_finds_nothing(serving: Serving) -> None:
    secret = prompt_of("secret")
    assert cached(serving, ALICE, secret) == 0
    assert cached(serving, ALICE, secret) >= 96  # the positive control
    assert cached(serving, BOB, secret) == 0
    assert cached(serving, BOB, [*secret[:64], *prompt_of("other")[:64]]) >= 48  # his own
    assert cached(serving, ALICE, [*secret[:64], *prompt_of("third")[:64]]) >= 48


def test_a_salt_separates_the_requests_of_one_tenant(serving: Serving) -> None:
    prompt = prompt_of("salted")
    assert cached(serving, ALICE, prompt, cache_salt="a") == 0
    assert cached(serving, ALICE, prompt, cache_salt="a") >= 96
    assert cached(serving, ALICE, prompt, cache_salt="b") == 0
    assert cached(serving, ALICE, prompt) == 0
    assert cached(serving, BOB, prompt, cache_salt="a") == 0


def test_the_choices_of_one_call_share_their_prompt(serving: Serving) -> None:
    prompt = prompt_of("choices")
    assert cached(serving, BOB, prompt, n=4, cache_salt="x") == 0
    assert cached(serving, BOB, prompt, cache_salt="x") >= 96


def cached_over_grpc(client: Client, prompt: list[int], **options: Any) -> int:
    *_, last = client.generate(prompt, max_tokens=2, **options)
    assert last.usage is not None
    return last.usage.cached_tokens


def test_over_grpc_the_same(serving: Serving) -> None:
    prompt = prompt_of("over grpc")
    with Client(serving.grpc_target, api_key=ALICE) as alice:
        assert cached_over_grpc(alice, prompt) == 0
        assert cached_over_grpc(alice, prompt) >= 96
        assert cached_over_grpc(alice, prompt, cache_salt="s") == 0
        assert cached_over_grpc(alice, prompt, cache_salt="s") >= 96
        with pytest.raises(ClientError, match="cache_salt"):
            cached_over_grpc(alice, prompt, cache_salt="a b")
    with Client(serving.grpc_target, api_key=BOB) as bob:
        assert cached_over_grpc(bob, prompt) == 0
        assert cached_over_grpc(bob, prompt, cache_salt="s") == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("salt", ["", "a b", "x" * 129, "é", "a\n", 5])
def test_a_salt_of_other_characters_is_refused(serving: Serving, path: str, salt: Any) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
    }
    answer = httpx.post(
        serving.base_url + path,
        json={**bodies[path], "cache_salt": salt},
        headers={"authorization": f"Bearer {BOB}"},
        timeout=60,
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


def test_sharing_by_setting(backend: EngineBackend) -> None:
    prompt = prompt_of("shared by setting")
    with Serving(backend, api_keys=KEYS, shares_prefixes=True) as serving:
        assert cached(serving, ALICE, prompt) == 0
        assert cached(serving, BOB, prompt) >= 96
        assert cached(serving, BOB, prompt, cache_salt="own") == 0


def test_without_keys_all_share(backend: EngineBackend) -> None:
    with Serving(backend) as serving:
        cached(serving, None, prompt_of("no keys"))
        assert cached(serving, None, prompt_of("no keys")) >= 96


def test_domains_differ_by_principal_and_salt_and_so_do_marks() -> None:
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("a:b", ""), ("", "a:b"), ("a", ":b")]
    domains = [cache_domain(*pair) for pair in pairs]
    assert len(set(domains)) == len(pairs) and domains[0] == b""
    assert {len(each) for each in domains[1:]} == {16}
    marks = [prefix_marks(range(512), domain) for domain in domains]
    assert len({each for of_domain in marks for each in of_domain}) == 5 * len(pairs)
