"""Requests that are costly and not wrong: their work on text is done off the event loop.

Some texts of a request were in no count once, and sixteen such requests stopped the loop for 11 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.text_pool import (
    MAX_WAITING,
    MAX_WAITING_OF_OWNER,
    TextPool,
)
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.text.tokenizer import Tokenizer
from tests.deployments.serving import ScriptedBackend, Serving
from tests.deployments.waiting import until

LONG = "some words and more " * 5000
USER = {"role": "user", "content": "hi"}


def tool_call(arguments: str, name: str = "f") -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


CHATS: dict[str, list[dict[str, Any]]] = {
    "content": [{"role": "user", "content": LONG}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": LONG}]}],
    "arguments": [USER, tool_call(json.dumps({"a": LONG})), USER],
    "keys of arguments": [USER, tool_call(json.dumps({LONG: 1})), USER],
    "reasoning": [USER, {"role": "assistant", "content": "", "reasoning_content": LONG}, USER],
    "messages without text": [{"role": "user", "content": ""}] * 2000,
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"chat, {name}": ("/v1/chat/completions", {"messages": m}) for name, m in CHATS.items()},
    **{f"tokenize, {name}": ("/tokenize", {"messages": m}) for name, m in CHATS.items()},
    "tokenize": ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    "completion": ("/v1/completions", {"prompt": LONG}),
    "responses, call": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "hi"},
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "f",
                    "arguments": json.dumps({"a": LONG}),
                },
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ]
        },
    ),
    "messages, tool_use": (
        "/v1/messages",
        {
            "model": "builtin",
            "max_tokens": 5,
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": LONG}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}],
                },
            ],
        },
    ),
}


class Spy:
    """Notes the threads on which long texts are rendered and tokenized."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.threads: set[int] = set()
        encode, render, pieces = Tokenizer.encode, Tokenizer.render_chat, Tokenizer.pieces

        def spying_encode(of: Tokenizer, text: str, **options: Any) -> list[int]:
            self._note(len(text))
            return encode(of, text, **options)

        def spying_render(of: Tokenizer, messages: Any, **options: Any) -> str:
            self._note(len(json.dumps(list(messages))))
            return render(of, messages, **options)

        def spying_pieces(of: Tokenizer, token_ids: Any) -> list[str]:
            self._note(len(token_ids))
            return pieces(of, token_ids)

        patch.setattr(Tokenizer, "encode", spying_encode)
        patch.setattr(Tokenizer, "render_chat", spying_render)
        patch.setattr(Tokenizer, "pieces", spying_pieces)

    def _note(self, size: int) -> None:
        if size > 8192:
            self.threads.add(threading.get_ident())


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(ScriptedBackend(), max_model_len=100_000) as made:
        yield made


@pytest.mark.parametrize("name", BODIES)
def test_long_texts_are_rendered_and_tokenized_off_the_loop(
    serving: Serving, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    path, body = BODIES[name]
    httpx.post(serving.base_url + path, json=body, timeout=60)
    assert spy.threads, "it was refused before anything was rendered"
    assert serving._thread.ident not in spy.threads


def test_over_grpc_too(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    call = pb.ToolCall(id="c", name="f", arguments=json.dumps({"a": LONG}))
    messages = [
        pb.Message(role="user", content="hi"),
        pb.Message(role="assistant", tool_calls=[call]),
        pb.Message(role="user", content="hi"),
    ]
    with grpc.insecure_channel(serving.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.Tokenize(pb.TokenizeRequest(text=LONG))
        with contextlib.suppress(grpc.RpcError):
            list(stub.Chat(pb.ChatRequest(messages=messages)))
    assert spy.threads and serving._thread.ident not in spy.threads


def test_more_ids_than_a_context_holds_are_refused_unread(serving: Serving) -> None:
    answer = httpx.post(serving.base_url + "/detokenize", json={"tokens": ["x"] * 100_001})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "tokens"
    assert "100001 token ids" in error["message"]


def test_owners_take_turns_whatever_each_has_brought() -> None:
    done: list[str] = []

    async def scenario() -> None:
        pool = TextPool(num_threads=1)
        gate = threading.Event()
        first = asyncio.ensure_future(pool.run("a", 10**6, gate.wait))
        await asyncio.sleep(0.05)
        jobs = [("a", n) for n in range(5)] + [("b", n) for n in range(2)] + [("c", 0)]
        tasks = [
            asyncio.ensure_future(pool.run(owner, 10**6, done.append, f"{owner}{n}"))
            for owner, n in jobs
        ]
        await asyncio.sleep(0)
        gone = asyncio.ensure_future(pool.run("b", 10**6, done.append, "gone"))
        await asyncio.sleep(0)
        gone.cancel()
        gate.set()
        await asyncio.gather(first, *tasks)
        assert await pool.run("d", 10**6, lambda: 5) == 5  # the thread is free again
        assert pool.num_waiting == 0

    asyncio.run(scenario())
    assert done == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


def test_a_client_that_leaves_frees_no_thread_that_still_works() -> None:
    async def scenario() -> None:
        pool = TextPool(num_threads=1)
        gate, works, ran = threading.Event(), threading.Event(), threading.Event()

        def work() -> None:
            works.set()
            gate.wait()

        first = asyncio.ensure_future(pool.run("a", 10**6, work))
        await until(works.is_set)
        first.cancel()
        second = asyncio.ensure_future(pool.run("a", 10**6, ran.set))
        await asyncio.sleep(0.1)
        assert not ran.is_set() and pool.num_waiting == 1
        gate.set()
        await second

    asyncio.run(scenario())


def test_who_brings_too_much_is_refused_and_others_are_not() -> None:
    async def scenario() -> None:
        pool = TextPool(num_threads=1)
        gate = threading.Event()
        tasks = [asyncio.ensure_future(pool.run("a", 10**6, gate.wait))]
        for _ in range(MAX_WAITING_OF_OWNER):
            tasks.append(asyncio.ensure_future(pool.run("a", 10**6, gate.wait)))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError) as refusal:
            await pool.run("a", 10**6, gate.wait)
        assert refusal.value.code == "over_share"
        tasks.append(asyncio.ensure_future(pool.run("b", 10**6, gate.wait)))
        for _ in range(MAX_WAITING - MAX_WAITING_OF_OWNER - 1):
            tasks.append(asyncio.ensure_future(pool.run("", 10**6, gate.wait)))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError) as refusal:
            await pool.run("", 10**6, gate.wait)
        assert refusal.value.code == "overloaded"
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())
