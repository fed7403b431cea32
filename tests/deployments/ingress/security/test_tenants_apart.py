"""Nothing that one tenant says is in what another can read, nor in metrics or the log.

Every field in which a request carries text has a word of its own. Then another tenant, with all
roles but admin, calls every route of the app with the first one's ids.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.client import Client
from penstock.deployments.ingress.metrics.collector import PenstockCollector
from penstock.deployments.ingress.metrics.server import MetricsPage
from penstock.deployments.security.roles import ROUTES, Role
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from tests.deployments.security.keys import bearer, key_of
from tests.deployments.serving import EngineBackend, Serving

ROLES = set(Role) - {Role.ADMIN}
ALICE, ALICE_RECORD = key_of("alice", ROLES)
BOB, BOB_RECORD = key_of("bob", ROLES)
FIELDS = (
    "prompt",
    "system",
    "argument",
    "tool",
    "schema",
    "salt",
    "user",
    "metadata",
    "file",
    "id",
)
WORDS = {name: f"zq{name}{number}x7" for number, name in enumerate(FIELDS)}
USER = {"role": "user", "content": f"tell me of {WORDS['prompt']}"}
SYSTEM = {"role": "system", "content": f"you keep {WORDS['system']}"}
FUNCTION = {"name": "look", "arguments": json.dumps({"at": WORDS["argument"]})}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
TOOL = {"name": "look", "description": WORDS["tool"], "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {WORDS["schema"]: {"type": "null"}}}
FEW: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
CHAT = {
    **FEW,
    "messages": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": WORDS["argument"]},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "cache_salt": WORDS["salt"],
    "user": WORDS["user"],
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {**FEW, "prompt": USER["content"], "echo": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "schema": (
        "/v1/completions",
        {**FEW, "prompt": USER["content"], "structured_outputs": {"json": SCHEMA}},
    ),
    "messages": (
        "/v1/messages",
        {"model": "builtin", "system": SYSTEM["content"], "messages": [USER], "max_tokens": 12},
    ),
    "tokenize": ("/tokenize", {"prompt": USER["content"]}),
    "refused value": ("/v1/completions", {"prompt": "a", "user": WORDS["user"], "n": 99}),
    "refused name": ("/v1/completions", {"prompt": "a", WORDS["prompt"]: 1}),
    "refused salt": ("/v1/completions", {"prompt": "a", "cache_salt": WORDS["salt"] + " "}),
    "refused schema": (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"json": {"$ref": WORDS["schema"]}}},
    ),
}
RESPONSE = {
    "input": [USER],
    "instructions": SYSTEM["content"],
    "metadata": {WORDS["metadata"]: WORDS["metadata"]},
    "max_output_tokens": 12,
}


@pytest.fixture(scope="module")
def serving(backend: EngineBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("apart")
    with Serving(
        backend,
        api_keys=[ALICE_RECORD, BOB_RECORD],
        data_dir=folder / "data",
        state_url=f"sqlite://{folder}/state",
        metrics=lambda: _metrics(made),
    ) as made:
        yield made


def _metrics(serving: Serving) -> bytes:
    return bytes(MetricsPage(PenstockCollector(serving.core.metrics, lambda: ())).text())


def _http(serving: Serving, key: str) -> httpx.Client:
    return httpx.Client(base_url=serving.base_url, headers=bearer(key), timeout=60)


def _all_of_alice(serving: Serving) -> tuple[dict[str, str], list[str]]:
    """Her traffic over every interface: ids by the name of their place in a path, and answers."""
    answers: list[str] = []
    with _http(serving, ALICE) as alice:
        for name, (path, body) in REQUESTS.items():
            headers = {"Idempotency-Key": WORDS["id"]} if name == "completion" else {}
            answer = alice.post(path, json=body, headers=headers)
            assert answer.status_code == (400 if name.startswith("refused") else 200), answer.text
            if name == "completion":
                request_id = answer.headers["x-request-id"]
                answers.append(answer.json()["choices"][0]["text"])
        kept = alice.post("/v1/responses", json=RESPONSE).json()
        answers.append(kept["output"][0]["content"][0]["text"])
        line = {"custom_id": WORDS["id"], "method": "POST", "url": "/v1/completions"}
        content = json.dumps({**line, "body": REQUESTS["completion"][1]}).encode()
        named = (f"{WORDS['file']}.jsonl", content)
        file = alice.post("/v1/files", data={"purpose": "batch"}, files={"file": named}).json()
        batch = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        batch |= {"completion_window": "24h", "metadata": {"note": WORDS["metadata"]}}
        made = alice.post("/v1/batches", json=batch).json()
    with Client(serving.grpc_target, api_key=ALICE) as client:
        texts = [each.text for each in client.generate(USER["content"], max_tokens=12)]
        answers.append("".join(texts))
    ids = {"response_id": kept["id"], "file_id": file["id"], "batch_id": made["id"]}
    return {**ids, "request_id": request_id}, answers


def _read_by_bob(serving: Serving, ids: dict[str, str]) -> dict[str, str]:
    """What every route says to bob, with alice's ids in the path and in the query."""
    said = {}
    with _http(serving, BOB) as bob:
        for method, path in sorted(ROUTES):
            is_static = path.startswith("/console/")
            if is_static or (method == "POST" and "{" not in path):
                continue
            url = path.replace("{model:path}", "builtin").format(**ids)
            query = {"limit": 100} if path.endswith(("queue", "files", "batches")) else {}
            answer = bob.request(method, url, params=query)
            said[f"{method} {path}"] = f"{answer.status_code} {dict(answer.headers)} {answer.text}"
        follow_up = {"input": "and?", "previous_response_id": ids["response_id"]}
        said["follow-up"] = bob.post("/v1/responses", json=follow_up).text
        repeated = REQUESTS["completion"][1]
        own = bob.post("/v1/completions", json=repeated, headers={"Idempotency-Key": WORDS["id"]})
        assert own.status_code == 200 and "idempotent-replayed" not in own.headers
        assert own.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with grpc.insecure_channel(serving.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = tuple(bearer(BOB).items())
        for method in (stub.ResumeGenerate, stub.ResumeChat):
            with pytest.raises(grpc.RpcError) as refusal:
                list(method(pb.ResumeRequest(request_id=ids["request_id"]), metadata=metadata))
            assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
        cancelled = stub.Cancel(pb.CancelRequest(request_id=ids["request_id"]), metadata=metadata)
        assert not cancelled.cancelled
    return said


def test_what_a_tenant_says_is_read_by_no_other_and_is_in_no_metric_and_no_log(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "penstock")
    ids, answers = _all_of_alice(serving)
    said = _read_by_bob(serving, ids)
    assert len(said) > 25
    for method in ("GET", "DELETE"):  # not even that there is such a thing
        assert said[f"{method} /v1/files/{{file_id}}"].startswith("404 ")
        assert said[f"{method} /v1/responses/{{response_id}}"].startswith("404 ")
    assert said["GET /metrics"].startswith("200 ") and "vllm:" in said["GET /metrics"]
    secrets = [*WORDS.values(), *answers, ALICE, ALICE_RECORD.digest.hex(), "alice"]
    listed = [ids["response_id"], ids["file_id"], ids["batch_id"], ids["request_id"]]
    for name, text in said.items():
        for secret in secrets:
            assert secret not in text, (name, secret)
        if name.startswith("GET") and "{" not in name:
            assert not any(each in text for each in listed), name
    lines = [record.getMessage() for record in caplog.records if record.name != "httpx"]
    assert len(lines) >= len(REQUESTS)  # the requests themselves are in the log
    for line in lines:
        for secret in (*WORDS.values(), *answers, ALICE, BOB, ALICE_RECORD.digest.hex()):
            assert secret not in line, (line, secret)
    with _http(serving, ALICE) as alice:  # nothing of hers was ended or removed
        assert alice.get(f"/v1/responses/{ids['response_id']}").status_code == 200
        assert alice.get(f"/v1/files/{ids['file_id']}").status_code == 200
        batch = alice.get(f"/v1/batches/{ids['batch_id']}").json()
        assert batch["status"] not in ("cancelling", "cancelled")
