"""/tokenize and /detokenize, held against the tokenizer itself."""

from __future__ import annotations

import httpx
import pytest

from tests.deployments.serving import MODEL, ScriptedBackend, Serving, tokenizer

MESSAGES = [{"role": "user", "content": "What feeds the turbine?"}]
TEXT = "The river – über Stock und Stein."


@pytest.fixture(scope="module")
def raw():
    with (
        Serving(ScriptedBackend()) as servers,
        httpx.Client(base_url=servers.base_url, timeout=30) as plain,
    ):
        yield plain


def test_a_text(raw):
    expected = tokenizer().encode(TEXT)
    body = raw.post("/tokenize", json={"model": MODEL, "prompt": TEXT}).json()
    assert body == {
        "count": len(expected),
        "max_model_len": 512,
        "tokens": expected,
        "token_strs": None,
    }
    again = raw.post("/detokenize", json={"model": MODEL, "tokens": expected}).json()
    assert again == {"prompt": "<|endoftext|>" + TEXT}


def test_pieces_are_those_of_the_vocabulary(raw):
    body = {"prompt": "The river", "return_token_strs": True}
    assert raw.post("/tokenize", json=body).json()["token_strs"] == [
        "<|endoftext|>",
        "The",
        "Ġriver",
    ]


def test_messages_are_counted_as_a_chat_request_has_them(raw):
    expected = tokenizer().encode(tokenizer().render_chat(MESSAGES), add_special_tokens=False)
    body = raw.post("/tokenize", json={"messages": MESSAGES, "temperature": 0.5}).json()
    assert body["tokens"] == expected
    closed = raw.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})
    assert closed.json()["count"] < len(expected)


def test_a_text_longer_than_the_context_is_counted(raw):
    assert raw.post("/tokenize", json={"prompt": "a " * 2000}).json()["count"] > 512


def test_the_special_tokens_are_named_as_vllm_names_them(raw):
    found = raw.get("/tokenizer_info").json()
    known = tokenizer().special_tokens
    assert found["eos_token"] == known["eos_token"] and found["bos_token"] == known["bos_token"]
    assert set(found) == {"bos_token", "eos_token", "pad_token", "unk_token"}
    text = {"prompt": found["bos_token"], "add_special_tokens": False}
    assert raw.post("/tokenize", json=text).json()["tokens"] == [tokenizer().bos_token_id]
    assert raw.get("/tokenizer_info", params={"model": "b"}).status_code == 404


def test_special_tokens(raw):
    (eos,) = tokenizer().eos_token_ids[:1]
    ids = [*tokenizer().encode("river"), eos]
    plain = raw.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True}).json()
    assert plain == {"prompt": "river"}
    assert len(raw.post("/detokenize", json={"tokens": ids}).json()["prompt"]) > len("river")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/tokenize", {}, 400, "missing_parameter", "prompt"),
        ("/tokenize", {"prompt": 7}, 400, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "promt": 1}, 400, "unknown_parameter", "promt"),
        ("/tokenize", {"prompt": "a", "model": "b"}, 404, "model_not_found", "model"),
        ("/tokenize", {"messages": []}, 400, "invalid_value", "messages"),
        ("/tokenize", {"messages": MESSAGES, "prompt": "a"}, 400, "unknown_parameter", "prompt"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [2**40]}, 400, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": "ab"}, 400, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [], "model": "b"}, 404, "model_not_found", "model"),
    ],
)
def test_refusals(raw, path, body, status, code, param):
    answer = raw.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
