"""Bodies as well-known clients send them: every one is served.

Each file in clients/ has a body, where it goes, and the fields of it that the answer must name as
ignored. They were written after published captures and the clients' sources, and made shorter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deployments.ingress.http.ignored_fields import HEADER, FieldPolicy
from tests.deployments.serving import EngineBackend, Serving

FILES = sorted((Path(__file__).parent / "clients").glob("*.json"))
CLIENTS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
# What the answer must read, of those that say it.
SHAPED = ("llama-cpp-chat", "llama-cpp-completion", "sglang-chat", "sglang-completion")


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    backend = EngineBackend()
    with (
        Serving(backend, fields=FieldPolicy("ignore"), max_model_len=1024) as servers,
        httpx.Client(base_url=servers.base_url, timeout=60) as plain,
    ):
        yield plain
    backend.stop()


def text_of(answer: httpx.Response) -> str:
    """The text of an answer of chat or completions, streamed or not."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        (choice,) = answer.json()["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    assert answer.text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_its_body_is_served(server: httpx.Client, name: str) -> None:
    client: dict[str, Any] = CLIENTS[name]
    answer = server.post(client["path"], json=client["body"])
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers.get(HEADER, "").split(", ")) == sorted(client["ignored"] or [""])
    if client["body"].get("stream"):
        assert "error" not in [line[7:] for line in answer.text.split("\n") if line[:5] == "event"]
        assert '"error":{' not in answer.text
    if name in SHAPED:
        assert text_of(answer).strip('"') in ("yes", "no")


def test_there_are_clients_of_each_endpoint() -> None:
    paths = {client["path"].partition("?")[0] for client in CLIENTS.values()}
    assert paths == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
    }
