"""OpenAI's Responses API: its requests as prompts.

It makes no decision that the request core makes for all front ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from penstock.deployments.ingress.core.call import MAX_PRIORITY, CallOptions, ChatPrompt
from penstock.deployments.ingress.core.tools import Tool, Toolset, only_one, toolset_of
from penstock.deployments.ingress.http.body import (
    LIMITS,
    Strict,
    body_values,
    json_object,
    refuse_unless_neutral,
    sampling_field,
    sampling_params,
    strings,
    validated,
)
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.deployments.ingress.http.responses.items import Item, Message, known_item, messages_of
from penstock.workers.request import RequestError, SamplingParams
from penstock.workers.structured_spec import StructuredKind, StructuredSpec, json_schema

MAX_LISTED = 100  # items of one answer
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
    **dict.fromkeys(("include", "context_management"), (None, [])),
    **dict.fromkeys(("max_tool_calls", "conversation", "prompt", "moderation"), (None,)),
    "reasoning": (
        None,
        {},
        {"effort": None},
        {"effort": "none"},
        {"effort": None, "summary": None},
    ),
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
}


class ResponseTool(Strict):
    """A function that the caller would run."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of the arguments")
    strict: bool | None = Field(None, description="refuse keywords that cannot be enforced")


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """The shape of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="of a schema, for the caller's own use")
    description: str | None = None
    body: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema")
    strict: bool | None = Field(None, description="refuse keywords that cannot be enforced")

    def spec(self) -> StructuredSpec | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredSpec(StructuredKind.JSON_OBJECT, param="text.format")
        param = "text.format.schema"
        if self.body is None:
            raise RequestError(
                f"{param}: this parameter is required", param=param, code="missing_parameter"
            )
        return json_schema(self.body, param=param, lenient=not self.strict)


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="ignored")


class ResponsesRequest(Strict):
    """What to answer, and what to keep."""

    input: str | list[Item]
    model: str | None = Field(None, description="as /v1/models names it; default: the one served")
    instructions: str | None = Field(None, description="a system message, for this response only")
    previous_response_id: str | None = Field(None, description="the response to go on from")
    max_output_tokens: int | None = sampling_field("max_tokens")
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k")
    min_p: float | None = sampling_field("min_p")
    seed: int | None = sampling_field("seed")
    repetition_penalty: float | None = sampling_field("repetition_penalty")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    stop: str | list[str] | None = sampling_field("stop")
    min_tokens: int | None = sampling_field("min_tokens")
    ignore_eos: bool | None = sampling_field("ignore_eos")
    priority: int | None = Field(
        None, ge=0, le=MAX_PRIORITY, description="of those that wait, lower goes first; default 0"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        description="share computed prompts only with requests that have the same salt",
    )
    stream: bool | None = Field(None, description="send server-sent events; default false")
    background: bool | None = Field(None, description="answer at once and go on without a client")
    store: bool | None = Field(None, description="keep the response for a while; default true")
    metadata: dict[str, str] | None = Field(None, description="comes back with the response")
    text: TextOptions | None = Field(None, description="the answer's shape")
    tools: list[ResponseTool] | None = Field(None, description="functions that it may call")
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = Field(
        None, description="default auto, where there are tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="several calls; default true")

    @cached_property
    def toolset(self) -> Toolset | None:
        """The tools, parsed and checked once. Raises RequestError naming what is wrong."""
        chosen = self.tool_choice
        only = chosen.name if isinstance(chosen, NamedFunction) else None
        tools = tuple(
            Tool(each.name, each.description, each.parameters, is_strict=bool(each.strict))
            for each in self.tools or ()
        )
        mode = chosen if isinstance(chosen, str) else None
        return toolset_of(
            tools,
            mode=mode,
            only=only,
            is_parallel=self.parallel_tool_calls is not False,
            within="",
        )

    def echoed_fields(self) -> dict[str, Any]:
        """The fields of tools and text format that a response repeats."""
        shape = self.text.format if self.text else None
        choice = self.tool_choice
        return {
            "text": PLAIN_TEXT if shape is None else {"format": _as_sent(shape)},
            "tool_choice": _as_sent(choice)
            if isinstance(choice, NamedFunction)
            else choice or "auto",
            "tools": [
                {"parameters": None, "strict": None, **_as_sent(each)} for each in self.tools or ()
            ],
        }

    def _shape(self) -> StructuredSpec | None:
        calls, given = self.toolset, self.text.format if self.text else None
        specs = (given.spec() if given else None, calls.spec() if calls else None)
        return only_one([spec for spec in specs if spec is not None], "tool_choice")

    def params(self) -> SamplingParams:
        return sampling_params(
            self,
            max_tokens=self.max_output_tokens,
            stop=strings(self.stop),
            structured=self._shape(),
        )

    def options(self) -> CallOptions:
        return CallOptions(
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt or "",
            splits_reasoning=True,
        )

    def messages(self, before: tuple[Message, ...]) -> tuple[Message, ...]:
        """The conversation without the instructions, which no later response inherits."""
        if isinstance(self.input, str):
            return (*before, {"role": "user", "content": self.input})
        return (*before, *messages_of(self.input))

    def prompt(self, messages: tuple[Message, ...]) -> ChatPrompt:
        if self.instructions:
            messages = ({"role": "system", "content": self.instructions}, *messages)
        return ChatPrompt(messages, tools=self.toolset)


def parse(body: bytes, left_out: IgnoredFields | None = None) -> ResponsesRequest:
    """The request in a JSON body. Raises RequestError naming the first parameter that is wrong.

    `left_out`: is told what is ignored; None: what is unknown is refused.
    """
    left_out = IgnoredFields() if left_out is None else left_out
    values = body_values(
        json_object(body),
        ResponsesRequest.model_fields,
        UNSUPPORTED,
        IGNORED,
        left_out,
        limits={**LIMITS, "metadata": (MAX_METADATA_PAIRS, "pairs")},
        conversations=("input",),
    )
    if isinstance(items := values.get("input"), list):
        values["input"] = [known_item(f"input[{i}]", item, left_out) for i, item in enumerate(items)]
    if isinstance(tools := values.get("tools"), list):
        for i, tool in enumerate(tools):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != "function":
                raise RequestError(
                    f"tools[{i}]: this server takes tools of type 'function' only",
                    param=f"tools[{i}]",
                    code="unsupported_parameter",
                )
    request = validated(ResponsesRequest, values, left_out)
    check_metadata(request.metadata or {})
    if request.background and request.store is False:
        raise RequestError("background needs store: true", param="store")
    return request


def _as_sent(part: Strict) -> dict[str, Any]:
    return part.model_dump(by_alias=True, exclude_unset=True)


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise RequestError unless there are few pairs, and short ones."""
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


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which items of a list are wanted. `after`: the id of the last one that the client has."""

    limit: int = 20
    is_ascending: bool = False
    after: str | None = None

    def page(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Of `items`, oldest first. Raises RequestError if `after` names none of them."""
        ordered = list(items) if self.is_ascending else list(reversed(items))
        if self.after is not None:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise RequestError("after names none of these items", param="after")
            ordered = ordered[ids.index(self.after) + 1 :]
        shown = ordered[: self.limit]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(ordered) > len(shown),
        }


def list_query(query: Mapping[str, str]) -> ListQuery:
    """What the query of a list says. Raises RequestError."""
    for name, value in query.items():
        if name not in ("limit", "order", "after"):
            refuse_unless_neutral(ascii(name[:100])[1:-1], value, ())
    limit = query.get("limit", "20")
    is_number = limit.isascii() and limit.isdigit() and len(limit) < 9
    if not (is_number and 1 <= int(limit) <= MAX_LISTED):
        raise RequestError(f"limit must lie in [1, {MAX_LISTED}]", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")
    return ListQuery(int(limit), order == "asc", query.get("after"))
