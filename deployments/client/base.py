"""What the blocking and the asyncio client share: channel, key, requests, and errors."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from penstock.deployments.client.messages import message_of, sampling_fields
from penstock.deployments.client.tls import ClientTls
from penstock.deployments.client.types import Message, Prompt, Sampling
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc

# What gRPC sends again by itself, as long as no headers of an answer have come. A server that stops
# answers CANCELLED to calls that it has received and not begun (grpc/grpc#41785), and resets new
# connections; the attempts after that reach another one. Headers come with the answer's id, also
# before an error of ours: none of those is repeated.
_RETRIES = {
    "maxAttempts": 5,
    "initialBackoff": "0.05s",
    "backoffMultiplier": 2,
    "maxBackoff": "1s",
    "retryableStatusCodes": ["CANCELLED", "UNAVAILABLE"],
}
_SCHEMES = ("http://", "https://", "grpc://", "grpcs://")  # gRPC has others, as dns: and unix:
_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
_CONFIG = {"methodConfig": [{"name": [{"service": _SERVICE}], "retryPolicy": _RETRIES}]}

CHANNEL_OPTIONS = (
    ("grpc.service_config", json.dumps(_CONFIG)),
    ("grpc.initial_reconnect_backoff_ms", 100),  # attempts that come later find a new connection
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


class BaseClient(ABC):
    """What the two clients share: the channel, the key, and the request messages."""

    def __init__(
        self,
        target: str = "127.0.0.1:8001",
        *,
        api_key: str | None = None,
        model: str = "",
        timeout_s: float | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        resume_s: float = 60.0,
    ):
        """`target`: host:port of the gRPC API. `model` "" is the first one served. `timeout_s` is
        the deadline of each call, which the server keeps, too. `resume_s`: longest wait for a
        stream to go on after its connection was lost, where the server keeps journals; 0: none
        goes on.

        TLS: `ca_file` (PEM) names the CAs of the server, `cert_file` and `key_file` the certificate
        for a server that asks for one; or `credentials`, which are taken as they are. Raises
        ValueError for files that cannot be used, and for a URL."""
        if target.startswith(_SCHEMES):
            raise ValueError(
                "target is host:port of the server's gRPC API, such as 127.0.0.1:8001, not a URL: "
                + target
            )
        if credentials is None and (ca_file or cert_file or key_file):
            credentials = ClientTls(ca_file, cert_file, key_file).credentials()
        self._model = model
        self._resume_s = resume_s
        self._timeout_s = timeout_s
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._channel = self._connect(target, credentials)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)

    @abstractmethod
    def _connect(self, target: str, credentials: grpc.ChannelCredentials | None) -> Any:
        """The gRPC channel; without credentials it is not encrypted."""

    def _how(self, began_s: float | None = None, key: str = "") -> dict[str, Any]:
        """Options of a call. `began_s`: when its first attempt began. `key`: idempotency key."""
        timeout_s = self._timeout_s
        if timeout_s is not None and began_s is not None:
            timeout_s = max(began_s + timeout_s - time.monotonic(), 0.0)
        metadata = (*self._metadata, ("idempotency-key", key)) if key else self._metadata
        return {"metadata": metadata, "timeout": timeout_s}

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

    def _embed(
        self,
        inputs: str | Sequence[Prompt],
        dimensions: int | None,
        normalize: bool,
        add_special_tokens: bool,
    ) -> pb.EmbedRequest:
        if isinstance(inputs, str):  # not each of its characters
            inputs = [inputs]
        return pb.EmbedRequest(
            model=self._model,
            inputs=[
                pb.EmbedInput(text=each)
                if isinstance(each, str)
                else pb.EmbedInput(token_ids=pb.TokenIds(ids=each))
                for each in inputs
            ],
            dimensions=dimensions,
            normalize=normalize,
            add_special_tokens=add_special_tokens,
        )

    def _chat(self, messages: Sequence[Message], name: str, sampling: Sampling) -> pb.ChatRequest:
        if isinstance(messages, str | Mapping):
            raise TypeError('messages is a list, as [{"role": "user", "content": "Hello"}]')
        return pb.ChatRequest(
            model=self._model,
            messages=[message_of(message) for message in messages],
            client_request_id=name,
            **sampling_fields(sampling),
        )
