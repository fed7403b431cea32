"""The server that is measured: any server with OpenAI's HTTP API, or Penstock over gRPC.

Yields an answer chunk by chunk, and raises one kind of error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from penstock.deployments.bench.http_client import HttpAnswer, HttpConnections, HttpError
from penstock.deployments.client import AsyncClient, ClientError
from penstock.deployments.client.tls import ClientTls
from penstock.workers.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
BenchPrompt = str | list[int]


class TargetError(Exception):
    """A request failed. `kind` is short, for counting; the message is for the user."""

    def __init__(self, kind: str, message: str = ""):
        self.kind = kind
        super().__init__(f"{kind}: {message}" if message else kind)


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that is measured; None where the server does not report it."""

    name: str
    max_model_len: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class TargetPiece:
    """One chunk. `num_tokens` is None where the server does not report it; the usage fields are set
    in the last chunk, or never."""

    num_chars: int
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    draft_tokens: int = 0  # that the server verified
    accepted_draft_tokens: int = 0  # of those, right


class Target(Protocol):
    """A server. Closing the generator of an answer cancels the request. All raise TargetError."""

    async def model(self) -> TargetModel: ...
    def answer(self, prompt: BenchPrompt, max_tokens: int) -> AsyncGenerator[TargetPiece, None]: ...
    async def close(self) -> None: ...


def target_of(
    url: str,
    *,
    model: str | None,
    api_key: str | None,
    is_chat: bool,
    sampling: Mapping[str, Any],
    extra_body: Mapping[str, Any],
    tls: ClientTls | None = None,
) -> Target:
    """The server at `url`. Needs a running event loop. Raises ConfigError.

    `tls`: for https and grpcs; None: the system's CAs.
    """
    parts = urlsplit(url)
    tls = (tls or ClientTls()) if parts.scheme in ("https", "grpcs") else None
    if parts.scheme in ("http", "https") and parts.hostname:
        return HttpTarget(url, model, api_key, is_chat, {**sampling, **extra_body}, tls)
    if parts.scheme in ("grpc", "grpcs") and parts.hostname and parts.port:
        if extra_body:
            raise ConfigError("--extra-body is for HTTP; over gRPC the fields are fixed")
        return GrpcTarget(parts.netloc, model, api_key, is_chat, sampling, tls)
    raise ConfigError(f"cannot read --url {url!r}: write http(s):// or grpc(s)://host:port")


class HttpTarget:
    """A server with OpenAI's API."""

    def __init__(
        self,
        url: str,
        model: str | None,
        api_key: str | None,
        is_chat: bool,
        fields: Mapping[str, Any],
        tls: ClientTls | None,
    ):
        base = urlsplit(url.rstrip("/").removesuffix("/v1"))
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        context = None if tls is None else tls.context()
        self._connections = HttpConnections(base, headers, CONNECT_TIMEOUT_S, context)
        self._path = f"{base.path}/v1/{'chat/completions' if is_chat else 'completions'}"
        self._models_path = f"{base.path}/v1/models"
        self._model = model
        self._is_chat = is_chat
        self._fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}

    async def model(self) -> TargetModel:
        try:
            answer = await self._connections.get(self._models_path)
            body = await answer.read()
        except (HttpError, OSError, TimeoutError) as error:
            raise _unreachable(error) from None
        if answer.status != 200:
            raise _refusal(answer.status, body)
        try:
            models = json.loads(body)["data"]
            wanted = [each for each in models if self._model in (None, each["id"])]
            if not wanted:
                known = ", ".join(each["id"] for each in models)
                raise TargetError("no such model", f"the server has: {known}")
            self._model = wanted[0]["id"]
            return TargetModel(wanted[0]["id"], wanted[0].get("max_model_len"))
        except (ValueError, KeyError, TypeError) as error:
            raise TargetError("protocol", f"/v1/models is not as OpenAI's: {error!r}") from None

    async def answer(
        self, prompt: BenchPrompt, max_tokens: int
    ) -> AsyncGenerator[TargetPiece, None]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens, **self._fields}
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        try:
            answer = await self._connections.post_json(self._path, json.dumps(body).encode())
            if answer.status != 200:
                raise _refusal(answer.status, await answer.read())
            async with aclosing(_events(answer)) as events:
                pieces = _Pieces()
                async for event in events:
                    if (piece := pieces.piece(event)) is not None:
                        yield piece
            if not pieces.has_ended:
                raise TargetError("broke off", "the stream ended before the answer did")
        except HttpError as error:
            raise TargetError("broke off", str(error)) from None
        except (OSError, TimeoutError) as error:
            raise _unreachable(error) from None
        except (ValueError, KeyError, TypeError) as error:
            raise TargetError("protocol", repr(error)) from None

    async def close(self) -> None:
        await self._connections.close()


class _Pieces:
    """Reads the events of one answer, chat or completions."""

    def __init__(self) -> None:
        self.has_ended = False
        self._num_reported = 0

    def piece(self, event: bytes) -> TargetPiece | None:
        """What there is to know in an event; None if nothing."""
        if event == b"[DONE]":
            return None
        body = json.loads(event)
        if "error" in body:
            error = body["error"]
            raise TargetError(str(error.get("code") or error.get("type") or "error"))
        usage = body.get("usage")
        num_chars, num_tokens = 0, None
        for choice in body["choices"]:
            delta = choice.get("delta") or choice
            text = delta.get("content") or delta.get("reasoning_content") or choice.get("text")
            num_chars += len(text or "")
            if (token_ids := choice.get("token_ids")) is not None:
                num_tokens = (num_tokens or 0) + len(token_ids)
            if choice.get("finish_reason") is not None:
                self.has_ended = True
        if usage is None:
            return TargetPiece(num_chars, num_tokens) if num_chars or num_tokens else None
        completion = usage["completion_tokens"]
        if num_tokens is None and body["choices"]:  # this server reports usage with every chunk
            num_tokens = completion - self._num_reported
        self._num_reported = completion
        details = usage.get("completion_tokens_details") or {}
        accepted = details.get("accepted_prediction_tokens") or 0
        drafts = accepted + (details.get("rejected_prediction_tokens") or 0)
        return TargetPiece(
            num_chars, num_tokens, usage["prompt_tokens"], completion, drafts, accepted
        )


async def _events(answer: HttpAnswer) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event; those that servers send have one line of it."""
    rest = b""
    async with aclosing(answer.body()) as parts:
        async for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()


def _refusal(status: int, body: bytes) -> TargetError:
    try:
        error = json.loads(body)["error"]
        return TargetError(f"{status} {error.get('code') or error['type']}", error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return TargetError(str(status), body[:200].decode(errors="replace"))


def _unreachable(error: Exception) -> TargetError:
    return TargetError("connection", str(error) or type(error).__name__)


class GrpcTarget:
    """A Penstock server, over gRPC; it names the tokens of every chunk."""

    def __init__(
        self,
        target: str,
        model: str | None,
        api_key: str | None,
        is_chat: bool,
        sampling: Mapping[str, Any],
        tls: ClientTls | None,
    ):
        credentials = None if tls is None else tls.credentials()
        self._client = AsyncClient(
            target, model=model or "", api_key=api_key, credentials=credentials
        )
        self._model = model
        self._is_chat = is_chat
        self._sampling: Any = dict(sampling)

    async def model(self) -> TargetModel:
        try:
            models = await asyncio.wait_for(self._client.models(), CONNECT_TIMEOUT_S)
        except (ClientError, TimeoutError) as error:
            raise TargetError("connection", str(error) or "no answer came") from None
        wanted = [each for each in models if self._model in (None, each.name)]
        if not wanted:
            known = ", ".join(each.name for each in models)
            raise TargetError("no such model", f"the server has: {known}")
        model = wanted[0]
        return TargetModel(model.name, model.max_model_len, model.vocab_size)

    async def answer(
        self, prompt: BenchPrompt, max_tokens: int
    ) -> AsyncGenerator[TargetPiece, None]:
        sampling = {**self._sampling, "max_tokens": max_tokens}
        if self._is_chat:
            assert isinstance(prompt, str), "chat takes text"
            stream = self._client.chat([{"role": "user", "content": prompt}], **sampling)
        else:
            stream = self._client.generate(prompt, **sampling)
        try:
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    num_tokens = len(piece.token_ids)
                    num_chars = len(piece.text) + len(piece.reasoning)
                    if piece.usage is None:
                        yield TargetPiece(num_chars, num_tokens)
                    else:
                        used = piece.usage
                        yield TargetPiece(
                            num_chars,
                            num_tokens,
                            used.prompt_tokens,
                            used.completion_tokens,
                            used.draft_tokens,
                            used.accepted_draft_tokens,
                        )
        except ClientError as error:
            raise TargetError(error.code, error.message) from None

    async def close(self) -> None:
        await self._client.close()
