"""The message of a call: read to its end though the client cancels, or missing."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest

from penstock.deployments.ingress.grpc.inference import SERVICE
from penstock.deployments.ingress.grpc.interceptor import _message_of
from penstock.protos.penstock.v1 import inference_pb2 as pb


class Reading:
    """In place of a context: a read that ends when the test says so."""

    def __init__(self) -> None:
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.was_cancelled = False

    async def read(self) -> Any:
        try:
            return await self.message
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


@pytest.mark.parametrize("ends_with", [grpc.aio.EOF, RuntimeError("the call was cancelled")])
def test_a_cancelled_call_leaves_its_read_to_end_by_itself(ends_with: Any) -> None:
    """gRPC frees what a read holds only then."""
    reported: list[dict[str, Any]] = []

    async def scenario() -> bool:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
        context: Any = Reading()
        call = asyncio.ensure_future(_message_of(context))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not context.message.done()
        if isinstance(ends_with, Exception):
            context.message.set_exception(ends_with)
        else:
            context.message.set_result(ends_with)
        for _ in range(3):
            await asyncio.sleep(0)
        return bool(context.was_cancelled)

    assert not asyncio.run(scenario())
    gc.collect()
    assert reported == []


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_a_call_without_a_message_is_refused(channel: grpc.Channel, method: str) -> None:
    call = channel.stream_stream(f"/{SERVICE}/{method}")
    with pytest.raises(grpc.RpcError) as refused:
        list(call(iter(())))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(refused.value.trailing_metadata())["error-code"] == "invalid_message"


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_one_message_is_taken_and_more_are_not(channel: grpc.Channel, method: str) -> None:
    """A client that streams may send more; what the first one asks for is answered."""
    few = pb.SamplingParams(max_tokens=4)
    asked = {
        "Generate": pb.GenerateRequest(text="a", sampling=few),
        "Tokenize": pb.TokenizeRequest(text="a"),
    }[method]
    requests = [asked.SerializeToString()] * 3
    call = channel.stream_stream(f"/{SERVICE}/{method}")
    assert len(list(call(iter(requests), timeout=20.0))) >= 1
