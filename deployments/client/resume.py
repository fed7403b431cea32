"""Lost gRPC streams: whether one may go on, and what the client has of it."""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Iterable
from typing import Any

import grpc

from penstock.protos.penstock.v1 import inference_pb2 as pb

WAIT_S = 0.25  # between attempts
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class LostStream:
    """What came of one stream. `resume_s`: longest wait for it to go on after a loss."""

    def __init__(self, resume_s: float):
        self._resume_s = resume_s
        self._until_s: float | None = None  # of the waits since the last message
        self._request_id = ""
        self._received: dict[int, pb.ReceivedTokens] = {}

    def add(self, message: pb.GenerateResponse | pb.ChatResponse) -> None:
        self._until_s = None
        self._request_id = self._request_id or message.request_id
        answer = self._received.setdefault(message.choice, pb.ReceivedTokens(checksum=0))
        answer.num_tokens += len(message.token_ids)
        answer.checksum = zlib.crc32(array("i", message.token_ids).tobytes(), answer.checksum)
        answer.has_ended = message.finish_reason != pb.FINISH_REASON_UNSPECIFIED

    def may_continue(self, error: grpc.RpcError, initial: Iterable[tuple[str, Any]]) -> bool:
        """Whether to ask for the rest after `error`. `initial`: metadata of the first attempt."""
        trailing = dict(error.trailing_metadata() or ())
        is_lost = error.code() in _LOST and trailing.get("error-code") in (None, *_PASSING)
        if not (is_lost and self._request_id and dict(initial).get("x-penstock-resumable") == "1"):
            return False
        if self._until_s is None:
            self._until_s = time.monotonic() + self._resume_s
        return time.monotonic() < self._until_s

    def request(self) -> pb.ResumeRequest:
        num = max(self._received, default=-1) + 1
        nothing = pb.ReceivedTokens(checksum=0)
        received = [self._received.get(choice, nothing) for choice in range(num)]
        return pb.ResumeRequest(request_id=self._request_id, received=received)


# Codes of a server that starts, or that ends a stream which another one can continue.
_PASSING = ("no_worker", "state_unavailable", "overloaded", "worker_lost")
