"""The Python client against a real server."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing, closing
from typing import Any

import grpc
import pytest

from penstock.deployments.client import AsyncClient, Client, ClientError, FinishReason, Model
from tests.deployments.serving import (
    MODEL,
    ScriptedBackend,
    Serving,
    reference_ids,
    tokenizer,
)
from tests.deployments.waiting import eventually

PROMPT = "It was a bright morning, and"
MESSAGES = [{"role": "user", "content": "What feeds the turbine?"}]
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(serving):
    with Client(serving.grpc_target) as opened:
        yield opened


def test_whole_answers(client):
    prompt_ids = tokenizer().encode(PROMPT)
    expected = reference_ids(prompt_ids, max_tokens=12, **SEEDED)
    for prompt in (PROMPT, prompt_ids):
        answer = client.complete(prompt, max_tokens=12, **SEEDED)
        assert answer.token_ids == tuple(expected)
        assert answer.text == tokenizer().decode(expected, skip_special_tokens=True)
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.usage.prompt_tokens == len(prompt_ids)
        assert answer.request_id


def test_streams_are_the_whole_answer_in_pieces(client):
    whole = client.reply(MESSAGES, max_tokens=12, **SEEDED)
    pieces = list(client.chat(MESSAGES, max_tokens=12, **SEEDED))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert len(pieces) > 6
    assert pieces[0].request_id
    assert pieces[-1].usage.completion_tokens == 12
    stop = whole.text[5:9]
    cut = client.reply(MESSAGES, max_tokens=12, stop=stop, **SEEDED)
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_a_text_alone_has_one_vector_as_over_http(client):
    alone, (vector,) = client.embed("The river"), client.embed(["The river"])
    assert alone == [vector]


@pytest.mark.parametrize("messages", ["Hello", {"role": "user", "content": "Hello"}])
def test_what_is_no_list_of_messages_is_refused_in_words(client, messages):
    with pytest.raises(TypeError, match="messages is a list"):
        next(client.chat(messages))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_url_in_place_of_an_address_is_refused_at_once(kind):
    with pytest.raises(ValueError, match="host:port of the server's gRPC API"):
        kind("http://127.0.0.1:8001")


def test_everything_else(client):
    ids = client.tokenize("naïve 水门")
    assert ids == tokenizer().encode("naïve 水门")
    assert client.detokenize(ids) == "<|endoftext|>naïve 水门"
    assert client.models() == [Model(MODEL, 512, 8192, True)]
    assert not client.cancel("no such id")


def test_closing_a_stream_ends_the_generation(serving, client):
    with closing(client.generate(PROMPT, max_tokens=400, **SEEDED)) as pieces:
        next(pieces)
        assert serving.backend.num_live_blocks > 0
    eventually(lambda: serving.backend.num_live_blocks == 0)


def test_cancel(client):
    pieces = client.generate(PROMPT, max_tokens=400, **SEEDED)
    assert client.cancel(next(pieces).request_id)
    *_, last = pieces
    assert last.finish_reason is FinishReason.ABORT


def test_errors_are_clear(client):
    with pytest.raises(ClientError, match="temperature must lie in") as error:
        client.complete(PROMPT, temperature=-1.0)
    assert (error.value.code, error.value.param) == ("invalid_value", "temperature")
    assert error.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.request_id
    with pytest.raises(ClientError) as error:
        list(client.chat([]))
    assert error.value.param == "messages"
    with pytest.raises(ClientError) as error:
        client.detokenize([10**6])
    assert error.value.param == "token_ids"


def test_no_server_is_there():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        target = f"127.0.0.1:{unused.getsockname()[1]}"
    with Client(target, timeout_s=10) as client, pytest.raises(ClientError) as error:
        client.models()
    assert error.value.code == "unavailable"


def test_key_model_and_deadline():
    with Serving(ScriptedBackend([5], 30.0), api_keys=("right",)) as serving:
        with Client(serving.grpc_target, api_key="wrong") as client:
            with pytest.raises(ClientError) as error:
                client.models()
            assert error.value.code == "invalid_api_key"
        with Client(serving.grpc_target, api_key="right", timeout_s=0.3) as client:
            assert client.models()
            with pytest.raises(ClientError) as error:
                client.complete("a")
            assert error.value.code == "deadline_exceeded"
        with Client(serving.grpc_target, api_key="right", model="other") as client:
            with pytest.raises(ClientError) as error:
                client.complete("a")
            assert error.value.code == "model_not_found"


def test_async_client(serving, client):
    whole = client.reply(MESSAGES, max_tokens=12, **SEEDED)

    async def use():
        async with AsyncClient(serving.grpc_target) as other:
            pieces = [piece async for piece in other.chat(MESSAGES, max_tokens=12, **SEEDED)]
            assert "".join(piece.text for piece in pieces) == whole.text
            answers = await asyncio.gather(
                other.reply(MESSAGES, max_tokens=12, **SEEDED),
                other.complete(PROMPT, max_tokens=3, **SEEDED),
            )
            assert answers[0].text == whole.text
            assert answers[1].usage.completion_tokens == 3
            ids = await other.tokenize("abc", add_special_tokens=False)
            assert await other.detokenize(ids) == "abc"
            assert await other.models() == client.models()
            with pytest.raises(ClientError, match="top_p"):
                await other.complete(PROMPT, top_p=2.0)
            async with aclosing(other.generate(PROMPT, max_tokens=400, **SEEDED)) as stream:
                first = await anext(stream)
                assert await other.cancel(first.request_id)
            async with aclosing(other.generate(PROMPT, max_tokens=400, **SEEDED)) as stream:
                await anext(stream)

    asyncio.run(use())
    eventually(lambda: serving.backend.num_live_blocks == 0)
