"""A thin Python client for the gRPC interface, blocking (`Client`) and asyncio (`AsyncClient`).

    with Client("127.0.0.1:8001") as client:
        for piece in client.chat([{"role": "user", "content": "Hello"}], max_tokens=64):
            print(piece.text, end="", flush=True)

Needs nothing of the server's code but the protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from penstock.deployments.client.base import CHANNEL_OPTIONS, BaseClient, ClientError
from penstock.deployments.client.messages import (
    answer_of,
    models_of,
    piece_of,
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


class Client(BaseClient):
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
        self,
        prompt: Prompt,
        *,
        client_request_id: str = "",
        idempotency_key: str = "",
        **sampling: Unpack[Sampling],
    ) -> Generator[Piece, None, None]:
        """Continue a prompt, piece by piece. Closing the generator ends the generation.

        The same request with the same `idempotency_key` gets the same answer for a day, where the
        server keeps journals.
        """
        request = self._generate(prompt, client_request_id, sampling)
        return self._stream(
            self._stub.Generate, self._stub.ResumeGenerate, request, idempotency_key
        )

    def chat(
        self,
        messages: Sequence[Message],
        *,
        client_request_id: str = "",
        idempotency_key: str = "",
        **sampling: Unpack[Sampling],
    ) -> Generator[Piece, None, None]:
        """Answer a conversation, piece by piece; else as `generate`."""
        request = self._chat(messages, client_request_id, sampling)
        return self._stream(self._stub.Chat, self._stub.ResumeChat, request, idempotency_key)

    def complete(
        self, prompt: Prompt, *, idempotency_key: str = "", **sampling: Unpack[Sampling]
    ) -> Answer:
        """Continue a prompt, and wait for the whole answer."""
        return answer_of(list(self.generate(prompt, idempotency_key=idempotency_key, **sampling)))

    def reply(
        self,
        messages: Sequence[Message],
        *,
        idempotency_key: str = "",
        **sampling: Unpack[Sampling],
    ) -> Answer:
        """Answer a conversation, and wait for the whole answer."""
        return answer_of(list(self.chat(messages, idempotency_key=idempotency_key, **sampling)))

    def embed(
        self,
        inputs: str | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        add_special_tokens: bool = True,
    ) -> list[list[float]]:
        """The vector of each text, or list of token ids, in their order, also of a text alone; its
        length is 1 with `normalize`. `dimensions`: how many numbers of it are kept; None: all."""
        request = self._embed(inputs, dimensions, normalize, add_special_tokens)
        return [list(each.values) for each in self._unary(self._stub.Embed, request).embeddings]

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

    def _stream(
        self, method: Any, resume: Any, request: Any, key: str = ""
    ) -> Generator[Piece, None, None]:
        stream, began_s = LostStream(self._resume_s), time.monotonic()
        call, initial = method(request, **self._how(key=key)), ()
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


class AsyncClient(BaseClient):
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
        self,
        prompt: Prompt,
        *,
        client_request_id: str = "",
        idempotency_key: str = "",
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Piece, None]:
        """Continue a prompt, piece by piece. Closing the generator ends the generation.

        The same request with the same `idempotency_key` gets the same answer for a day, where the
        server keeps journals.
        """
        request = self._generate(prompt, client_request_id, sampling)
        return self._stream(
            self._stub.Generate, self._stub.ResumeGenerate, request, idempotency_key
        )

    def chat(
        self,
        messages: Sequence[Message],
        *,
        client_request_id: str = "",
        idempotency_key: str = "",
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Piece, None]:
        """Answer a conversation, piece by piece; else as `generate`."""
        request = self._chat(messages, client_request_id, sampling)
        return self._stream(self._stub.Chat, self._stub.ResumeChat, request, idempotency_key)

    async def complete(
        self, prompt: Prompt, *, idempotency_key: str = "", **sampling: Unpack[Sampling]
    ) -> Answer:
        """Continue a prompt, and wait for the whole answer."""
        return answer_of(
            [
                piece
                async for piece in self.generate(
                    prompt, idempotency_key=idempotency_key, **sampling
                )
            ]
        )

    async def reply(
        self,
        messages: Sequence[Message],
        *,
        idempotency_key: str = "",
        **sampling: Unpack[Sampling],
    ) -> Answer:
        """Answer a conversation, and wait for the whole answer."""
        return answer_of(
            [
                piece
                async for piece in self.chat(messages, idempotency_key=idempotency_key, **sampling)
            ]
        )

    async def embed(
        self,
        inputs: str | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        add_special_tokens: bool = True,
    ) -> list[list[float]]:
        """As `Client.embed`."""
        request = self._embed(inputs, dimensions, normalize, add_special_tokens)
        return [
            list(each.values) for each in (await self._unary(self._stub.Embed, request)).embeddings
        ]

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

    async def _stream(
        self, method: Any, resume: Any, request: Any, key: str = ""
    ) -> AsyncGenerator[Piece, None]:
        stream, began_s = LostStream(self._resume_s), time.monotonic()
        call, initial = method(request, **self._how(key=key)), ()
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
