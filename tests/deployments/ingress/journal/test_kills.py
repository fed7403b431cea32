"""`kill -9` of the server in mid-stream: clients see a pause, and the whole answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import anthropic
import httpx
import openai
import pytest

from penstock.deployments.client import AsyncClient, Client
from penstock.deployments.client.http_resume import AsyncResumingTransport, ResumingTransport
from tests.deployments.ingress.journal.server import JournalServer
from tests.deployments.ingress.journal.test_resume import events_of
from tests.deployments.state.servers import RedisServer

pytestmark = pytest.mark.timeout(400)  # each start of a server loads torch
MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea and of ships."}]
NUM = 120  # tokens of an answer, 10 ms each
BODY: dict[str, Any] = {"temperature": 0.9, "max_tokens": NUM, "extra_body": {"ignore_eos": True}}
SAMPLING: dict[str, Any] = {"temperature": 0.9, "max_tokens": NUM, "ignore_eos": True}


# What clients do depends on no store: one test of each front end runs on both.
on_both_stores = pytest.mark.parametrize("server", ["sqlite", "redis"], indirect=True)
on_sqlite = pytest.mark.parametrize("server", ["sqlite"], indirect=True)


@pytest.fixture(scope="module")
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JournalServer]:
    folder = tmp_path_factory.mktemp("state")
    folder.chmod(0o700)
    if request.param == "sqlite":
        with JournalServer(f"sqlite://{folder}") as server:
            yield server
        return
    redis = RedisServer(folder).start()
    try:
        with JournalServer(f"redis://127.0.0.1:{redis.port}/0") as server:
            yield server
    finally:
        redis.kill()


@pytest.fixture(autouse=True)
def _serves(server: JournalServer) -> None:
    server.wait()


def kill_and_start_again(server: JournalServer) -> None:
    server.kill()
    server.start()


def text_of(server: JournalServer, call_id: str) -> str:
    """The whole text of a stream, as the journal has it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        path = f"/penstock/streams/{call_id.removeprefix('chatcmpl-')}"
        chunk_type = openai.types.chat.ChatCompletionChunk
        stream_type = openai.Stream[openai.types.chat.ChatCompletionChunk]
        chunks = client.get(path, cast_to=chunk_type, stream=True, stream_cls=stream_type)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@on_both_stores
def test_the_openai_client_ends_with_the_whole_text(server: JournalServer) -> None:
    http_client = openai.DefaultHttpxClient(transport=ResumingTransport())
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", http_client=http_client
    ) as client:
        chunks = client.chat.completions.create(
            model="builtin", messages=MESSAGES, stream=True, **BODY
        )
        texts = []
        for number, chunk in enumerate(chunks):
            texts.append(chunk.choices[0].delta.content or "")
            if number == 5:
                kill_and_start_again(server)
        call_id, finish = chunk.id, chunk.choices[0].finish_reason
    assert finish == "length"
    assert "".join(texts) == text_of(server, call_id)


@on_sqlite
def test_streams_of_responses_and_messages_do_so_too(server: JournalServer) -> None:
    http_client = openai.DefaultHttpxClient(transport=ResumingTransport())
    other_client = anthropic.DefaultHttpxClient(transport=ResumingTransport())
    with (
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", http_client=http_client
        ) as of_openai,
        anthropic.Anthropic(
            base_url=server.url, api_key="none", http_client=other_client
        ) as of_anthropic,
    ):
        responses = of_openai.responses.create(
            model="builtin",
            input="Of the sea.",
            stream=True,
            max_output_tokens=NUM,
            extra_body={"ignore_eos": True},
        )
        messages = of_anthropic.messages.create(
            model="builtin", messages=MESSAGES, stream=True, max_tokens=NUM
        )
        # One of many types each: which of them is asserted by what they have.
        events: list[Any] = [next(responses) for _ in range(12)]
        pieces: list[Any] = [next(messages) for _ in range(4)]
        kill_and_start_again(server)
        events += list(responses)
        pieces += list(messages)
        last = events[-1].response
        assert of_openai.responses.retrieve(last.id) == last
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert (last.status, last.usage.output_tokens) == ("incomplete", NUM)
    assert last.output_text == text
    kinds = [piece.type for piece in pieces]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("message_start") == kinds.count("content_block_start") == 1
    said = "".join(p.delta.text for p in pieces if p.type == "content_block_delta")
    call_id = pieces[0].message.id.removeprefix("msg_")
    with httpx.stream("GET", f"{server.url}/v1/penstock/streams/{call_id}") as answer:
        again, _ = events_of(answer.iter_lines())
    assert said == "".join(
        event["delta"]["text"] for event in again if event["type"] == "content_block_delta"
    )


@on_sqlite
def test_the_asyncio_client_of_openai_does_so_too(server: JournalServer) -> None:
    async def main() -> None:
        http_client = openai.DefaultAsyncHttpxClient(transport=AsyncResumingTransport())
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", http_client=http_client
        ) as client:
            chunks = await client.chat.completions.create(
                model="builtin", messages=MESSAGES, stream=True, n=2, **BODY
            )
            num, texts = 0, ["", ""]
            async for chunk in chunks:
                num += 1
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
                if num == 9:
                    await asyncio.to_thread(kill_and_start_again, server)
        assert all(texts)

    asyncio.run(main())


@on_both_stores
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_grpc_client_ends_with_the_same_tokens(server: JournalServer, is_chat: bool) -> None:
    with Client(server.target) as client:
        make = client.chat if is_chat else client.generate
        prompt: Any = MESSAGES if is_chat else "It was"
        alone = (
            client.reply(prompt, seed=7, **SAMPLING)
            if is_chat
            else client.complete(prompt, seed=7, **SAMPLING)
        )
        token_ids: list[int] = []
        text = ""
        for number, piece in enumerate(make(prompt, seed=7, **SAMPLING)):
            token_ids += piece.token_ids
            text += piece.text
            if number == 5:
                kill_and_start_again(server)
    assert tuple(token_ids) == alone.token_ids and text == alone.text
    assert piece.usage is not None and piece.usage.completion_tokens == NUM


@on_sqlite
def test_the_asyncio_client_over_grpc_does_so_too(server: JournalServer) -> None:
    killing = threading.Thread(target=kill_and_start_again, args=(server,))

    async def main() -> None:
        async with AsyncClient(server.target) as client:
            alone = await client.complete("It was", seed=8, n=2, **SAMPLING)
            token_ids: dict[int, list[int]] = {0: [], 1: []}
            stream = client.generate("It was", seed=8, n=2, **SAMPLING)
            num = 0
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    token_ids[piece.choice] += piece.token_ids
                    num += 1
                    if num == 9:
                        killing.start()
            assert tuple(token_ids[0]) == alone.token_ids
            assert tuple(token_ids[1]) == alone.others[0].token_ids

    try:
        asyncio.run(main())
    finally:  # else the next test may ask the server that is killed then
        if killing.ident is not None:
            killing.join()
