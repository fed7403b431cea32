"""The HTTP interface as clients see it: the official client, raw sockets, hostile bodies."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import time

import httpx
import openai
import pytest

from penstock.deployments.ingress.core.service import MAX_BODY_BYTES
from penstock.deployments.ingress.http.openai.other_fields import UNSUPPORTED
from penstock.deployments.ingress.http.openai.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorBody,
    ModelList,
)
from penstock.workers.request import FinishReason
from tests.deployments.serving import (
    MODEL,
    ScriptedBackend,
    Serving,
    reference_ids,
    scripted,
    slowed,
    tokenizer,
)
from tests.deployments.waiting import eventually

MESSAGES = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": "What feeds the turbine?"},
]
PROMPT = "It was a bright morning, and"
SEEDED = {"temperature": 1.0, "seed": 11}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(serving):
    with openai.OpenAI(
        base_url=f"{serving.base_url}/v1", api_key="none", max_retries=0
    ) as official:
        yield official


def expected_text(prompt_ids, num_new=24):
    """What the engine alone gives for the seed of these tests."""
    ids = reference_ids(prompt_ids, max_tokens=num_new, ignore_eos=True, **SEEDED)
    return tokenizer().decode(ids, skip_special_tokens=True)


def chat_ids():
    rendered = tokenizer().render_chat(MESSAGES)
    return tokenizer().encode(rendered, add_special_tokens=False)


def events_of(text):
    """The data of each server-sent event, JSON read."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [
        line[6:] if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        for line in lines
    ]


# The official client

IGNORE_EOS = {"ignore_eos": True}


def test_chat(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, extra_body=IGNORE_EOS, **SEEDED
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected_text(chat_ids())
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(chat_ids())
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(chat_ids()) + 24
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer._request_id
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_chat_streams_the_same_text(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IGNORE_EOS,
        **SEEDED,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[1:-1])
    assert text == expected_text(chat_ids())
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [
        *[None] * (len(chunks) - 2),
        "length",
    ]
    assert len(chunks) > 12, "the text should come in many pieces"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions(client):
    prompt_ids = tokenizer().encode(PROMPT)
    for prompt in (PROMPT, prompt_ids):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, extra_body=IGNORE_EOS, **SEEDED
        )
        assert answer.choices[0].text == expected_text(prompt_ids)
        assert answer.usage.prompt_tokens == len(prompt_ids)
    short = client.completions.create(model=MODEL, prompt=PROMPT, extra_body=IGNORE_EOS, **SEEDED)
    assert short.usage.completion_tokens == 16  # as the API defines it


def test_several_prompts_give_one_choice_each(client):
    prompts = [PROMPT, "The sea", "Ah, my dear"]
    texts = [expected_text(tokenizer().encode(prompt), 8) for prompt in prompts]
    ids = [tokenizer().encode(prompt) for prompt in prompts]
    for prompt in (prompts, ids):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=8, extra_body=IGNORE_EOS, **SEEDED
        )
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 24
    stream = client.completions.create(
        model=MODEL,
        prompt=prompts,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IGNORE_EOS,
        **SEEDED,
    )
    streamed, usage = ["", "", ""], None
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
        usage = chunk.usage
    assert streamed == texts
    assert usage.completion_tokens == 24


def test_stop(client):
    whole = expected_text(chat_ids(), 40)
    stop = whole[9:15]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=40,
        stop=[stop, "never there"],
        extra_body=IGNORE_EOS,
        **SEEDED,
    )
    choice = answer.choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=40,
        stop=stop,
        stream=True,
        extra_body=IGNORE_EOS,
        **SEEDED,
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == whole[: whole.index(stop)]


def test_seed(client):
    def sample(seed):
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=16, seed=seed, temperature=1.0
        )
        return answer.choices[0].message.content

    assert sample(-(2**63)) == sample(-(2**63)) != sample(2**63 - 1)


def test_models(client):
    (served,) = client.models.list().data
    assert (served.id, served.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == served
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("some/other")
    assert error.value.code == "model_not_found"


def test_errors_are_what_the_client_expects(client):
    def ask(**changed):
        given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4} | changed
        return client.chat.completions.create(**given)

    with pytest.raises(openai.BadRequestError) as error:
        ask(temperature=1000)
    assert (error.value.code, error.value.param) == ("invalid_value", "temperature")
    assert error.value.type == "invalid_request_error"
    assert error.value.request_id
    with pytest.raises(openai.NotFoundError) as error:
        ask(model="gpt-5")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as error:
        ask(max_tokens=10_000)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError) as error:
        ask(extra_body={"best_of": 2})
    assert (error.value.code, error.value.param) == ("unsupported_parameter", "best_of")


def test_the_round_trip_of_an_answer(client):
    """What the client got as an answer can be sent back as a message."""
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
    message = answer.choices[0].message.model_dump()
    again = client.chat.completions.create(
        model=MODEL,
        messages=[*MESSAGES, message, {"role": "user", "content": "More."}],
        max_tokens=4,
    )
    assert again.choices


# Frames and shapes


def post(raw, path=CHAT, **body):
    given = {"messages": MESSAGES, "max_tokens": 6} | body
    return raw.post(path, json={name: value for name, value in given.items() if value != ...})


def test_bodies_are_as_documented(raw):
    ChatCompletion.model_validate(post(raw).json())
    completion = post(raw, "/v1/completions", messages=..., prompt="a")
    assert Completion.model_validate(completion.json()).usage is not None
    ModelList.model_validate(raw.get("/v1/models").json())
    ErrorBody.model_validate(raw.get("/nowhere").json())


def test_frames_of_a_stream(raw):
    answer = post(raw, stream=True, stream_options={"include_usage": True}, ignore_eos=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"]
    *chunks, done = events_of(answer.text)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    assert [bool(chunk["choices"]) for chunk in chunks] == [*[True] * (len(chunks) - 1), False]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    without = events_of(post(raw, stream=True).text)
    assert not any("usage" in chunk for chunk in without[:-1])
    legacy = post(raw, "/v1/completions", messages=..., prompt="a", stream=True)
    for chunk in events_of(legacy.text)[:-1]:
        Completion.model_validate(chunk)


def test_the_first_token_is_sent_at_once():
    ids = tokenizer().encode("water")
    with (
        scripted(ids, 20.0) as (_, plain),
        plain.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True}) as answer,
    ):
        start = time.monotonic()
        text = ""
        for piece in answer.iter_text():
            text += piece
            if "water" in text:
                break
        assert time.monotonic() - start < 10
        assert '"role":"assistant"' in text


def test_a_failure_in_mid_stream_is_an_event_and_no_done():
    with scripted([5], "numerical_error") as (servers, plain):
        text = post(plain, stream=True).text
        *_, last = events_of(text)
        ErrorBody.model_validate(last)
        assert last["error"]["code"] == "numerical_error"
        assert "[DONE]" not in text
        official = openai.OpenAI(base_url=f"{servers.base_url}/v1", api_key="none", max_retries=0)
        with official, pytest.raises(openai.APIError):
            list(official.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (("overloaded",), 503, "overloaded"),
        ((RuntimeError("/secret/path"),), 500, "internal_error"),
        (("numerical_error",), 500, "numerical_error"),
    ],
)
def test_a_failure_before_the_first_token_is_a_status(stream, script, status, code):
    with scripted(*script) as (_, plain):
        answer = post(plain, stream=stream)
        assert answer.status_code == status
        error = ErrorBody.model_validate(answer.json()).error
        assert error.code == code
        assert "secret" not in answer.text
        assert ("retry-after" in answer.headers) == (status == 503)
        assert answer.headers["x-request-id"]


def test_characters_of_many_bytes():
    text = "naïve 水门 👩‍👩‍👧‍👦 \x00 end"
    with scripted(*([i] for i in tokenizer().encode(text)), FinishReason.STOP) as (_, plain):
        assert post(plain).json()["choices"][0]["message"]["content"] == text
        *chunks, _ = events_of(post(plain, stream=True).text)
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)


# Refusals; hostile bodies are in hostile.py, for every front end

BAD_VALUES = {
    "temperatur": (0.5, "unknown_parameter", "did you mean 'temperature'"),
    "max_new_tokens": (5, "unknown_parameter", "did you mean 'max_tokens'"),
    "\x1b[31m\n": (5, "unknown_parameter", "\\x1b[31m\\n"),
    "temperature": ("0.5", "invalid_value", "valid number"),
    "seed": (2**63, "invalid_value", "64-bit"),
    "max_tokens": (1.5, "invalid_value", "valid integer"),
    "min_tokens": (10**30, "invalid_value", "lie in [0, 2147483647]"),
    "stop": ([1], "invalid_value", "valid string"),
    "stream": ("yes", "invalid_value", "valid boolean"),
    "top_k": (-2, "invalid_value", "top_k"),
    "stop_token_ids": ([10**9], "invalid_value", "stop_token_ids"),
    "stream_options": ({"include_usage": True}, "invalid_value", "stream: true"),
    "tool_choice": ("required", "invalid_value", "needs tools"),
    "guided_regex": ("[", "invalid_value", "unclosed"),
    "n": (True, "invalid_value", "valid integer"),
    "response_format": ("json", "invalid_value", "valid dictionary"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_parameters_are_refused_by_name(raw, name):
    value, code, words = BAD_VALUES[name]
    answer = post(raw, **{name: value})
    assert answer.status_code == 400
    error = ErrorBody.model_validate(answer.json()).error
    assert error.code == code
    assert error.param == name or name.startswith("\x1b")
    assert words in error.message
    assert "\x1b" not in answer.text


@pytest.mark.parametrize(
    ("choice", "param", "words"),
    [
        ("all", "tool_choice", "'required' or: Input should be a valid dictionary"),
        ({"type": "tool"}, "tool_choice.type", "'function'"),
        ({"type": "function"}, "tool_choice.function", "required"),
    ],
)
def test_a_wrong_value_of_several_kinds_is_named_as_the_client_wrote_it(raw, choice, param, words):
    """And not by what this server calls the kinds."""
    error = ErrorBody.model_validate(post(raw, tool_choice=choice).json()).error
    assert error.param == param
    assert error.message.startswith(f"{param}: ") and words in error.message


def test_an_unknown_parameter_with_the_name_of_a_class_is_named(raw):
    answer = post(raw, stream=True, stream_options={"Strict": 1})
    error = ErrorBody.model_validate(answer.json()).error
    assert error.param == "stream_options.Strict"
    assert error.message == "stream_options.Strict: unknown parameter"


def test_unsupported_parameters_may_be_sent_where_they_change_nothing(raw):
    neutral = {name: values[-1] for name, values in UNSUPPORTED.items()}
    ignored = {"user": "me", "metadata": {"a": 1}, "store": True, "prompt_cache_key": "x"}
    assert post(raw, **neutral, **ignored).status_code == 200
    assert post(raw, **dict.fromkeys(UNSUPPORTED)).status_code == 200  # null
    for name in UNSUPPORTED:
        answer = post(raw, **{name: "something else"})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["code"] == "unsupported_parameter"
        assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"role": "user", "content": 5}, "invalid_value", "messages[0].content"),
        ({"role": "user", "content": "a", "mood": 1}, "unknown_parameter", "messages[0].mood"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]},
            "unsupported_parameter",
            "messages[0].content",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1"}]},
            "missing_parameter",
            "messages[0].tool_calls[0].function",
        ),
        (
            {"role": "user", "content": "a", "tool_call_id": "1"},
            "invalid_value",
            "messages[0].tool_call_id",
        ),
        ({"role": "wizard", "content": "a"}, "invalid_value", "messages"),
    ],
)
def test_messages_are_refused_by_place(raw, message, code, param):
    error = ErrorBody.model_validate(post(raw, messages=[message]).json()).error
    assert (error.code, error.param) == (code, param)


def test_text_parts_are_one_text(raw):
    parts = [{"type": "text", "text": "What feeds "}, {"type": "text", "text": "the turbine?"}]
    messages = [MESSAGES[0], {"role": "user", "content": parts}]
    answers = [post(raw, messages=each, **SEEDED).json() for each in (messages, MESSAGES)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_unknown_paths_and_methods(raw):
    for method, path, status, code in (
        ("GET", "/v1/nowhere%0d%0ax", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
    ):
        answer = raw.request(method, path)
        error = ErrorBody.model_validate(answer.json()).error
        assert (answer.status_code, error.code) == (status, code)
        assert error.message.isprintable()
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/v1/v1/messages", "/v1/messages"),
        ("/health/", "/health"),
        ("/v1/nowhere", None),
    ],
)
def test_a_path_that_is_nearly_right_is_told(raw, path, near):
    message = raw.post(path).json()["error"]["message"]
    assert message.partition("; ")[2] == (f"did you mean {near}?" if near else "")


def test_all_models_are_listed_with_a_slash_too(raw):
    assert raw.get("/v1/models/").json() == raw.get("/v1/models").json()


def test_bodies_may_be_written_as_other_languages_do(raw):
    """A mark of UTF-8 before it, whole numbers with a fraction, and an encoding that is none."""
    plain = json.dumps({"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "n": 2})
    changed = plain.replace('"max_tokens": 3', '"max_tokens": 3.0').replace('"n": 2', '"n": 2e0')
    headers = {"content-type": "application/json", "content-encoding": "Identity"}
    answer = raw.post(CHAT, content=b"\xef\xbb\xbf" + changed.encode(), headers=headers)
    assert answer.status_code == 200, answer.text
    expected = raw.post(CHAT, content=plain, headers={"content-type": "application/json"})
    assert answer.json()["choices"] == expected.json()["choices"]


def test_large_bodies_are_counted_while_they_come(raw):
    json_type = {"content-type": "application/json"}
    declared = raw.post(CHAT, content=b" " * (MAX_BODY_BYTES + 1), headers=json_type)
    assert declared.status_code == 413

    def pieces():
        for _ in range(MAX_BODY_BYTES // 2**16 + 2):
            yield b" " * 2**16

    chunked = raw.post(CHAT, content=pieces(), headers=json_type)
    assert chunked.status_code == 413
    for answer in (declared, chunked):
        assert ErrorBody.model_validate(answer.json()).error.code == "request_too_large"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_only_plain_json_is_taken(raw, headers):
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    answer = raw.post(CHAT, content=body, headers=headers)
    assert answer.status_code == 415
    assert ErrorBody.model_validate(answer.json()).error.code == "unsupported_media_type"


# Ids, deadlines, disconnects


def test_ids(raw):
    first, second = post(raw), post(raw)
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    for name in ("x-request-id", "x-client-request-id"):
        mine = raw.get("/version", headers={name: "my-id.1"})
        assert mine.headers["x-client-request-id"] == "my-id.1"
        assert mine.headers["x-request-id"] != "my-id.1"
    for bad in ("a b", "x" * 129, "ü"):
        answer = raw.get("/version", headers={"x-request-id": bad.encode()})
        assert answer.status_code == 200
        assert "x-client-request-id" not in answer.headers


def test_a_deadline(raw):
    with scripted([5], 30.0) as (servers, plain):
        answer = plain.post(
            CHAT, json={"messages": MESSAGES}, headers={"x-request-timeout-ms": "200"}
        )
        assert answer.status_code == 504
        assert ErrorBody.model_validate(answer.json()).error.code == "deadline_exceeded"
        assert servers.backend.num_closed == 1
    for bad in ("0", "-5", "soon", "1e3", "99999999999", "²"):
        answer = raw.post(
            CHAT, json={"messages": MESSAGES}, headers={"x-request-timeout-ms": bad.encode()}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "x-request-timeout-ms"


def sent(servers, fields):
    """A connection on which this chat was asked for, and nothing is read."""
    body = json.dumps(fields).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", servers.http_port))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(serving, stream, monkeypatch):
    backend = serving.backend
    slowed(backend.engine, monkeypatch)
    aborted = backend.engine.stats().num_finished["abort"]
    fields = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    connection = sent(serving, fields)
    eventually(lambda: backend.num_live_blocks > 0)
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.close()
    eventually(lambda: backend.num_live_blocks == 0)
    eventually(lambda: backend.engine.stats().num_finished["abort"] > aborted)
    assert backend.engine.stats().num_finished["abort"] == aborted + 1


def test_a_client_that_leaves_while_nothing_comes():
    """No token is there whose sending could fail: the disconnect itself must be noticed."""
    with scripted(300.0) as (servers, _):
        connection = sent(servers, {"messages": MESSAGES, "stream": True})
        eventually(lambda: servers.backend.requests)
        assert servers.backend.num_closed == 0
        connection.close()
        eventually(lambda: servers.backend.num_closed == 1)


def test_a_client_that_leaves_in_mid_body(serving):
    connection = socket.create_connection(("127.0.0.1", serving.http_port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(head.encode() + b"content-length: 100\r\n\r\n{")
    time.sleep(0.1)
    connection.close()
    assert httpx.get(f"{serving.base_url}/live").status_code == 200


# Keys

KEY, OTHER_KEY = "key-one", "key-two"


@pytest.fixture(scope="module")
def guarded():
    digest = "sha256:" + hashlib.sha256(OTHER_KEY.encode()).hexdigest()
    with Serving(ScriptedBackend([5], FinishReason.STOP), api_keys=(KEY, digest)) as running:
        yield running


def test_every_path_wants_a_key_by_default(guarded):
    paths = ["/docs", "/openapi.json", "/version", "/nowhere", "/health/", "//health", "/LIVE"]
    paths += ["//", "/index.html", "/console", "/console/", "/console/nowhere.js", "/console.js"]
    with httpx.Client(base_url=guarded.base_url) as plain:
        document = plain.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
        public = {"/health", "/live", "/ready"}
        paths += [path.replace("{model}", "builtin") for path in document["paths"]]
        for path in paths:
            for method in ("GET", "POST", "OPTIONS", "PUT"):
                # The whole address: httpx would take '//health' for a host, and ask for '/'.
                url = guarded.base_url + path
                answer = plain.request(method, url, headers={"host": "a/health?x="})
                if path in public:
                    assert answer.status_code in (200, 405), path
                else:
                    assert answer.status_code == 401, path
                    if path.startswith("/v1/messages"):  # Anthropic's clients read another shape
                        assert answer.json()["error"]["type"] == "authentication_error"
                    else:
                        error = ErrorBody.model_validate(answer.json()).error
                        assert error.code == "invalid_api_key"
                    assert answer.headers["www-authenticate"] == "Bearer"
        assert public < set(document["paths"])


def test_keys(guarded):
    with httpx.Client(base_url=guarded.base_url) as plain:
        for key in (KEY, OTHER_KEY):
            headers = {"authorization": f"Bearer {key}"}
            assert plain.get("/v1/models", headers=headers).status_code == 200
        for bad in ("", "Bearer", f"Basic {KEY}", "Bearer key-on", f"Bearer {KEY}x", "Bearer \xff"):
            answer = plain.get("/v1/models", headers={"authorization": bad.encode("latin-1")})
            assert answer.status_code == 401, bad
    official = openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key=KEY, max_retries=0)
    assert official.models.list().data
    official.close()
    stranger = openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key="no", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


# Service routes and documentation


def test_health_means_serving():
    with scripted([5]) as (servers, plain):
        for path in ("/health", "/ready", "/live"):
            assert plain.get(path).status_code == 200
        servers.backend.is_ready = False
        for path in ("/health", "/ready"):
            answer = plain.get(path)
            assert answer.status_code == 503
            assert ErrorBody.model_validate(answer.json()).error.code == "no_worker"
        assert plain.get("/live").status_code == 200


def test_version_and_documentation(raw):
    assert raw.get("/version").json()["version"]
    document = raw.get("/openapi.json").json()
    operations = document["paths"][CHAT]["post"]
    assert set(operations["responses"]) >= {"200", "400", "404", "413", "503"}
    assert "422" not in json.dumps(document["paths"])
    names = set(document["components"]["schemas"])
    used = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert used <= names
    assert "messages" in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]


def test_the_documentation_page_fetches_nothing_from_elsewhere(raw):
    page = raw.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://", page.text)
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    assert "src=" not in page.text.replace("connect-src", "")


def test_a_refused_method_names_the_ones_that_are_taken(raw):
    answer = raw.put("/v1/completions", json={})
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
