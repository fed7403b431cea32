"""OpenAI's Responses API as the official client and a plain one see it."""

from __future__ import annotations

import json
import time

import openai
import pytest

from penstock.deployments.ingress.http.openai.schemas import ErrorBody
from penstock.deployments.ingress.http.responses.requests import UNSUPPORTED
from penstock.deployments.ingress.http.responses.schemas import ResponseBody
from penstock.workers.request import FinishReason
from tests.deployments.serving import MODEL, reference_ids, scripted, tokenizer

QUESTION = "What feeds the turbine?"
GREEDY = {"temperature": 0.0}
ENDLESS = {"extra_body": {"ignore_eos": True}}
RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def client(serving):
    with official(serving) as opened:
        yield opened


def official(servers, key="none"):
    return openai.OpenAI(base_url=f"{servers.base_url}/v1", api_key=key, max_retries=0)


def expected_text(messages, num_new):
    ids = tokenizer().encode(tokenizer().render_chat(messages), add_special_tokens=False)
    new = reference_ids(ids, max_tokens=num_new, temperature=0.0)
    return tokenizer().decode(new, skip_special_tokens=True)


def user(text):
    return {"role": "user", "content": text}


def post(raw, path=RESPONSES, **changed):
    return raw.post(path, json={"input": QUESTION, "max_output_tokens": 4} | changed)


def tool(name, **fields):
    return {"type": "function", "name": name, "description": "", **fields}


CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}


def frames_of(text):
    """(kind, body) of each server-sent event."""
    assert text.endswith("\n\n")
    frames = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    return [(kind.removeprefix("event: "), json.loads(data[6:])) for kind, data in frames]


def until_done(client, response_id):
    end = time.monotonic() + 60
    while (response := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end, "did not end in time"
        time.sleep(0.02)
    return response


def test_a_response(client):
    answer = client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=8, metadata={"trip": "7"}, **GREEDY
    )
    assert answer.output_text == expected_text([user(QUESTION)], 8)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (item,) = answer.output
    assert (item.role, item.status, item.content[0].type) == (
        "assistant",
        "incomplete",
        "output_text",
    )
    assert answer.usage.output_tokens == 8
    assert answer.usage.total_tokens == answer.usage.input_tokens + 8
    assert (answer.metadata, answer.temperature, answer.store) == ({"trip": "7"}, 0.0, True)
    assert answer.id == f"resp_{answer._request_id}"
    assert client.responses.retrieve(answer.id) == answer


def test_count_of_input_tokens(client, raw):
    """What the usage of the response says, also after another one, and of too long an input."""
    tools = [tool("look", parameters={"type": "object", "properties": {}})]
    plain = {"model": MODEL, "input": QUESTION}
    first = client.responses.create(**plain, max_output_tokens=4, **GREEDY)
    after = {**plain, "instructions": "Be brief.", "tools": tools, "previous_response_id": first.id}
    for body in (plain, after):
        answer = client.responses.create(**body, max_output_tokens=1, **GREEDY)
        assert client.responses.input_tokens.count(**body).input_tokens == answer.usage.input_tokens
    long = client.responses.input_tokens.count(model=MODEL, input="a " * 2000)
    assert long.input_tokens > 512
    refused = post(raw, f"{RESPONSES}/input_tokens", previous_response_id="resp_none")
    assert refused.status_code == 404
    assert post(raw, f"{RESPONSES}/input_tokens", input=7).json()["error"]["param"] == "input"


def test_the_forms_of_input(client):
    def text(given, **options):
        answer = client.responses.create(
            model=MODEL, input=given, max_output_tokens=8, **GREEDY, **options
        )
        return answer.output_text

    expected = expected_text([{"role": "system", "content": "Be brief."}, user(QUESTION)], 8)
    parts = [
        {"type": "input_text", "text": "What feeds "},
        {"type": "input_text", "text": "the turbine?"},
    ]
    assert text(QUESTION, instructions="Be brief.") == expected
    assert text([user(QUESTION)], instructions="Be brief.") == expected
    developer = {"type": "message", "role": "developer", "content": "Be brief."}
    assert text([developer, {"type": "message", **user(parts)}]) == expected


def test_going_on_from_a_response(client):
    first = client.responses.create(
        model=MODEL, input=QUESTION, instructions="Be brief.", max_output_tokens=6, **GREEDY
    )
    second = client.responses.create(
        model=MODEL, input="Why?", previous_response_id=first.id, max_output_tokens=6, **GREEDY
    )
    # The instructions are the first response's own.
    messages = [user(QUESTION), {"role": "assistant", "content": first.output_text}, user("Why?")]
    assert second.output_text == expected_text(messages, 6)
    assert second.previous_response_id == first.id
    by_hand = client.responses.create(
        model=MODEL,
        input=[user(QUESTION), *(item.model_dump() for item in first.output), user("Why?")],
        max_output_tokens=6,
        **GREEDY,
    )
    assert by_hand.output_text == second.output_text
    third = client.responses.create(
        model=MODEL, input="And?", previous_response_id=second.id, max_output_tokens=6, **GREEDY
    )
    messages += [{"role": "assistant", "content": second.output_text}, user("And?")]
    assert third.output_text == expected_text(messages, 6)


def test_the_stream_of_a_response(client):
    stream = client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=8, stream=True, **GREEDY
    )
    events = list(stream)
    kinds = [event.type for event in events]
    num_deltas = kinds.count("response.output_text.delta")
    assert num_deltas > 4, "the text should come in many pieces"
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = expected_text([user(QUESTION)], 8)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text
    assert events[0].response.status == "in_progress"
    assert client.responses.retrieve(events[-1].response.id) == events[-1].response


def test_the_clients_own_reading_of_a_stream():
    with (
        scripted(tokenizer().encode("water"), FinishReason.STOP) as (servers, _),
        official(servers) as opened,
        opened.responses.stream(model=MODEL, input=QUESTION) as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert (final.output_text, final.status) == ("water", "completed")
    assert (final.completed_at is None, final.output[0].status) == (False, "completed")


def test_bodies_are_as_documented(raw):
    answer = post(raw)
    ResponseBody.model_validate(answer.json())
    assert answer.headers["content-type"] == "application/json"
    stream = post(raw, stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    for kind, body in frames_of(stream.text):
        assert kind == body["type"]
    assert "[DONE]" not in stream.text
    ErrorBody.model_validate(raw.get(f"{RESPONSES}/resp_0").json())


def test_what_is_not_stored_cannot_be_found(client):
    for streams in (False, True):
        answer = client.responses.create(
            model=MODEL, input=QUESTION, max_output_tokens=4, store=False, stream=streams
        )
        made = list(answer)[-1].response if streams else answer
        assert made.store is False
        with pytest.raises(openai.NotFoundError) as error:
            client.responses.retrieve(made.id)
        assert (error.value.code, error.value.param) == ("not_found", "response_id")


def test_delete(client):
    made = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=4)
    client.responses.delete(made.id)
    for again in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            again(made.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(model=MODEL, input="a", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"


def test_in_the_background(client):
    made = client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=12, background=True, **GREEDY
    )
    assert (made.status, made.background, made.output) == ("queued", True, [])
    done = until_done(client, made.id)
    assert done.output_text == expected_text([user(QUESTION)], 12)
    assert client.responses.cancel(done.id) == done, "what is done stays as it is"
    client.responses.create(
        model=MODEL, input="a", previous_response_id=done.id, max_output_tokens=4
    )


def test_cancel(client, serving):
    made = client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=450, background=True, **ENDLESS
    )
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=MODEL, input="a", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert cancelled.usage.output_tokens < 450
    assert client.responses.retrieve(made.id) == cancelled
    waited = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=4)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(waited.id)


def test_deleting_ends_what_runs():
    with scripted([5], 60.0) as (servers, plain):
        made = post(plain, background=True).json()
        assert plain.delete(f"{RESPONSES}/{made['id']}").json() == {
            "id": made["id"],
            "object": "response",
            "deleted": True,
        }
        assert servers.backend.num_closed == 1


def test_a_stream_can_be_taken_up_again(client):
    stream = client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=24, background=True, stream=True, **GREEDY
    )
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 7:
            break
    stream.close()  # the answer goes on without us
    response_id = events[0].response.id
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    rest = client.responses.retrieve(
        response_id, stream=True, starting_after=events[-1].sequence_number
    )
    events += rest
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = expected_text([user(QUESTION)], 24)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert events[-1].response == client.responses.retrieve(response_id)
    whole = list(client.responses.retrieve(response_id, stream=True))
    assert whole == events


def test_sampling_parameters_arrive():
    fields = {
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.1, "seed": 3},
        **{"stop": "ab", "min_tokens": 1, "ignore_eos": True},
        **{"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    }
    with scripted([5], FinishReason.STOP) as (servers, plain):
        assert post(plain, **fields).status_code == 200
        (request,) = servers.backend.requests
    expected = {**fields, "stop": ("ab",), "max_tokens": 4}
    assert {name: getattr(request.params, name) for name in expected} == expected


def test_a_client_that_leaves_ends_what_it_waits_for():
    with scripted([5], 60.0) as (servers, plain):
        with plain.stream("POST", RESPONSES, json={"input": "a", "stream": True}) as answer:
            next(answer.iter_text())
        end = time.monotonic() + 60
        while servers.backend.num_closed == 0:
            assert time.monotonic() < end, "the generation goes on"
            time.sleep(0.01)


def test_failures():
    with scripted("overloaded") as (_, plain):
        for streams in (False, True):
            answer = post(plain, stream=streams)
            assert answer.status_code == 503
            assert ErrorBody.model_validate(answer.json()).error.code == "overloaded"
        made = post(plain, background=True).json()
        failed = plain.get(f"{RESPONSES}/{made['id']}").json()
        assert (failed["status"], failed["error"]["type"]) == ("failed", "overloaded")
    with scripted([5], RuntimeError("/secret/path")) as (_, plain):
        assert post(plain).status_code == 500
        streamed = post(plain, stream=True)
        kind, last = frames_of(streamed.text)[-1]
        assert (kind, last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        assert "secret" not in streamed.text


def test_a_response_is_its_makers_only():
    with (
        scripted([5], FinishReason.STOP, api_keys=["mine", "yours"]) as (servers, plain),
        official(servers, "mine") as me,
        official(servers, "yours") as you,
    ):
        made = me.responses.create(model=MODEL, input=QUESTION, background=True)
        for attempt in (you.responses.retrieve, you.responses.cancel, you.responses.delete):
            with pytest.raises(openai.NotFoundError):
                attempt(made.id)
        with pytest.raises(openai.NotFoundError):
            you.responses.create(model=MODEL, input="a", previous_response_id=made.id)
        assert me.responses.retrieve(made.id).id == made.id
        assert plain.get(f"{RESPONSES}/{made.id}").status_code == 401


@pytest.mark.parametrize(
    ("changed", "code", "param"),
    [
        ({"input": 7}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"inputs": "a"}, "unknown_parameter", "inputs"),
        ({"temperature": 1000}, "invalid_value", "temperature"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0]"),
        ({"tools": [{"type": "function"}]}, "missing_parameter", "tools[0].name"),
        ({"tools": [tool("a b")]}, "invalid_value", "tools[0].name"),
        ({"tools": [tool("a"), tool("a")]}, "invalid_value", "tools[1]"),
        (
            {"tools": [tool("a", parameters={"$ref": "http://a"})]},
            "invalid_value",
            "tools[0].parameters",
        ),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "function", "name": "b"}},
            "invalid_value",
            "tool_choice",
        ),
        ({"text": {"format": {"type": "yaml"}}}, "invalid_value", "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "missing_parameter",
            "text.format.schema",
        ),
        (
            {
                "tools": [tool("a")],
                "tool_choice": "required",
                "text": {"format": {"type": "json_object"}},
            },
            "invalid_value",
            "tool_choice",
        ),
        ({"reasoning": {"effort": "high"}}, "unsupported_parameter", "reasoning.effort"),
        ({"background": True, "store": False}, "invalid_value", "store"),
        ({"metadata": {"a": "b" * 513}}, "invalid_value", "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "invalid_value", "metadata"),
        ({"metadata": {"a": 1}}, "invalid_value", "metadata.a"),
        ({"input": [{"type": "item_reference"}]}, "unsupported_parameter", "input[0]"),
        ({"input": [{"type": "function_call"}]}, "missing_parameter", "input[0].call_id"),
        (
            {"input": [{**CALL_ITEM, "arguments": "hello"}]},
            "invalid_value",
            "input[0].arguments",
        ),
        ({"input": [{"role": "user"}]}, "missing_parameter", "input[0].content"),
        (
            {"input": [user([{"type": "input_image"}])]},
            "unsupported_parameter",
            "input[0].content[0]",
        ),
        ({"input": [{"role": "robot", "content": "a"}]}, "invalid_value", "input[0].role"),
        ({"previous_response_id": "resp_0"}, "not_found", "previous_response_id"),
        ({"model": "b"}, "model_not_found", "model"),
    ],
)
def test_refusals(raw, changed, code, param):
    answer = post(raw, **changed)
    error = ErrorBody.model_validate(answer.json()).error
    assert (error.code, error.param) == (code, param)
    assert answer.status_code == (404 if code.endswith("not_found") else 400)


def test_a_neighbouring_path_of_openai_that_is_not_served_says_so(raw):
    """It is no response, whose DELETE and GET a client could try instead."""
    answer = raw.post(f"{RESPONSES}/compact", json={"model": MODEL, "input": "a"})
    error = ErrorBody.model_validate(answer.json()).error
    assert (answer.status_code, error.code) == (404, "not_found")
    assert "compacts no conversations" in error.message
    assert "allow" not in answer.headers


def test_a_refused_method_names_all_that_are_taken(raw):
    answer = raw.put(f"{RESPONSES}/resp_0", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=maybe", "stream"),
        ("stream=true", "stream"),  # it was not made as a stream in the background
        ("starting_after=-1", "starting_after"),
        ("include=file_search", "include"),
    ],
)
def test_queries(raw, query, param):
    made = post(raw).json()
    answer = raw.get(f"{RESPONSES}/{made['id']}?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_unsupported_parameters_may_be_sent_where_they_change_nothing(raw):
    neutral = {name: values[-1] for name, values in UNSUPPORTED.items()}
    ignored = {"user": "a", "service_tier": "auto", "stream_options": {}}
    assert post(raw, **neutral, **ignored).status_code == 200
