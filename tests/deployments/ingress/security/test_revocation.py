"""A key that is revoked, or expires, ends with its streams: over HTTP and gRPC, and no others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deployments.client import Client, ClientError
from penstock.deployments.security.key_file import change_key_file
from penstock.deployments.security.records import KeyRecord
from tests.deployments.security.keys import bearer, key_of
from tests.deployments.serving import ScriptedBackend, Serving
from tests.deployments.waiting import eventually

ENDLESS = [step for _ in range(3000) for step in ([5], 0.02)]


def write(file: Path, *records: KeyRecord) -> None:
    change_key_file(str(file), lambda _: [each.as_line() for each in records])


class Streams:
    """A stream of each kind with one key, each read in a thread of its own."""

    def __init__(self, serving: Serving, key: str):
        self.ends: dict[str, str] = {}
        self.begun: set[str] = set()
        self._serving, self._key = serving, key
        for name, read in (
            ("http", self._http),
            ("grpc", self._grpc),
            ("messages", self._messages),
        ):
            threading.Thread(target=self._read, args=(name, read), daemon=True).start()

    def _read(self, name: str, read: Any) -> None:
        self.ends[name] = read()

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        url = self._serving.base_url + path
        with httpx.stream("POST", url, json=body, headers=bearer(self._key), timeout=60) as answer:
            self.begun.add(path)
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def _http(self) -> str:
        body = {"prompt": "a", "stream": True, "max_tokens": 400}
        *_, last = self._events("/v1/completions", body)
        return str(last.get("error", {}).get("code"))

    def _messages(self) -> str:
        messages = [{"role": "user", "content": "a"}]
        body = {"messages": messages, "stream": True, "max_tokens": 400, "model": "builtin"}
        *_, last = self._events("/v1/messages", body)
        return str(last.get("error", {}).get("type"))

    def _grpc(self) -> str:
        with Client(self._serving.grpc_target, api_key=self._key) as client:
            try:
                for _ in client.generate("a", max_tokens=400):
                    self.begun.add("grpc")
            except ClientError as error:
                return error.code
        return "none"


def test_revocation_ends_the_streams_of_that_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    (first, one), (second, two) = key_of(), key_of()
    write(file, one, two)
    with Serving(ScriptedBackend(*ENDLESS), api_keys_file=file) as serving:
        ended, alive = Streams(serving, first), Streams(serving, second)
        eventually(lambda: len(ended.begun) == len(alive.begun) == 3)
        write(file, replace(one, revoked=time.time()), two)
        eventually(lambda: len(ended.ends) == 3)
        assert ended.ends == {
            "http": "api_key_revoked",
            "grpc": "api_key_revoked",
            "messages": "authentication_error",
        }
        answer = httpx.get(f"{serving.base_url}/v1/models", headers=bearer(first), timeout=30)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "api_key_revoked"
        assert not alive.ends
        write(file, two, key_of("other")[1])  # the line of a key may also be removed
        write(file, key_of("other")[1])
        eventually(lambda: len(alive.ends) == 3)
        assert alive.ends["grpc"] == "api_key_revoked"


def test_a_response_in_the_background_ends_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    (first, one), (second, two) = key_of(), key_of()
    write(file, one, two)
    url = f"sqlite://{tmp_path}/state"
    with Serving(ScriptedBackend(*ENDLESS), api_keys_file=file, state_url=url) as serving:
        body = {"input": "a", "background": True, "max_output_tokens": 400}
        path = f"{serving.base_url}/v1/responses"
        made = httpx.post(path, json=body, headers=bearer(first), timeout=30).json()
        assert serving.journals is not None
        call_id = made["id"].removeprefix("resp_")
        head = serving.wait(serving.journals.head(call_id, "acme"))
        assert head.key_id == one.key_id  # an ingress that takes the call over finds it there

        def status() -> str:
            got = httpx.get(f"{path}/{made['id']}", headers=bearer(second), timeout=30)
            return str(got.json()["status"])

        eventually(lambda: status() == "in_progress")
        write(file, replace(one, revoked=time.time()), two)
        eventually(lambda: status() == "failed")


def test_a_key_that_expires_ends_its_streams(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key, record = key_of(expires=time.time() + 600.0)
    write(file, record)
    with Serving(ScriptedBackend(*ENDLESS), api_keys_file=file) as serving:
        streams = Streams(serving, key)
        eventually(lambda: len(streams.begun) == 3)
        write(file, replace(record, expires=time.time() + 1.0))
        eventually(lambda: len(streams.ends) == 3)
        assert streams.ends["http"] == streams.ends["grpc"] == "api_key_expired"
        with Client(serving.grpc_target, api_key=key) as client, pytest.raises(ClientError) as no:
            list(client.generate("a"))
        assert no.value.code == "api_key_expired"
