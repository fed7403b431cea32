"""OpenAI's Responses API: its requests as prompts.

Knows nothing of HTTP or of where responses are kept, and makes no decision that the request core
makes for all front ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from penstock.deployments.bodies import (
    Strict,
    json_object,
    known_only,
    refuse_unless_neutral,
    validated,
)
from penstock.deployments.calls import ChatPrompt
from penstock.workers.request import RequestError, SamplingParams

Message = Mapping[str, Any]

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

IGNORED = frozenset(
    (
        *("user", "service_tier", "safety_identifier", "stream_options"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    )
)
PLAIN_TEXT = {"format": {"type": "text"}}
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "include", "context_management"), (None, [])),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    **dict.fromkeys(("max_tool_calls", "conversation", "prompt", "moderation"), (None,)),
    "reasoning": (
        None,
        {},
        {"effort": None},
        {"effort": "none"},
        {"effort": None, "summary": None},
    ),
    "text": (None, {}, PLAIN_TEXT, *({**PLAIN_TEXT, "verbosity": v} for v in (None, "medium"))),
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
}
_SAMPLING = (
    *("temperature", "top_p", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_IGNORED_IN_ITEMS = frozenset(("id", "status", "phase"))
_IGNORED_IN_PARTS = frozenset(("annotations", "logprobs"))


class InputPart(Strict):
    type: Literal["input_text", "output_text"]
    text: str


class InputItem(Strict):
    type: Literal["message"] = "message"
    role: str = Field(description="system, developer, user or assistant")
    content: str | list[InputPart]

    def plain(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ResponsesRequest(Strict):
    """What to answer, and what to keep."""

    input: str | list[InputItem]
    model: str | None = Field(None, description="as /v1/models names it; default: the one served")
    instructions: str | None = Field(None, description="a system message, for this response only")
    previous_response_id: str | None = Field(None, description="the response to go on from")
    max_output_tokens: int | None = Field(None, description="most tokens of the answer")
    temperature: float | None = Field(None, description="0 is greedy; [0, 100]; default 1")
    top_p: float | None = Field(None, description="(0, 1]; default 1")
    top_k: int | None = Field(None, description="0 or -1: off, as by default")
    min_p: float | None = Field(None, description="[0, 1]; default 0")
    seed: int | None = Field(None, description="64 bits; the same seed draws the same tokens")
    repetition_penalty: float | None = Field(None, description="(0, 100]; default 1")
    presence_penalty: float | None = Field(None, description="[-2, 2]; default 0")
    frequency_penalty: float | None = Field(None, description="[-2, 2]; default 0")
    stop: str | list[str] | None = Field(None, description="up to 16 strings of up to 256 chars")
    min_tokens: int | None = Field(None, description="nothing ends the answer before; default 0")
    ignore_eos: bool | None = Field(None, description="go on after the end-of-sequence token")
    stream: bool | None = Field(None, description="send server-sent events; default false")
    background: bool | None = Field(None, description="answer at once and go on without a client")
    store: bool | None = Field(None, description="keep the response for a while; default true")
    metadata: dict[str, str] | None = Field(None, description="comes back with the response")

    def params(self) -> SamplingParams:
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            max_tokens=self.max_output_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            **given,
        )

    def messages(self, before: tuple[Message, ...]) -> tuple[Message, ...]:
        """The conversation without the instructions, which no later response inherits."""
        if isinstance(self.input, str):
            return (*before, {"role": "user", "content": self.input})
        return (*before, *(item.plain() for item in self.input))

    def prompt(self, messages: tuple[Message, ...]) -> ChatPrompt:
        if self.instructions:
            messages = ({"role": "system", "content": self.instructions}, *messages)
        return ChatPrompt(messages)


def parse(body: bytes) -> ResponsesRequest:
    """The request in a JSON body. Raises RequestError naming the first parameter that is wrong."""
    values = known_only(json_object(body), ResponsesRequest.model_fields, UNSUPPORTED, IGNORED)
    if isinstance(items := values.get("input"), list):
        values["input"] = [_known_item(f"input[{i}]", item) for i, item in enumerate(items)]
    request = validated(ResponsesRequest, values)
    _check_metadata(request.metadata or {})
    if request.background and request.store is False:
        raise RequestError("background needs store: true", param="store")
    return request


def _known_item(path: str, item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    _refuse_kinds(path, item, ("message",), "items")
    kept = {name: value for name, value in item.items() if name not in _IGNORED_IN_ITEMS}
    if isinstance(parts := kept.get("content"), list):
        kept["content"] = [
            _known_part(f"{path}.content[{i}]", part) for i, part in enumerate(parts)
        ]
    return kept


def _known_part(path: str, part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    _refuse_kinds(path, part, ("input_text", "output_text"), "parts")
    return {name: value for name, value in part.items() if name not in _IGNORED_IN_PARTS}


def _refuse_kinds(path: str, thing: dict[str, Any], known: tuple[str, ...], noun: str) -> None:
    kind = thing.get("type", known[0])
    if isinstance(kind, str) and kind not in known:
        raise RequestError(
            f"{path}: this server takes {noun} of type {' and '.join(map(repr, known))} only",
            param=path,
            code="unsupported_parameter",
        )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if (
        len(metadata) > MAX_METADATA_PAIRS
        or any(len(key) > MAX_METADATA_KEY_CHARS for key in metadata)
        or any(len(value) > MAX_METADATA_VALUE_CHARS for value in metadata.values())
    ):
        raise RequestError(
            f"metadata holds at most {MAX_METADATA_PAIRS} pairs of up to {MAX_METADATA_KEY_CHARS} "
            f"and {MAX_METADATA_VALUE_CHARS} characters",
            param="metadata",
        )


def check_query(query: Mapping[str, str]) -> tuple[bool, int]:
    """(whether to stream, the number after which) of a retrieval. Raises RequestError."""
    for name, value in query.items():
        if name == "stream" and value not in ("true", "false"):
            raise RequestError("stream must be true or false", param="stream")
        if name == "starting_after" and not (value.isascii() and value.isdigit()):
            raise RequestError("starting_after must be a whole number", param="starting_after")
        if name not in ("stream", "starting_after", "include_obfuscation"):
            refuse_unless_neutral(ascii(name[:100])[1:-1], value, ())
    after = query.get("starting_after", "")[:18]
    return query.get("stream") == "true", int(after) if after else -1
