"""Anthropic's Messages API as its official client and a plain one see it."""

from __future__ import annotations

import json

import anthropic
import pytest

from penstock.deployments.ingress.http.anthropic.blocks import (
    known_turn,
    messages_of,
    without_system_turns,
)
from penstock.deployments.ingress.http.anthropic.rendering import AnthropicError, MessageBody
from penstock.deployments.ingress.http.anthropic.requests import UNSUPPORTED
from penstock.deployments.ingress.http.ignored_fields import HEADER, FieldPolicy, IgnoredFields
from penstock.workers.request import FinishReason
from tests.deployments.serving import MODEL, reference_ids, scripted, tokenizer

SYSTEM = "Answer in one line."
TURNS = [{"role": "user", "content": "What feeds the turbine?"}]
GREEDY = {"extra_body": {"temperature": 0}}
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def client(serving):
    with anthropic.Anthropic(base_url=serving.base_url, api_key="none", max_retries=0) as official:
        yield official


def prompt_ids(turns=TURNS, system=SYSTEM):
    messages = [{"role": "system", "content": system}] if system else []
    rendered = tokenizer().render_chat([*messages, *turns])
    return tokenizer().encode(rendered, add_special_tokens=False)


def expected_ids(ids, num_new):
    return reference_ids(ids, max_tokens=num_new, temperature=0.0)


def text_of(ids):
    return tokenizer().decode(ids, skip_special_tokens=True)


def post(raw, path=MESSAGES, **changed):
    body = {"model": MODEL, "max_tokens": 4, "messages": TURNS} | changed
    return raw.post(path, json={name: value for name, value in body.items() if value is not ...})


def test_an_answer(client):
    ids = expected_ids(prompt_ids(), 8)
    answer = client.messages.create(
        model=MODEL, max_tokens=8, system=SYSTEM, messages=TURNS, **GREEDY
    )
    (block,) = answer.content
    assert (block.type, block.text) == ("text", text_of(ids))
    assert (answer.role, answer.model) == ("assistant", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt_ids())
    assert usage.output_tokens == 8
    assert answer.id == f"msg_{answer._request_id}"


def test_blocks_are_text_and_runs_of_one_role_are_one_turn(client):
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [
        {"type": "text", "text": "What feeds ", **cached},
        {"type": "text", "text": "the turbine?"},
    ]
    answer = client.messages.create(
        model=MODEL,
        max_tokens=8,
        system=[{"type": "text", "text": SYSTEM, **cached}],
        messages=[{"role": "user", "content": blocks}],
        **GREEDY,
    )
    assert answer.content[0].text == text_of(expected_ids(prompt_ids(), 8))
    split = [{"role": "user", "content": "What"}, {"role": "user", "content": "feeds it?"}]
    joined = [{"role": "user", "content": "What\n\nfeeds it?"}]
    count = client.messages.count_tokens(model=MODEL, messages=split)
    assert count == client.messages.count_tokens(model=MODEL, messages=joined)


def test_the_stream_of_an_answer(client):
    kinds, text = [], ""
    with client.messages.stream(
        model=MODEL, max_tokens=8, system=SYSTEM, messages=TURNS, **GREEDY
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "content_block_delta":
                text += event.delta.text
        final = stream.get_final_message()
    assert text == final.content[0].text == text_of(expected_ids(prompt_ids(), 8))
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 8
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_delta") > 4, "the text should come in many pieces"


def test_frames_of_a_stream(raw):
    answer = post(raw, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    events = []
    for frame in frames:
        kind, data = frame.split("\n")
        assert data.startswith("data: ")
        body = json.loads(data[6:])
        assert kind == f"event: {body['type']}"
        events.append(body)
    assert [event["type"] for event in events[:3]] == [
        "message_start",
        "content_block_start",
        "ping",
    ]
    started = events[0]["message"]
    MessageBody.model_validate(started)
    assert (started["content"], started["stop_reason"]) == ([], None)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 4
    assert "[DONE]" not in answer.text


def test_a_stop_sequence(client):
    whole = text_of(expected_ids(prompt_ids(), 40))
    stop = whole[9:15]
    fields = {
        "model": MODEL,
        "max_tokens": 40,
        "system": SYSTEM,
        "messages": TURNS,
        "stop_sequences": ["never there", stop],
        **GREEDY,
    }
    answer = client.messages.create(**fields)
    assert answer.content[0].text == whole[: whole.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    with client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == whole[: whole.index(stop)]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_the_end_of_a_turn():
    with scripted(tokenizer().encode("water"), FinishReason.STOP) as (_, plain):
        body = post(plain).json()
    MessageBody.model_validate(body)
    assert body["content"] == [{"type": "text", "text": "water"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)


def test_sampling_parameters_arrive():
    with scripted([5], FinishReason.STOP) as (servers, plain):
        post(plain, temperature=0.5, top_p=0.25, top_k=7, stop_sequences=["ab"])
        (request,) = servers.backend.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
    assert (params.max_tokens, params.stop) == (4, ("ab",))


def test_count_tokens(client, raw):
    counted = client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=TURNS)
    assert counted.input_tokens == len(prompt_ids())
    ending = [*TURNS, {"role": "assistant", "content": "Water."}]
    assert client.messages.count_tokens(model=MODEL, messages=ending).input_tokens > 0
    long = [{"role": "user", "content": "a " * 2000}]
    assert client.messages.count_tokens(model=MODEL, messages=long).input_tokens > 512
    refused = post(raw, f"{MESSAGES}/count_tokens")  # it has no max_tokens
    assert refused.status_code == 400


def test_errors_are_what_the_client_expects(client):
    def ask(**changed):
        body = {"model": MODEL, "max_tokens": 4, "messages": TURNS} | changed
        return client.messages.create(**body)

    with pytest.raises(anthropic.NotFoundError) as error:
        ask(model="claude-sonnet-4")
    assert error.value.body["error"]["type"] == "not_found_error"
    assert error.value.request_id == error.value.body["request_id"]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        ask(max_tokens=10_000)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(extra_body={"temperature": 1000})
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers is not supported"):
        ask(extra_body={"mcp_servers": [{}]})
    use = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="its result must follow"):
        ask(messages=[*TURNS, {"role": "assistant", "content": [use]}])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"max_tokens": ...}, "max_tokens: this parameter is required"),
        ({"messages": ...}, "messages: this parameter is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_token": 4}, "did you mean 'max_tokens'?"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking: the chat template of this model has no variable",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": ["a"] * 17}, "stop"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: this parameter is required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"$ref": "x"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id: this parameter is required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_refusals_name_what_is_wrong(raw, changed, words):
    answer = post(raw, **changed)
    body = AnthropicError.model_validate(answer.json())
    assert (answer.status_code, body.error.type) == (400, "invalid_request_error")
    assert words in body.error.message
    assert body.request_id == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_unsupported_parameters_may_be_sent_where_they_change_nothing(raw):
    neutral = {name: values[-1] for name, values in UNSUPPORTED.items()}
    ignored = {"metadata": {"user_id": "a"}, "service_tier": "auto"}
    assert post(raw, **neutral, **ignored).status_code == 200


def test_failures_have_their_own_types():
    for script, status, kind in (
        (("overloaded",), 529, "overloaded_error"),
        ((RuntimeError("/secret/path"),), 500, "api_error"),
    ):
        for stream in (True, False):
            with scripted(*script) as (_, plain):
                answer = post(plain, stream=stream)
            body = AnthropicError.model_validate(answer.json())
            assert (answer.status_code, body.error.type) == (status, kind)
            assert "secret" not in answer.text
            assert ("retry-after" in answer.headers) == (status == 529)


def test_a_failure_in_mid_stream_is_an_event():
    with scripted([5], "numerical_error") as (servers, plain):
        last = post(plain, stream=True).text.removesuffix("\n\n").split("\n\n")[-1]
        kind, data = last.split("\n")
        assert kind == "event: error"
        assert AnthropicError.model_validate_json(data[6:]).error.type == "api_error"
        official = anthropic.Anthropic(base_url=servers.base_url, api_key="none", max_retries=0)
        stream = official.messages.create(model=MODEL, max_tokens=4, messages=TURNS, stream=True)
        with official, pytest.raises(anthropic.APIError):
            list(stream)


def test_a_key_comes_as_the_client_sends_it():
    with scripted([5], FinishReason.STOP, api_keys=["secret"]) as (servers, plain):
        refused = post(plain)
        assert refused.status_code == 401
        assert AnthropicError.model_validate(refused.json()).error.type == "authentication_error"
        for key, token in (("secret", None), (None, "secret")):
            official = anthropic.Anthropic(
                base_url=servers.base_url, api_key=key, auth_token=token, max_retries=0
            )
            with official:
                assert official.messages.create(model=MODEL, max_tokens=4, messages=TURNS)
        wrong = anthropic.Anthropic(base_url=servers.base_url, api_key="no", max_retries=0)
        with wrong, pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(model=MODEL, max_tokens=4, messages=TURNS)


def test_system_turns_and_thinking_that_is_not_shown():
    turns = [
        {"role": "system", "content": "First."},
        {"role": "user", "content": "Hi."},
        {"role": "system", "content": [{"type": "text", "text": "Later."}]},
    ]
    known = [known_turn(i, turn, IgnoredFields()) for i, turn in enumerate(turns)]
    first, rest = without_system_turns(known)
    assert first == ["First."]
    assert messages_of(rest) == [{"role": "user", "content": "Hi.\n\n<system>\nLater.\n</system>"}]
    with scripted(tokenizer().encode("Ja."), FinishReason.STOP) as (servers, plain):
        assert post(plain, messages=turns, system="Zero.").status_code == 200
        (request,) = servers.backend.requests
    prompt = tokenizer().decode(request.prompt_ids)
    assert "Zero.\n\nFirst." in prompt and prompt.index("First.") < prompt.index("Hi.")


def test_max_tokens_beyond_the_context_becomes_what_is_left():
    ids = tokenizer().encode("Ja.")
    with scripted(ids, FinishReason.STOP, fields=FieldPolicy("ignore")) as (servers, plain):
        answer = post(plain, max_tokens=128_000)
        assert (answer.status_code, answer.headers[HEADER]) == (200, "max_tokens")
        long = [{"role": "user", "content": "a " * 2000}]
        assert post(plain, messages=long).status_code == 400
        (request,) = servers.backend.requests
    assert len(request.prompt_ids) + (request.params.max_tokens or 0) <= 512


def test_models_in_the_shape_of_the_clients_api(client, raw):
    (ours,) = raw.get("/v1/models").json()["data"]
    assert ours["object"] == "model" and "display_name" not in ours
    listed = list(client.models.list())
    assert [each.model_dump(exclude_unset=True) for each in listed] == [
        client.models.retrieve(MODEL).model_dump(exclude_unset=True)
    ]
    (model,) = listed
    assert (model.id, model.display_name, model.type) == (MODEL, MODEL, "model")
    assert model.created_at.timestamp() == ours["created"]
    assert model.max_input_tokens == ours["max_model_len"]
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")
