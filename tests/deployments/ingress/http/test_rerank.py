"""Scores and ranks of a reranker over HTTP: those of transformers for the published prompt."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from penstock.deployments.ingress.http.ignored_fields import FieldPolicy
from penstock.workers.config import EngineConfig
from penstock.workers.engine.load import load_engine
from penstock.workers.errors import ConfigError
from penstock.workers.pooling.scoring import pair_template
from penstock.workers.text.tokenizer import Tokenizer
from tests.deployments.serving import EngineBackend, Serving
from tests.workers.checkpoints import FAMILIES, random_model, reference_logits
from tests.workers.text.tokenizers_of import checkpoint

QUERY = "Where is the ship?"
DOCUMENTS = [
    "The ship lay at anchor in the harbour.",
    "He asked for bread, and was given a stone.",
    "A vessel was moored at the quay {of} Bristol.",
    "so",
]
YES, NO = "a", "b"
CLOSE = 2e-4
# Of a chat template that knows the roles of rerankers, as sentence-transformers' do.
ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}I:{{ m.content }} "
    "{% elif m.role == 'query' %}Q:{{ m.content }} "
    "{% elif m.role == 'document' %}D:{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}|{% endif %}"
)
USER_ONLY = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def published_prompt(query: str, document: str, instruction: str | None = None) -> str:
    """As the model card of Qwen3-Reranker builds it."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    if instruction is None:
        instruction = "Given a web search query, retrieve relevant passages that answer the query"
    return f"{prefix}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{suffix}"


@functools.cache
def reranker(template: str | None, model_type: str = "qwen3") -> Path:
    """A folder: the words for yes and no are stated as sentence-transformers does."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-rerank-"))
    shutil.copytree(checkpoint("byte_level", template), folder, dirs_exist_ok=True)
    _, settings = FAMILIES[model_type]
    shape = {**settings, "vocab_size": 2048, "max_position_embeddings": 1024}
    random_model(model_type, shape).save_pretrained(folder)
    modules = [{"type": "LogitScore", "path": "1_LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    ids = {"true_token_id": id_of(folder, YES), "false_token_id": id_of(folder, NO)}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    return folder


@pytest.fixture(scope="module", autouse=True)
def removed() -> Iterator[None]:
    yield
    for template, kind in ((None, "qwen3"), (ROLES, "qwen3"), (USER_ONLY, "llama")):
        shutil.rmtree(reranker(template, kind), ignore_errors=True)


def id_of(folder: Path, word: str) -> int:
    (found,) = Tokenizer.load(folder).encode(word, add_special_tokens=False)
    return found


def logit(folder: Path, prompt: str | list[int]) -> float:
    """transformers' logit of YES, less that of NO, after the prompt."""
    ids = prompt if isinstance(prompt, list) else encoded(folder, prompt)
    row = reference_logits(folder, ids)[-1]
    return float(row[id_of(folder, YES)] - row[id_of(folder, NO)])


def encoded(folder: Path, text: str) -> list[int]:
    found = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    return list(found)


def probability(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@contextlib.contextmanager
def served(folder: Path, **options: Any) -> Iterator[httpx.Client]:
    config = EngineConfig(model=str(folder), weights="fp32", num_blocks=256, device="cpu")
    backend = EngineBackend(load_engine(config, report=lambda _: None))
    of = Tokenizer.load(folder)
    with (
        Serving(backend, of=of, pairs=pair_template(folder, config, of), **options) as servers,
        httpx.Client(base_url=servers.base_url, timeout=60) as client,
    ):
        yield client
    backend.stop()


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    with served(reranker(None), max_model_len=1024) as client:
        yield client


def asked(plain: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = plain.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(plain: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = plain.post(path, json=body)
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def test_the_order_and_the_scores_are_those_of_the_published_prompt(plain: httpx.Client) -> None:
    folder = reranker(None)
    logits = [logit(folder, published_prompt(QUERY, each)) for each in DOCUMENTS]
    assert max(logits) - min(logits) > 0.5
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -logits[index])
    answer = asked(plain, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert [each["index"] for each in answer["results"]] == order
    for each in answer["results"]:
        expected = probability(logits[each["index"]])
        assert each["relevance_score"] == pytest.approx(expected, abs=CLOSE)
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    best = asked(plain, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [each["index"] for each in best["results"]] == order[:2]
    lengths = [len(encoded(folder, published_prompt(QUERY, each))) for each in DOCUMENTS]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


def test_scores_of_pairs_as_probabilities_or_logits(plain: httpx.Client) -> None:
    logits = [logit(reranker(None), published_prompt(QUERY, each)) for each in DOCUMENTS]
    one = asked(plain, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    expected = [probability(each) for each in logits]
    assert [each["score"] for each in one] == pytest.approx(expected, abs=CLOSE)
    for name in ("use_activation", "activation"):
        raw = asked(plain, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, **{name: False})["data"]
        assert [each["score"] for each in raw] == pytest.approx(logits, abs=1e-3)
    queries = DOCUMENTS[::-1]
    pairs = asked(plain, "/v1/score", text_1=queries, text_2=DOCUMENTS, use_activation=False)
    expected = [
        logit(reranker(None), published_prompt(q, d))
        for q, d in zip(queries, DOCUMENTS, strict=True)
    ]
    assert [each["score"] for each in pairs["data"]] == pytest.approx(expected, abs=1e-3)


def test_an_instruction_takes_the_place_of_the_models_own(plain: httpx.Client) -> None:
    told = "Find what contradicts the query"
    answer = asked(
        plain, "/v1/score", text_1=QUERY, text_2="so", instruction=told, use_activation=False
    )
    expected = logit(reranker(None), published_prompt(QUERY, "so", told))
    assert answer["data"][0]["score"] == pytest.approx(expected, abs=1e-3)
    assert expected != pytest.approx(logit(reranker(None), published_prompt(QUERY, "so")), abs=0.1)


def test_a_long_document_loses_its_end_and_never_the_query(plain: httpx.Client) -> None:
    folder, document = reranker(None), " ".join(DOCUMENTS) * 4
    whole = encoded(folder, published_prompt(QUERY, document))
    most = len(whole) - 50
    body: dict[str, Any] = {"text_1": QUERY, "text_2": document, "truncate_prompt_tokens": most}
    answer = asked(plain, "/v1/score", use_activation=False, **body)
    assert answer["usage"]["prompt_tokens"] in range(most - 3, most + 1)
    cut = [
        logit(folder, published_prompt(QUERY, document[:length]))
        for length in range(len(document))
        if len(encoded(folder, published_prompt(QUERY, document[:length])))
        == answer["usage"]["prompt_tokens"]
    ]
    score = answer["data"][0]["score"]
    assert any(score == pytest.approx(each, abs=1e-3) for each in cut)
    error = refused(plain, "/v1/score", text_1=QUERY, text_2=document, truncate_prompt_tokens=20)
    assert error["param"] == "truncate_prompt_tokens"
    assert "leaves no room for the document" in error["message"]
    body |= {"text_2": "ship " * 2000, "truncate_prompt_tokens": -1}
    assert asked(plain, "/v1/score", **body)["usage"]["prompt_tokens"] > len(whole)


def test_bad_input_names_its_field(plain: httpx.Client) -> None:
    error = refused(plain, "/v1/rerank", query=QUERY, documents=["so", "ship " * 2000])
    assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")
    error = refused(plain, "/v1/embeddings", input=QUERY)
    assert error["param"] == "model"
    assert "this model is a reranker" in error["message"] and "/v1/rerank" in error["message"]
    assert asked(plain, "/v1/score", text_1=QUERY, text_2="so")["data"]


def test_a_template_that_knows_the_roles_writes_the_pair() -> None:
    folder = reranker(ROLES)
    with served(folder) as plain:
        for told, start in ((None, ""), ("judge", "I:judge ")):
            body: dict[str, Any] = {} if told is None else {"instruction": told}
            answer = asked(
                plain, "/v1/score", text_1=QUERY, text_2="so", use_activation=False, **body
            )
            expected = logit(folder, f"{start}Q:{QUERY} D:so|")
            assert answer["data"][0]["score"] == pytest.approx(expected, abs=1e-3)


def test_a_family_without_a_published_prompt_needs_a_template() -> None:
    folder = reranker(USER_ONLY, "llama")
    with pytest.raises(ConfigError, match=r"the roles query and document: .* --chat-template"):
        pair_template(folder, EngineConfig(model=str(folder)), Tokenizer.load(folder))


def test_an_instruction_for_a_model_that_embeds() -> None:
    for policy, status in ((FieldPolicy("ignore"), 200), (FieldPolicy("refuse"), 400)):
        backend = EngineBackend()
        with (
            Serving(backend, fields=policy) as servers,
            httpx.Client(base_url=servers.base_url, timeout=60) as plain,
        ):
            body = {"text_1": QUERY, "text_2": "so", "instruction": "judge"}
            answer = plain.post("/v1/score", json=body)
        backend.stop()
        assert answer.status_code == status, answer.text
        if status == 200:
            assert answer.headers["x-penstock-ignored-fields"] == "instruction"
        else:
            assert answer.json()["error"]["param"] == "instruction"
