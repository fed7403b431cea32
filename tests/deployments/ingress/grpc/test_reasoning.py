"""Reasoning over gRPC, kept apart from the answer as HTTP has it.

Oracles: the text that a scripted model said, and what HTTP gives for the same conversation.
"""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.client import Answer, Client, FinishReason, Piece
from penstock.deployments.client.messages import answer_of
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.text.reasoning import Marks
from tests.deployments.ingress.core.answers.models import PLAIN, model_of
from tests.deployments.ingress.core.answers.test_reasoning import (
    ADDED,
    CLOSES,
    MESSAGES,
    OPENS,
    SAID,
    SEES,
    SPECIAL,
    THOUGHT,
    server_of,
)
from tests.deployments.serving import EngineBackend, Serving


def pieces_of(serving: Serving, **sampling: Any) -> list[Piece]:
    with Client(serving.grpc_target) as client:
        return list(client.chat(MESSAGES, **sampling))


def by_http(serving: Serving, **body: Any) -> tuple[Any, Any, int]:
    """(reasoning, content, reasoning tokens) of the same conversation."""
    answer = httpx.post(
        f"{serving.base_url}/v1/chat/completions", json={"messages": MESSAGES, **body}, timeout=60
    ).json()
    [choice] = answer["choices"]
    said = choice["message"]
    details = answer["usage"].get("completion_tokens_details") or {}
    return said.get("reasoning"), said["content"], details.get("reasoning_tokens", 0)


def parts_of(answer: Answer) -> tuple[Any, Any, int]:
    return answer.reasoning or None, answer.text or None, answer.usage.reasoning_tokens


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("tokens", [[], SPECIAL, ADDED], ids=["text", "special", "added"])
def test_it_is_kept_apart_as_over_http(tokens: Any, group: int) -> None:
    with server_of(SEES, SAID, *tokens, group=group) as server:
        pieces = pieces_of(server)
        expected = by_http(server)
    answer = answer_of(pieces)
    assert expected[:2] == (THOUGHT, "The penstock.")
    assert parts_of(answer) == expected
    assert answer.finish_reason is FinishReason.STOP
    known = model_of(None, *tokens)
    assert list(answer.token_ids) == known.encode(SAID, add_special_tokens=False)
    assert answer.usage.completion_tokens == len(answer.token_ids)
    first_text = next(i for i, piece in enumerate(pieces) if piece.text)
    assert not any(piece.reasoning for piece in pieces[first_text + 1 :]), "it comes first"


@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (OPENS, "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        (OPENS, "Hm, no end", ("Hm, no end", None)),
        (CLOSES, "Yes. <think>", (None, "Yes. <think>")),
        (SEES, "Just so.", (None, "Just so.")),
    ],
)
def test_what_the_template_opens_over_grpc(template: str, said: str, expected: Any) -> None:
    with server_of(template, said) as server:
        answer = answer_of(pieces_of(server))
        assert parts_of(answer) == by_http(server)
    assert parts_of(answer)[:2] == expected


def test_without_marks_and_without_a_conversation_it_is_text() -> None:
    with server_of(SEES, SAID, marks=None) as server:
        assert parts_of(answer_of(pieces_of(server))) == (None, SAID, 0)
    with server_of(SEES, SAID) as server, Client(server.grpc_target) as client:
        answer = client.complete("The")
        assert (answer.reasoning, answer.text, answer.usage.reasoning_tokens) == ("", SAID, 0)


def test_calls_come_behind_it_over_grpc() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    with server_of(SEES, f"<think>\nI could {call}.\n</think>\n\n{call}") as server:
        answer = answer_of(pieces_of(server, tools=[{"name": "look"}]))
    assert (answer.reasoning, answer.text) == (f"I could {call}.", "")
    [made] = answer.tool_calls
    assert (made.name, made.arguments) == ("look", '{"at": "it"}')


def test_of_several_answers_each_has_its_own() -> None:
    backend = EngineBackend()
    try:
        marks = Marks("<|", "e")
        of = model_of(PLAIN + "<|")  # it has been opened: all is reasoning up to an e
        with Serving(backend, of=of, marks=marks, max_model_len=1024) as server:
            fields: Any = {"n": 3, "max_tokens": 40, "seed": 1}
            answer = answer_of(pieces_of(server, **fields))
            body = httpx.post(
                f"{server.base_url}/v1/chat/completions",
                json={"messages": MESSAGES, **fields},
                timeout=60,
            ).json()
    finally:
        backend.stop()
    said = [choice["message"] for choice in body["choices"]]
    assert [(each.reasoning or None, each.text or None) for each in (answer, *answer.others)] == [
        (message.get("reasoning"), message["content"]) for message in said
    ]
    assert any(message.get("reasoning") for message in said)
    details = body["usage"]["completion_tokens_details"]
    assert answer.usage.reasoning_tokens == details["reasoning_tokens"]


def test_it_may_be_sent_back_over_grpc() -> None:
    shows = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}\n{% endfor %}"
    before = {"role": "assistant", "content": "So.", "reasoning": "Because."}
    with server_of(shows, "Ja.") as server:
        with Client(server.grpc_target) as client:
            client.reply([*MESSAGES, before, *MESSAGES])
        prompt = server.core.named(None).tokenizer.decode(server.backend.requests[-1].prompt_ids)
        assert "Because.|So." in prompt
        with grpc.insecure_channel(server.grpc_target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            sent = pb.ChatRequest(messages=[{"role": "user", "content": "a", "reasoning": "b"}])
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Chat(sent))
    trailing = dict(refused.value.trailing_metadata())
    assert trailing["error-param"] == "messages[0].reasoning"
