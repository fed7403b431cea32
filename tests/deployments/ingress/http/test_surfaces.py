"""What no HTTP path may take, whichever API it belongs to; good traffic afterwards is as before."""

from __future__ import annotations

import httpx
import pytest

from penstock.deployments.ingress.core.service import MAX_BODY_BYTES
from penstock.workers.request import FinishReason
from tests.deployments.serving import ScriptedBackend, Serving, tokenizer

TURN = [{"role": "user", "content": "a"}]
GOOD = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"model": "builtin", "max_tokens": 4, "messages": TURN},
    "/v1/messages/count_tokens": {"model": "builtin", "messages": TURN},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},  # and a file
    "/v1/penstock/jobs": {
        **{"id": "j", "number": 1, "name": "in", "host": "h", "state": "running"},
        **{"num_lines": 1, "num_completed": 0, "num_failed": 0, "num_in_flight": 1},
    },
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
ADAPTER = {"lora_name": "a"}
REFUSED = {  # what a server whose adapters stay as they are answers to a right body
    "/v1/load_lora_adapter": ({**ADAPTER, "lora_path": "/a"}, 404),
    "/v1/unload_lora_adapter": (ADAPTER, 404),
}
JSON = {"content-type": "application/json"}
DEEP = b'{"model": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
CORPUS = {
    "nothing": (b"", JSON, 400),
    "no object": (b"[]", JSON, 400),
    "half an object": (b'{"model": "a"', JSON, 400),
    "not UTF-8": (b'{"model": "\xff\xfe"}', JSON, 400),
    "half a surrogate pair": (rb'{"model": "\ud800"}', JSON, 400),
    "10 000 deep": (DEEP, JSON, 400),
    "NaN": (b'{"temperature": NaN}', JSON, 400),
    "a name of 100 000": (b'{"' + b"x" * 100_000 + b'": 1}', JSON, 400),
    "an unknown field": (b'{"no_such_field": 1}', JSON, 400),
    "too large": (b'{"model": "' + b"x" * MAX_BODY_BYTES + b'"}', JSON, 413),
    "a form": (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415),
    "compressed": (b"{}", {**JSON, "content-encoding": "gzip"}, 415),
}


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    backend = ScriptedBackend(tokenizer().encode("water"), FinishReason.STOP)
    with (
        Serving(backend, data_dir=tmp_path_factory.mktemp("data")) as servers,
        httpx.Client(base_url=servers.base_url, timeout=30) as plain,
    ):
        form = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
        GOOD["/v1/batches"]["input_file_id"] = plain.post("/v1/files", **form).json()["id"]
        yield plain


@pytest.mark.parametrize("path", [*GOOD, *REFUSED])
@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_is_refused(raw, path, name):
    content, headers, status = CORPUS[name]
    answer = raw.post(path, content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert len(answer.content) < 2000, "an error does not repeat what was sent"
    body, status = REFUSED.get(path) or (GOOD[path], 200)
    assert raw.post(path, json=body).status_code == status


def test_the_corpus_goes_to_every_path_that_takes_a_body(raw):
    paths = raw.get("/openapi.json").json()["paths"]
    with_body = {path for path, each in paths.items() if "requestBody" in each.get("post", {})}
    uploads = {"/v1/files"}  # a form: batches/test_routes.py has a corpus of its own
    assert with_body == {*GOOD, *REFUSED} | uploads
