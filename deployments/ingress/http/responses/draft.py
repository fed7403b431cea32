"""OpenAI's Responses API: a response as it grows, event by event. store.py keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from penstock.deployments.ingress.core.call import TextDelta, earlier_call
from penstock.deployments.ingress.core.errors import ApiError
from penstock.deployments.ingress.http.responses.items import Message
from penstock.deployments.ingress.http.responses.output_items import NO_TOOL, Kind, Output
from penstock.deployments.ingress.http.responses.requests import ResponsesRequest
from penstock.deployments.ingress.http.responses.tools import Origin
from penstock.workers.request import FinishReason, RequestError, SamplingParams


class ResponseBuilder:
    """One response on its way: its body at any moment, and the events that lead from one to the
    next, numbered from 0."""

    def __init__(
        self,
        request_id: str,
        model: str,
        asked: ResponsesRequest,
        *,
        params: SamplingParams,
        created_s: int | None = None,
    ):
        """`params`: how the answer is sampled. `created_s`: when the request came, in seconds of
        Unix time; None: now."""
        self.id = f"resp_{request_id}"
        self.end_s: Callable[[], int] = lambda: int(time.time())  # when the answer ended
        self.status = "queued" if asked.background else "in_progress"
        self._request_id = request_id
        self._origins = asked.origins
        self._has_begun = False
        self._outputs: list[Output] = []
        self._num_events = 0
        self._body: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()) if created_s is None else created_s,
            "background": bool(asked.background),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "model": model,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {
                "effort": asked.reasoning.effort if asked.reasoning else None,
                "summary": None,
            },
            "service_tier": "default",
            "store": asked.store is not False,
            "temperature": params.temperature,
            **asked.echoed_fields(),
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    @property
    def text(self) -> str:
        return self._text_of("message")

    @property
    def said(self) -> str:
        """All text that the model has generated, reasoning and calls included."""
        return "".join(output.text for output in self._outputs)

    @property
    def is_done(self) -> bool:
        return self.status not in ("queued", "in_progress")

    def body(self) -> dict[str, Any]:
        output = [each.body(self._item_status(each)) for each in self._outputs]
        return {**self._body, "status": self.status, "output": output}

    def message(self) -> Message:
        """The answer as a message of the conversation that goes on from it."""
        calls = []
        for each in self._outputs:
            if each.is_call:
                call_id, name = each.call["call_id"], each.call["name"]
                try:
                    calls.append(earlier_call(call_id, name, each.text, "arguments"))
                except RequestError:  # no JSON at all; the client may answer the call all the same
                    calls.append(earlier_call(call_id, name, "", "arguments"))
        rest = {"tool_calls": calls, "reasoning_content": self._text_of("reasoning")}
        answer = {"role": "assistant", "content": self.text}
        return answer | {name: value for name, value in rest.items() if value}

    def is_not_stored(self) -> None:
        """It was to be kept, and could not be."""
        self._body["store"] = False

    def created(self) -> list[dict[str, Any]]:
        """The first events of a response, before any output."""
        events = [self._event("response.created", response=self.body())]
        if self.status == "queued":
            events.append(self._event("response.queued", response=self.body()))
        return events

    def add(self, piece: TextDelta) -> list[dict[str, Any]]:
        """Take in the next piece of the answer."""
        events = []
        if not self._has_begun:
            self._has_begun, self.status = True, "in_progress"
            events.append(self._event("response.in_progress", response=self.body()))
        if piece.reasoning:
            events += self._say("reasoning", "rs", piece.reasoning)
        if piece.text:
            events += self._say("message", "msg", piece.text)
        for call in piece.tool_calls:
            if call.name is not None:
                named = {"call_id": call.call_id or "", "name": call.name}
                if self._origin(call.name).is_custom:
                    events += self._open("custom_tool_call", "ctc", named)
                else:
                    events += self._open("function_call", "fc", named)
            if call.arguments:
                events += self._grow(call.arguments)
        if piece.finish_reason is not None:
            events += self._end(piece)
        return events

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        """End the response with the error that the client receives."""
        self.status = "failed"
        self._body["error"] = {
            "code": "server_error",
            "message": error.message,
            "type": error.code,
        }
        return self.end_with(self.body())

    def end_with(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The last event of a response that came to `body` elsewhere."""
        status = body["status"]
        kind = status if status in ("completed", "failed") else "incomplete"
        return [self._event(f"response.{kind}", response=body)]

    def _say(
        self, kind: Literal["message", "reasoning"], prefix: str, text: str
    ) -> list[dict[str, Any]]:
        events = []
        last = self._outputs[-1] if self._outputs else None
        if last is None or last.kind != kind:
            events = self._open(kind, prefix)
        return events + self._grow(text)

    def _open(
        self, kind: Kind, prefix: str, call: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Begin the next item; the one before is complete."""
        events = self._close("completed")
        index = len(self._outputs)
        # The first of a kind has the plain id.
        nth = sum(each.kind == kind for each in self._outputs)
        item_id = f"{prefix}_{self._request_id}" + (f"_{nth}" if nth else "")
        origin = self._origin(call["name"]) if call else NO_TOOL
        output = Output(kind, item_id, index, call or {}, origin)
        self._outputs.append(output)
        item = output.body("in_progress", is_new=True)
        events.append(self._event("response.output_item.added", output_index=index, item=item))
        if not output.is_call:
            place = {**_place(output), "content_index": 0}
            part = output.part("")
            events.append(self._event("response.content_part.added", **place, part=part))
        return events

    def _grow(self, text: str) -> list[dict[str, Any]]:
        output = self._outputs[-1]
        output.texts.append(text)
        if output.kind == "custom_tool_call":  # its text is within JSON: it is told when complete
            return []
        kind, more = _DELTAS[output.kind]
        return [self._event(f"{kind}.delta", **_place(output), **more, delta=text)]

    def _close(self, status: str) -> list[dict[str, Any]]:
        """End the item that grows, if one does."""
        output = self._outputs[-1] if self._outputs else None
        if output is None or not output.is_open:
            return []
        output.is_open = False
        kind, more = _DELTAS[output.kind]
        place, text = _place(output), output.text
        if output.kind == "custom_tool_call":
            given = output.body(status)["input"]
            events = [self._event(f"{kind}.delta", **place, delta=given)] if given else []
            events.append(self._event(f"{kind}.done", **place, input=given))
        elif output.kind == "function_call":
            named = {"name": output.origin.name, "arguments": text}
            events = [self._event(f"{kind}.done", **place, **named)]
        else:
            part = {**place, "content_index": 0, "part": output.part(text)}
            events = [
                self._event(f"{kind}.done", **place, **more, text=text),
                self._event("response.content_part.done", **part),
            ]
        done = {"output_index": output.index, "item": output.body(status)}
        return [*events, self._event("response.output_item.done", **done)]

    def _end(self, last: TextDelta) -> list[dict[str, Any]]:
        assert last.usage is not None, "the last piece has the usage"
        # What is empty is a message, too.
        events = [] if self._outputs else self._open("message", "msg")
        if last.finish_reason is FinishReason.STOP:
            self.status = "completed"
            self._body["completed_at"] = self.end_s()
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
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        events += self._close(self._item_status(self._outputs[-1]))
        # There is no event of a cancelled response: it ends as one that is not complete.
        return [*events, *self.end_with(self.body())]

    def _origin(self, name: str) -> Origin:
        return self._origins.get(name, Origin(name))

    def _item_status(self, output: Output) -> str:
        """Only the last item can be anything but complete."""
        if output.index < len(self._outputs) - 1:
            return "completed"
        return self.status if self.status in ("in_progress", "completed") else "incomplete"

    def _text_of(self, kind: str) -> str:
        return "".join(each.text for each in self._outputs if each.kind == kind)

    def _event(self, kind: str, **body: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **body}


# The events that an item grows by, and the fields of each in addition to its text.
_DELTAS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("response.output_text", {"content_index": 0, "logprobs": []}),
    "reasoning": ("response.reasoning_text", {"content_index": 0}),
    "function_call": ("response.function_call_arguments", {}),
    "custom_tool_call": ("response.custom_tool_call_input", {}),
}


def _place(output: Output) -> dict[str, Any]:
    return {"item_id": output.item_id, "output_index": output.index}
