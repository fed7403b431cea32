"""The client of the CLI: one interface to a server, over HTTP (OpenAI's API) or gRPC.

Yields text while it is generated, and raises one kind of error, with a message for the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import httpx

from penstock.deployments.cli.flags.server import KEY_VARIABLE
from penstock.deployments.client import Client, ClientError
from penstock.deployments.client.tls import ClientTls
from penstock.workers.errors import ConfigError

Message = dict[str, str]
Sampling = Mapping[str, Any]
CONNECT_TIMEOUT_S = 5.0
# What may be wrong where a server ends a connection without a word.
PLAIN_HINT = "; if it speaks TLS, write https://; if this is its gRPC port, grpc://"
PLAIN_GRPC_HINT = "; if it speaks TLS, write grpcs://; if this is its HTTP port, http://"
NAMELESS_HINT = "; if it asks for a certificate: --cert-file FILE --key-file FILE"
REFUSED_HINT = "; if it refuses --cert-file: its CA must be in the server's tls_client_ca_file"
START_ONE = "is one running? `penstock serve` starts one"


class ServerError(RuntimeError):
    """The server refused, failed or cannot be reached; the message is for the user.

    `code`: of the server's error; "": it named none.
    """

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code


class Server(Protocol):
    """Text from a server. Closing an iterator cancels the generation."""

    def models(self) -> list[str]: ...
    def chat(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]: ...
    def complete(self, prompt: str, sampling: Sampling) -> Iterator[str]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def connect(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    tls: ClientTls | None = None,
) -> Server:
    """The server at `url`, http(s):// or grpc(s)://host:port. Raises ConfigError for others.

    `tls`: for https and grpcs; None: the system's CAs. Nothing is sent before the first call.
    """
    parts = urlsplit(url)
    is_tls = parts.scheme in ("https", "grpcs")
    tls = (tls or ClientTls()) if is_tls else None
    if parts.scheme in ("http", "https") and parts.hostname:
        return HttpServer(url, model, api_key, tls)
    if parts.scheme in ("grpc", "grpcs") and parts.hostname and parts.port:
        return GrpcServer(parts.netloc, model, api_key, tls)
    raise ConfigError(
        f"cannot read --url {url!r}: write http://host:port or grpc://host:port, or https:// or "
        "grpcs:// for TLS"
    )


def connect_http(
    url: str, command: str, api_key: str | None, tls: ClientTls | None = None
) -> HttpServer:
    """As `connect`, for a `command` that only HTTP serves. Raises ConfigError for other URLs."""
    server = connect(url, api_key=api_key, tls=tls)
    if not isinstance(server, HttpServer):
        raise ConfigError(f"penstock {command} needs HTTP; give --url http://host:port")
    return server


class HttpServer:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None, api_key: str | None, tls: ClientTls | None):
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._cut_hint = PLAIN_HINT if tls is None else _nameless(tls)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        # No read timeout: the prefill of a long prompt may take minutes.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.Client(
            base_url=self._url,
            headers=headers,
            timeout=timeout,
            verify=True if tls is None else tls.context(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The JSON answer to GET `path`. Raises ServerError."""
        with self._errors():
            response = self._http.get(path, params=query)
            _check(response)
            answer: dict[str, Any] = response.json()
            return answer

    def post(self, path: str) -> dict[str, Any]:
        """The JSON answer to POST `path`, without a body. Raises ServerError."""
        with self._errors():
            response = self._http.post(path)
            _check(response)
            answer: dict[str, Any] = response.json()
            return answer

    def models(self) -> list[str]:
        answer = self.get("/v1/models")
        with self._errors():
            return [model["id"] for model in answer["data"]]

    def chat(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]:
        body = {"messages": list(messages), **sampling}
        for choice in self._stream("/v1/chat/completions", body):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        for choice in self._stream("/v1/completions", {"prompt": prompt, **sampling}):
            yield choice["text"]

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of each event. Raises ServerError, also for an error event in mid-stream."""
        self._model = self._model or self.models()[0]
        body |= {"model": self._model, "stream": True}
        with self._errors(), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
            _check(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                yield from event["choices"]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ServerError(_why(self._url, str(error))) from None
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            why = str(error).rstrip(".") or "the connection was cut"
            raise ServerError(f"{self._url}: {why}{self._cut_hint}") from None
        except httpx.HTTPError as error:
            raise ServerError(f"{self._url}: {error or type(error).__name__}") from None
        except (ValueError, KeyError, IndexError) as error:
            raise ServerError(f"{self._url} does not follow OpenAI's API: {error!r}") from None


class GrpcServer:
    """A Penstock server, over gRPC."""

    def __init__(self, target: str, model: str | None, api_key: str | None, tls: ClientTls | None):
        self._target = target
        self._cut_hint = PLAIN_GRPC_HINT if tls is None else _nameless(tls)
        credentials = None if tls is None else tls.credentials()
        self._client = Client(target, model=model or "", api_key=api_key, credentials=credentials)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def models(self) -> list[str]:
        with self._errors():
            return [model.name for model in self._client.models()]

    def chat(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]:
        with self._errors(), closing(self._client.chat(messages, **sampling)) as pieces:
            for piece in pieces:
                yield piece.text

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        with self._errors(), closing(self._client.generate(prompt, **sampling)) as pieces:
            for piece in pieces:
                yield piece.text

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            if error.code == "unavailable":  # gRPC's code for a server that cannot be reached
                raise ServerError(_why(self._target, error.message) + self._cut_hint) from None
            raise ServerError(_with_remedy(error.message, error.code), error.code) from None


def _nameless(tls: ClientTls) -> str:
    return NAMELESS_HINT if tls.cert_file is None else REFUSED_HINT


def _why(where: str, reason: str) -> str:
    """What is wrong with a connection that failed. `reason`: the library's words."""
    lower = reason.lower()
    if "mismatch" in lower or "not match" in lower or "verification check failed" in lower:
        return (
            f"the certificate of {where} is for other host names: --url must have one of them "
            "(`penstock certs show` prints those of a folder)"
        )
    if "certificate has expired" in lower:
        return f"the certificate of {where} has expired (`penstock certs renew` makes a new one)"
    if "certificate_verify_failed" in lower:
        why = reason.rpartition("certificate verify failed: ")[2]
        return f"the certificate of {where} is not trusted ({why}); name its CA with --ca-file"
    if "wrong_version_number" in lower:
        return f"{where} does not speak TLS; write http:// or grpc://"
    if "certificate_required" in lower:
        return f"{where} asks for a certificate: --cert-file FILE --key-file FILE"
    return f"no server answers at {where}; {START_ONE}"


def _check(response: httpx.Response) -> None:
    """Raise ServerError with the server's own message, if the status is an error."""
    if not response.is_error:
        return
    try:
        error = response.json()["error"]
        message, code = error["message"], error.get("code") or ""
    except (ValueError, KeyError, TypeError):
        message, code = f"HTTP status {response.status_code}", ""
    raise ServerError(_with_remedy(message, code), code)


def _with_remedy(message: str, code: str) -> str:
    """A server's message, which speaks of headers, in terms of a command's flags."""
    if code != "invalid_api_key":
        return message
    return f"{message}; a command has its key from --api-key-file FILE, or from {KEY_VARIABLE}"
