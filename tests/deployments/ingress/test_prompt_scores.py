"""Scores of prompts are bounded at the door of every front end: their number, and their bytes."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import pytest

from penstock.deployments.ingress.core.bounds.limits import OpenCalls
from penstock.deployments.ingress.core.call import Call, CallOptions
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.grpc import messages
from penstock.deployments.ingress.grpc.messages import answer_message, most_prompt_bytes
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import MAX_PROMPT_SCORES, FinishReason, SamplingParams
from tests.deployments.serving import (
    EngineBackend,
    ScriptedBackend,
    ScriptedGrpc,
    Serving,
    core_over,
    scripted,
)

PATH = "/v1/completions"
LEN = 2048
NUM_TOP = 20
IDS = [5 + n % 500 for n in range(2000)]  # with 20 alternatives: two of these may be scored
SCORED = {"prompt": IDS, "max_tokens": 4, "prompt_logprobs": NUM_TOP}
ECHOED = {"prompt": IDS, "max_tokens": 4, "echo": True, "logprobs": 5}


def refusals(plain, *bodies):
    for body in bodies:
        answer = plain.post(PATH, json=body)
        error = answer.json().get("error", {})
        yield answer.status_code, error.get("param"), error.get("message", "")


def test_http_refuses_a_call_with_too_many_scores():
    """Of one prompt and several answers, of several prompts, and of an echo."""
    with scripted([7], FinishReason.STOP, max_model_len=LEN) as (servers, plain):
        found = list(
            refusals(
                plain,
                {**SCORED, "n": 3},
                {**SCORED, "prompt": [IDS] * 3},
                {**ECHOED, "n": 8, "logprobs": 20},
                {**ECHOED, "prompt": [IDS] * 9},
            )
        )
        assert [status for status, _, _ in found] == [400] * 4
        assert [param for _, param, _ in found] == ["prompt_logprobs"] * 2 + ["logprobs"] * 2
        for _, param, message in found:
            assert message.startswith(f"{param}: ") and str(MAX_PROMPT_SCORES) in message
            assert "fewer alternatives" in message
        assert servers.backend.requests == []
        echoed = {**ECHOED, "max_tokens": 0, "n": 8}  # the script has no logprobs of an answer
        allowed = [{**SCORED, "n": 2}, {**SCORED, "prompt": [IDS] * 2}, echoed]
        assert [plain.post(PATH, json=body).status_code for body in allowed] == [200] * 3


def test_grpc_refuses_them_too():
    with ScriptedGrpc(
        inference_pb2_grpc.InferenceServiceStub, [7], FinishReason.STOP, max_model_len=LEN
    ) as server:

        def ask(n):
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=IDS),
                sampling=pb.SamplingParams(max_tokens=4, prompt_logprobs=NUM_TOP),
                n=n,
            )
            return list(server.stub.Generate(request, timeout=60))

        with pytest.raises(grpc.RpcError) as raised:
            ask(3)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "prompt_logprobs: " in raised.value.details()
        assert server.backend.requests == []
        assert ask(2)


def test_grpc_refuses_what_no_message_holds(monkeypatch):
    monkeypatch.setattr(messages, "MAX_ANSWER_BYTES", 200_000)
    with ScriptedGrpc(
        inference_pb2_grpc.InferenceServiceStub, [7], FinishReason.STOP, max_model_len=LEN
    ) as server:

        def ask(num_top):
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=IDS),
                sampling=pb.SamplingParams(max_tokens=4, prompt_logprobs=num_top),
            )
            return list(server.stub.Generate(request, timeout=60))

        with pytest.raises(grpc.RpcError) as raised:
            ask(NUM_TOP)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "HTTP API" in raised.value.details()
        assert server.backend.requests == []
        assert ask(0)


@pytest.mark.parametrize(
    ("params", "echo"),
    [
        ({"prompt_logprobs": 0}, False),
        ({"prompt_logprobs": 20}, False),
        ({"logprobs": 3}, True),
        ({"logprobs": 3, "prompt_logprobs": 5}, True),
        ({}, True),
    ],
    ids=str,
)
def test_the_bound_on_a_message_holds(params, echo):
    """For the real engine's first message, within a factor that spellings explain."""
    backend = EngineBackend()
    core = core_over(backend, max_model_len=LEN)
    request = pb.GenerateRequest(return_prompt_token_ids=True)

    async def first_message() -> tuple[int, int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=4, **params)
        call = Call(tuple(IDS[:300]), sampling, CallOptions(echo=echo))
        generation = await core.prepare(call)
        async for _, piece in core.run(generation):
            answer = answer_message(pb.GenerateResponse, 0, piece)
            answer.prompt_token_ids.extend(generation.request.prompt_ids)
            return answer.ByteSize(), most_prompt_bytes(
                request, generation, core.named(None).tokenizer
            )
        raise AssertionError("no piece")

    try:
        size, most = asyncio.run(first_message())
    finally:
        backend.stop()
    about_answer = 2000  # the first token, and its own scores
    assert size <= most + about_answer


def test_the_scores_of_a_whole_answer_are_bounded_by_memory(backend):
    """What a stream passes on at once, a whole answer keeps."""
    open_calls = OpenCalls(max_bytes=100 * 21 * 700)
    body = {"prompt": IDS[:9], "logprobs": NUM_TOP, "ignore_eos": True}
    with (
        Serving(backend, open_calls=open_calls) as serving,
        httpx.Client(base_url=serving.base_url, timeout=60) as plain,
    ):
        refused = plain.post(PATH, json=body | {"max_tokens": 150})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert "max_open_mb" in refused.json()["error"]["message"]
        assert plain.post(PATH, json=body | {"max_tokens": 80}).status_code == 200
        streamed = plain.post(PATH, json=body | {"max_tokens": 150, "stream": True})
        assert streamed.status_code == 200 and "[DONE]" in streamed.text
    assert open_calls.num_bytes == 0


def test_an_ingress_runs_no_more_of_them_than_it_has_memory_for():
    open_calls = OpenCalls(max_bytes=2000 * 21 * 700 * 3 // 2)
    backend = ScriptedBackend([7], 0.3, FinishReason.STOP)
    core = core_over(backend, max_model_len=LEN, open_calls=open_calls)
    call = Call(tuple(IDS), SamplingParams(max_tokens=4, prompt_logprobs=NUM_TOP))

    async def answer() -> str:
        try:
            pieces = [piece async for _, piece in core.run(await core.prepare(call))]
        except ServiceError as refusal:
            return f"{refusal.code}, later" if refusal.retry_after_s else refusal.code
        return str(pieces[-1].finish_reason)

    async def scenario() -> list[str]:
        together = await asyncio.gather(answer(), answer())
        return [*together, await answer()]

    assert asyncio.run(scenario()) == ["stop", "overloaded, later", "stop"]
    assert open_calls.num_bytes == 0
    assert len(backend.requests) == 2
