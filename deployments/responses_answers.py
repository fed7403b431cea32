"""OpenAI's Responses API: a response as it grows, event by event.

Knows nothing of HTTP or of where responses are kept.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from penstock.deployments.calls import TextDelta
from penstock.deployments.errors import ApiError
from penstock.deployments.responses_types import PLAIN_TEXT, ResponsesRequest
from penstock.workers.request import FinishReason


class ResponseBody(BaseModel):
    """A response: what was asked, how far it is, and what came of it."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    completed_at: int | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class Deleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseDraft:
    """One response on its way: its body at any moment, and the events that lead from one to the
    next, numbered from 0."""

    def __init__(self, request_id: str, model: str, asked: ResponsesRequest):
        self.id = f"resp_{request_id}"
        self.status = "queued" if asked.background else "in_progress"
        self._item_id = f"msg_{request_id}"
        self._has_begun = False
        self._texts: list[str] = []
        self._num_events = 0
        self._body: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "background": bool(asked.background),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "model": model,
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": asked.store is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": PLAIN_TEXT,
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def is_done(self) -> bool:
        return self.status not in ("queued", "in_progress")

    def body(self) -> dict[str, Any]:
        output = [self._item(self.text)] if self._has_begun else []
        return {**self._body, "status": self.status, "output": output}

    def created(self) -> list[dict[str, Any]]:
        """The events of a response that nothing has come of yet."""
        events = [self._event("response.created", response=self.body())]
        if self.status == "queued":
            events.append(self._event("response.queued", response=self.body()))
        return events

    def add(self, piece: TextDelta) -> list[dict[str, Any]]:
        """Take in the next piece of the answer."""
        events = [] if self._has_begun else self._begin()
        if piece.text:
            self._texts.append(piece.text)
            place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
            kind = "response.output_text.delta"
            events.append(self._event(kind, **place, delta=piece.text, logprobs=[]))
        if piece.finish_reason is not None:
            events += self._end(piece)
        return events

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        """End with what a client is told about a failure."""
        self.status = "failed"
        self._body["error"] = {
            "code": "server_error",
            "message": error.message,
            "type": error.code,
        }
        return [self._event("response.failed", response=self.body())]

    def _begin(self) -> list[dict[str, Any]]:
        self.status = "in_progress"
        events = [self._event("response.in_progress", response=self.body())]
        self._has_begun = True
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        item = {**self._item(""), "content": []}
        return [
            *events,
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=_part("")),
        ]

    def _end(self, last: TextDelta) -> list[dict[str, Any]]:
        assert last.usage is not None, "the last piece has the usage"
        if last.finish_reason is FinishReason.STOP:
            self.status = "completed"
            self._body["completed_at"] = int(time.time())
        elif last.finish_reason is FinishReason.LENGTH:
            self.status = "incomplete"
            self._body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.status = "cancelled"
        usage = last.usage
        self._body["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        text = self.text
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        # There is no event of a cancelled response: it ends as one that is not complete.
        end = "completed" if self.status == "completed" else "incomplete"
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=[]),
            self._event("response.content_part.done", **place, part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=self._item(text)),
            self._event(f"response.{end}", response=self.body()),
        ]

    def _item(self, text: str) -> dict[str, Any]:
        status = self.status if self.status in ("in_progress", "completed") else "incomplete"
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _event(self, kind: str, **body: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **body}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
