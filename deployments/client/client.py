"""A thin Python client for the gRPC interface, blocking (`Client`) and asyncio (`AsyncClient`).

    with Client("127.0.0.1:8001") as client:
        for piece in client.chat([{"role": "user", "content": "Hello"}], max_tokens=64):
            print(piece.text, end="", flush=True)

Needs nothing of the server's code but the protocol.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from penstock.deployments.client.messages import (
    answer_of,
    message_of,
    models_of,
    piece_of,
    sampling_fields,
)
from penstock.deployments.client.resume import WAIT_S, LostStream
from penstock.deployments.client.types import (
    Answer,
    Message,
    Model,
    Piece,
    Prompt,
    Sampling,
    Timings,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "ClientError",
    "Message",
    "Model",
    "Piece",
    "Prompt",
    "Sampling",
    "Timings",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Usage",
]

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class ClientError(Exception):
    """The server refused, failed, or could not be reached.

    `code` is the server's code for it ("invalid_value", "overloaded", …) or the gRPC status in
    lower case where the server did not speak; `param` the field at fault, if one is; `status` the
    gRPC status.
    """

    def __init__(self, error: grpc.RpcError):
        trailing = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
        self.status: grpc.StatusCode = error.code()
        self.code = trailing.get("error-code", self.status.name.lower())
        self.param = trailing.get("error-param")
        self.request_id = trailing.get("request-id")
        self.message = error.details() or ""
        super().__init__(f"{self.code}: {self.message}")


class _Base(ABC):
    """What the two clients share: the channel, the key, and the request messages."""

    def __init__(
        self,
        target: str = "127.0.0.1:8001",
        *,
        api_key: str | None = None,
        model: str = "",
        timeout_s: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        resume_s: float = 60.0,
    ):
        """`model` "" is the one that is served. `timeout_s` is the deadline of each call, which the
        server keeps, too. `credentials` switch TLS on. `resume_s`: longest wait for a stream to go
        on after its connection was lost, where the server keeps journals; 0: none goes on."""
        self._model = model
        self._resume_s = resume_s
        self._timeout_s = timeout_s
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._channel = self._connect(target, credentials)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)

    @abstractmethod
    def _connect(self, target: str, credentials: grpc.ChannelCredentials | None) -> Any:
        """The gRPC channel; without credentials it is not encrypted."""

    def _how(self, began_s: float | None = None) -> dict[str, Any]:
        """Options of a call; `began_s`: when the first attempt of it began."""
        timeout_s = self._timeout_s
        if timeout_s is not None and began_s is not None:
            timeout_s = max(began_s + timeout_s - time.monotonic(), 0.0)
        return {"metadata": self._metadata, "timeout": timeout_s}

    def _generate(self, prompt: Prompt, name: str, sampling: Sampling) -> pb.GenerateRequest:
        request = pb.GenerateRequest(
            model=self._model, client_request_id=name, **sampling_fields(sampling)
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
        return request

    def _chat(self, messages: Sequence[Message], name: str, sampling: Sampling) -> pb.ChatRequest:
        return pb.ChatRequest(
            model=self._model,
            messages=[message_of(message) for message in messages],
            client_request_id=name,
            **sampling_fields(sampling),
        )


class Client(_Base):
    """Blocking client. A context manager; threads may share one."""

    def _connect(self, target: str, credentials: grpc.ChannelCredentials | None) -> Any:
        if credentials is None:
            return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, client_request_id: str = "", **sampling: Unpack[Sampling]
    ) -> Generator[Piece, None, None]:
        """Continue a prompt, piece by piece. Closing the generator ends the generation."""
        request = self._generate(prompt, client_request_id, sampling)
        return self._stream(self._stub.Generate, self._stub.ResumeGenerate, request)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        client_request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> Generator[Piece, None, None]:
        """Answer a conversation, piece by piece. Closing the generator ends the generation."""
        request = self._chat(messages, client_request_id, sampling)
        return self._stream(self._stub.Chat, self._stub.ResumeChat, request)

    def complete(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Answer:
        """Continue a prompt, and wait for the whole answer."""
        return answer_of(list(self.generate(prompt, **sampling)))

    def reply(self, messages: Sequence[Message], **sampling: Unpack[Sampling]) -> Answer:
        """Answer a conversation, and wait for the whole answer."""
        return answer_of(list(self.chat(messages, **sampling)))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(
            model=self._model, text=text, add_special_tokens=add_special_tokens
        )
        return list(self._unary(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(
            model=self._model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        text: str = self._unary(self._stub.Detokenize, request).text
        return text

    def cancel(self, request_id: str) -> bool:
        """End a generation of this client; False if no such one is running."""
        return bool(
            self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id)).cancelled
        )

    def models(self) -> list[Model]:
        return models_of(self._unary(self._stub.ListModels, pb.ListModelsRequest()))

    def _unary(self, method: Any, request: Any) -> Any:
        try:
            return method(request, **self._how())
        except grpc.RpcError as error:
            raise ClientError(error) from None

    def _stream(self, method: Any, resume: Any, request: Any) -> Generator[Piece, None, None]:
        stream, began_s = LostStream(self._resume_s), time.monotonic()
        call, initial = method(request, **self._how()), ()
        try:
            while True:
                try:
                    for message in call:
                        initial = initial or call.initial_metadata()
                        stream.add(message)
                        yield piece_of(message)
                    return
                except grpc.RpcError as error:
                    if not stream.may_continue(error, initial):
                        raise ClientError(error) from None
                time.sleep(WAIT_S)
                call = resume(stream.request(), **self._how(began_s))
        finally:
            call.cancel()


class AsyncClient(_Base):
    """The same for asyncio. An async context manager; belongs to one event loop."""

    def _connect(self, target: str, credentials: grpc.ChannelCredentials | None) -> Any:
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    def generate(
        self, prompt: Prompt, *, client_request_id: str = "", **sampling: Unpack[Sampling]
    ) -> AsyncGenerator[Piece, None]:
        """Continue a prompt, piece by piece. Closing the generator ends the generation."""
        request = self._generate(prompt, client_request_id, sampling)
        return self._stream(self._stub.Generate, self._stub.ResumeGenerate, request)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        client_request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Piece, None]:
        """Answer a conversation, piece by piece. Closing the generator ends the generation."""
        request = self._chat(messages, client_request_id, sampling)
        return self._stream(self._stub.Chat, self._stub.ResumeChat, request)

    async def complete(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Answer:
        """Continue a prompt, and wait for the whole answer."""
        return answer_of([piece async for piece in self.generate(prompt, **sampling)])

    async def reply(self, messages: Sequence[Message], **sampling: Unpack[Sampling]) -> Answer:
        """Answer a conversation, and wait for the whole answer."""
        return answer_of([piece async for piece in self.chat(messages, **sampling)])

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(
            model=self._model, text=text, add_special_tokens=add_special_tokens
        )
        return list((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        request = pb.DetokenizeRequest(
            model=self._model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        text: str = (await self._unary(self._stub.Detokenize, request)).text
        return text

    async def cancel(self, request_id: str) -> bool:
        """End a generation of this client; False if no such one is running."""
        request = pb.CancelRequest(request_id=request_id)
        return bool((await self._unary(self._stub.Cancel, request)).cancelled)

    async def models(self) -> list[Model]:
        return models_of(await self._unary(self._stub.ListModels, pb.ListModelsRequest()))

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, **self._how())
        except grpc.aio.AioRpcError as error:
            raise ClientError(error) from None

    async def _stream(self, method: Any, resume: Any, request: Any) -> AsyncGenerator[Piece, None]:
        stream, began_s = LostStream(self._resume_s), time.monotonic()
        call, initial = method(request, **self._how()), ()
        try:
            while True:
                try:
                    async for message in call:
                        initial = initial or await call.initial_metadata()
                        stream.add(message)
                        yield piece_of(message)
                    return
                except grpc.aio.AioRpcError as error:
                    if not stream.may_continue(error, initial):
                        raise ClientError(error) from None
                await asyncio.sleep(WAIT_S)
                call = resume(stream.request(), **self._how(began_s))
        finally:
            call.cancel()
