"""A response as any ingress knows it: of its own memory, or from the state store as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from penstock.deployments.ingress.http.events import json_bytes
from penstock.deployments.ingress.http.responses.items import Message
from penstock.deployments.ingress.http.responses.store import StoredResponse

VERSION = 1
_RUNNING = ("queued", "in_progress")


@dataclass(frozen=True, slots=True)
class Kept:
    """What a client may come back for.

    `num_input`: messages before the answer. `streams`: the client asked for a stream. `version`: of
    the value in the store; None: it is not from there.
    """

    body: dict[str, Any]
    principal: str
    messages: tuple[Message, ...]
    num_input: int
    is_background: bool
    streams: bool
    version: int | None = None

    @classmethod
    def of(cls, entry: StoredResponse) -> Kept:
        return cls(
            entry.draft.body(),
            entry.principal,
            entry.messages,
            entry.num_input,
            entry.is_background,
            entry.frames is not None,
        )

    @classmethod
    def from_value(cls, value: bytes, version: int) -> Kept | None:
        """None: another release wrote it."""
        values = orjson.loads(value)
        if values["format"] != VERSION:
            return None
        return cls(
            values["body"],
            values["principal"],
            tuple(values["messages"]),
            values["num_input"],
            values["is_background"],
            values["streams"],
            version,
        )

    def value(self) -> bytes:
        """For the store."""
        return json_bytes(
            {
                "format": VERSION,
                "body": self.body,
                "principal": self.principal,
                "messages": list(self.messages),
                "num_input": self.num_input,
                "is_background": self.is_background,
                "streams": self.streams,
            }
        )

    @property
    def request_id(self) -> str:
        return str(self.body["id"]).removeprefix("resp_")

    @property
    def status(self) -> str:
        return str(self.body["status"])

    @property
    def is_running(self) -> bool:
        return self.is_background and self.status in _RUNNING
