"""Embeddings over HTTP: OpenAI's own client, and vectors that are transformers'."""

from __future__ import annotations

import base64
import concurrent.futures
import functools
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from penstock.deployments.security.records import QuotaLimits
from penstock.deployments.security.roles import Role
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from tests.deployments.security.keys import bearer, key_of
from tests.deployments.serving import (
    MODEL,
    EngineBackend,
    Serving,
    engine_serving,
    model,
    reference_ids,
    tokenizer,
)
from tests.deployments.waiting import eventually

TEXTS = [
    "The ship lay at anchor in the harbour.",
    "A vessel was moored at the quay.",
    "He asked for bread, and was given a stone.",
    "It was the best of times",
    "so",
]
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 2e-5}


@functools.cache
def transformers_model() -> Any:
    return AutoModel.from_pretrained(resolve_model(MODEL), dtype=torch.float32).eval()


@torch.inference_mode()
def reference(ids: list[int], dimensions: int | None = None, *, length: bool = True) -> np.ndarray:
    """transformers' hidden state of the last token after the final norm, of length 1."""
    states = transformers_model()(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    vector = states[-1].double().numpy()[:dimensions]
    return vector / np.linalg.norm(vector) if length else vector


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text)


@pytest.fixture(scope="module")
def servers() -> Iterator[Serving]:
    with engine_serving() as servers:
        yield servers


@pytest.fixture(scope="module")
def client(servers: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{servers.base_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def plain(servers: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=servers.base_url, timeout=30) as plain:
        yield plain


def asked(plain: httpx.Client, path: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    answer = plain.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(plain: httpx.Client, path: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    answer = plain.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_openais_client_gets_transformers_vectors(client: openai.OpenAI) -> None:
    """It asks for base64 by itself."""
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [each.index for each in answer.data] == [0, 1, 2, 3, 4]
    for each, text in zip(answer.data, TEXTS):
        np.testing.assert_allclose(each.embedding, reference(ids_of(text)), **CLOSE)
        assert np.linalg.norm(each.embedding) == pytest.approx(1.0, abs=1e-6)
    num_tokens = sum(len(ids_of(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
    assert (answer.model, answer.object) == (MODEL, "list")


def test_each_form_of_input(plain: httpx.Client) -> None:
    want = reference(ids_of(TEXTS[0]))
    forms: list[Any] = [TEXTS[0], [TEXTS[0]], ids_of(TEXTS[0]), [ids_of(TEXTS[0])]]
    for form in forms:
        (found,) = asked(plain, model=MODEL, input=form)["data"]
        np.testing.assert_allclose(found["embedding"], want, **CLOSE, err_msg=repr(form))
    two = asked(plain, input=[ids_of(TEXTS[1]), ids_of(TEXTS[2])])["data"]
    for found, text in zip(two, TEXTS[1:]):
        np.testing.assert_allclose(found["embedding"], reference(ids_of(text)), **CLOSE)


def test_both_encodings_have_the_same_bits(plain: httpx.Client) -> None:
    numbers = asked(plain, input=TEXTS, encoding_format="float")["data"]
    encoded = asked(plain, input=TEXTS, encoding_format="base64")["data"]
    for one, other in zip(numbers, encoded):
        read = np.frombuffer(base64.b64decode(other["embedding"]), dtype="<f4")
        assert np.array(one["embedding"], dtype=np.float32).tobytes() == read.tobytes()


def test_dimensions_are_the_first_ones_and_the_length_is_one_again(plain: httpx.Client) -> None:
    (found,) = asked(plain, input=TEXTS[0], dimensions=7)["data"]
    np.testing.assert_allclose(found["embedding"], reference(ids_of(TEXTS[0]), 7), **CLOSE)
    (raw,) = asked(plain, input=TEXTS[0], dimensions=7, normalize=False)["data"]
    want = reference(ids_of(TEXTS[0]), 7, length=False)
    np.testing.assert_allclose(raw["embedding"], want, rtol=1e-3, atol=1e-3)


def test_the_last_tokens_are_kept(plain: httpx.Client) -> None:
    found = asked(plain, input=TEXTS[0], truncate_prompt_tokens=3)
    want = reference(ids_of(TEXTS[0])[-3:])
    np.testing.assert_allclose(found["data"][0]["embedding"], want, **CLOSE)
    assert found["usage"]["prompt_tokens"] == 3
    long = asked(plain, input="ship " * 2000, truncate_prompt_tokens=-1)
    most = plain.get("/v1/models").json()["data"][0]["max_model_len"]
    assert long["usage"]["prompt_tokens"] == most


def test_beside_answers_and_many_at_once(plain: httpx.Client, client: openai.OpenAI) -> None:
    """Answers are computed in the same steps, and have the ids that they have alone."""
    prompt = ids_of("Once upon a time there was")
    want = reference_ids(prompt, temperature=0.0, max_tokens=40)
    texts = [f"{text} Number {i}." for i in range(40) for text in TEXTS]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 40, "return_token_ids": True}

    def complete(_: int) -> list[int]:
        answer = plain.post("/v1/completions", json=body)
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        answers = pool.map(complete, range(4))
        found = client.embeddings.create(model=MODEL, input=texts)
        assert list(answers) == [want] * 4
    for i in range(0, len(texts), 17):
        want_vector = reference(ids_of(texts[i]))
        np.testing.assert_allclose(found.data[i].embedding, want_vector, **CLOSE)
    assert len(found.data) == len(texts)


def test_the_order_of_retrieval_is_transformers(plain: httpx.Client) -> None:
    query, documents = TEXTS[0], [f"{a} {b}" for a in TEXTS[1:] for b in TEXTS[1:]]
    vectors = np.array([reference(ids_of(text)) for text in documents])
    scores = vectors @ reference(ids_of(query))
    found = asked(plain, "/v1/rerank", query=query, documents=documents)
    assert [each["index"] for each in found["results"]] == list(np.argsort(-scores))
    for each in found["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-4)
        assert each["document"] == {"text": documents[each["index"]]}
    best = asked(
        plain, "/v1/rerank", query=query, documents=documents, top_n=2, return_documents=False
    )
    assert [each["index"] for each in best["results"]] == list(np.argsort(-scores)[:2])
    assert "document" not in best["results"][0]
    pairs = asked(plain, "/v1/score", text_1=query, text_2=documents)["data"]
    np.testing.assert_allclose([each["score"] for each in pairs], scores, atol=1e-4)
    named = asked(plain, "/v1/score", queries=query, documents=documents)["data"]
    assert named == pairs


def test_scores_of_pairs(plain: httpx.Client) -> None:
    found = asked(plain, "/v1/score", text_1=TEXTS[:2], text_2=[TEXTS[0], TEXTS[2]])
    assert found["data"][0]["score"] == pytest.approx(1.0, abs=1e-6)
    want = float(reference(ids_of(TEXTS[1])) @ reference(ids_of(TEXTS[2])))
    assert found["data"][1]["score"] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ""}, "input", "the text is empty"),
        ({"input": ["so", ""]}, "input[1]", "the text is empty"),
        ({"input": [[5, 6], []]}, "input[1]", "the text is empty"),
        ({"input": ["so", [5]]}, "input", "valid"),
        ({"input": [5, 99_999_999]}, "input", "token ids must lie in [0, "),
        ({"input": [[5], [-1]]}, "input[1]", "token ids must lie in [0, "),
        ({"input": {"text": "so"}}, "input", "valid"),
        ({"input": [5] * 513}, "input", "513 tokens, and this model takes at most 512"),
        ({"input": ["so"] * 2049}, "input", "at most 2048 texts"),
        ({"input": "so", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "so", "dimensions": 99_999}, "dimensions", "embeddings of this model have"),
        ({"input": "so", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "so", "temperature": 1}, "temperature", "unknown parameter"),
        ({"input": "so", "endianness": "big"}, "endianness", "not supported"),
        ({"input": "so", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ],
)
def test_bad_input_names_its_field(
    plain: httpx.Client, body: dict[str, Any], param: str, says: str
) -> None:
    error = refused(plain, **body)
    assert error["param"] == param, error
    assert says in error["message"], error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "queries"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 2048}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ],
)
def test_bad_pairs_name_their_field(
    plain: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = refused(plain, path, **body)
    assert error["param"] == param, error


def test_an_unknown_model(plain: httpx.Client) -> None:
    answer = plain.post("/v1/embeddings", json={"input": "so", "model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_text_of_the_whole_context_is_embedded(plain: httpx.Client) -> None:
    ids = [5 + i % 90 for i in range(512)]
    (found,) = asked(plain, input=ids)["data"]
    np.testing.assert_allclose(found["embedding"], reference(ids), **CLOSE)


def test_metrics_count_the_prompt_and_no_answer(servers: Serving, plain: httpx.Client) -> None:
    counts = servers.core.metrics.engines[""]
    before = counts.num_prompt_tokens, counts.num_finished["stop"], counts.total.snapshot().total
    generated = counts.num_generated_tokens
    num = asked(plain, input=TEXTS)["usage"]["prompt_tokens"]
    assert counts.num_prompt_tokens == before[0] + num
    assert counts.num_finished["stop"] == before[1] + len(TEXTS)
    assert counts.num_generated_tokens == generated


def test_it_asks_for_the_role_infer_and_costs_the_tenants_quota() -> None:
    num = len(ids_of(TEXTS[0])) + len(ids_of(TEXTS[1]))
    quotas = QuotaLimits(tokens_per_day=2 * num, requests_per_day=10)
    writer, record = key_of("writer", quotas=quotas)
    watcher, other = key_of("watcher", [Role.METRICS])
    with engine_serving(api_keys=[record, other]) as servers:

        def post(headers: dict[str, str]) -> httpx.Response:
            body = {"input": TEXTS[:2]}
            return httpx.post(f"{servers.base_url}/v1/embeddings", json=body, headers=headers)

        assert post({}).status_code == 401
        assert post(bearer(watcher)).status_code == 403
        answers = [post(bearer(writer)) for _ in range(3)]
        body = {"input": [[5, 6]] * num * 2}
        url = f"{servers.base_url}/v1/embeddings"
        larger = httpx.post(url, json=body, headers=bearer(writer)).json()["error"]
    assert (larger["code"], larger["param"]) == ("quota_too_small", "input")
    assert f"{4 * num} tokens together" in larger["message"]
    assert [each.status_code for each in answers] == [200, 200, 429]
    left = [each.headers["x-ratelimit-remaining-tokens"] for each in answers]
    assert left == [str(num), "0", "0"]
    assert answers[1].headers["x-ratelimit-remaining-requests"] == "8"


def test_a_deadline_that_has_passed_is_an_error_of_time(plain: httpx.Client) -> None:
    headers = {"x-request-timeout-ms": "1"}
    body = {"input": [[5 + i % 90 for i in range(500)]] * 20}
    answer = plain.post("/v1/embeddings", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_client_that_leaves_frees_its_blocks(servers: Serving) -> None:
    engine = servers.backend.engine
    texts = [[5 + (i * n) % 90 for i in range(500)] for n in range(1, 400)]
    body = json.dumps({"input": texts}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json\r\n\r\n"
    aborted = engine.stats().num_finished["abort"]
    with socket.create_connection(("127.0.0.1", servers.http_port)) as connection:
        connection.sendall(head.encode() + body)
        eventually(lambda: engine.pool.num_live > 0)
    eventually(lambda: not servers.core.num_running)
    # The engine's thread may still have messages to read, of texts that it has not begun.
    eventually(lambda: engine.stats().num_finished["abort"] > aborted)
    eventually(lambda: not engine.has_work() and engine.pool.num_live == 0)


def test_a_tokenizers_own_end_of_sequence_is_embedded_too(tmp_path: Path) -> None:
    """As Qwen3-Embedding's: its post-processor appends one, of which the hidden state is taken."""
    shutil.copytree(resolve_model(MODEL), tmp_path, dirs_exist_ok=True)
    stated = json.loads((tmp_path / "tokenizer.json").read_text())
    end_id = tokenizer().eos_token_ids[0]
    end = tokenizer().pieces([end_id])[0]
    stated["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, special_token(end)],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {end: {"id": end, "ids": [end_id], "tokens": [end]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    own = Tokenizer.load(tmp_path)
    bare = own.encode(TEXTS[0], add_special_tokens=False)
    with (
        engine_serving(of=own) as servers,
        httpx.Client(base_url=servers.base_url, timeout=30) as plain,
    ):
        (found,) = asked(plain, input=TEXTS[0])["data"]
        np.testing.assert_allclose(found["embedding"], reference([*bare, end_id]), **CLOSE)
        (found,) = asked(plain, input=TEXTS[0], add_special_tokens=False)["data"]
        np.testing.assert_allclose(found["embedding"], reference(bare), **CLOSE)


def special_token(token: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}


def test_mean_pooling_ranks_as_transformers_does() -> None:
    engine = Engine(
        EngineConfig(num_blocks=512, pooling="mean", max_num_batched_tokens=64), model()
    )
    backend = EngineBackend(engine)
    with (
        Serving(backend) as servers,
        httpx.Client(base_url=servers.base_url, timeout=30) as plain,
    ):
        found = np.array([each["embedding"] for each in asked(plain, input=TEXTS)["data"]])
    backend.stop()
    want = np.array([mean_reference(ids_of(text)) for text in TEXTS])
    np.testing.assert_allclose(found, want, **CLOSE)
    assert np.argsort(-(found @ found[0])).tolist() == np.argsort(-(want @ want[0])).tolist()


@torch.inference_mode()
def mean_reference(ids: list[int]) -> np.ndarray:
    states = transformers_model()(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    vector = states.double().mean(dim=0).numpy()
    return np.asarray(vector / np.linalg.norm(vector))
