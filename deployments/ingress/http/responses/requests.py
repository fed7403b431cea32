"""OpenAI's Responses API: its requests as prompts.

It makes no decision that the request core makes for all front ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from penstock.deployments.ingress.core.call import MAX_PRIORITY, CallOptions, ChatPrompt
from penstock.deployments.ingress.core.tools import Toolset, only_one, toolset_of
from penstock.deployments.ingress.http.body import (
    Strict,
    body_values,
    json_object,
    sampling_field,
    sampling_params,
    strings,
    validated,
)
from penstock.deployments.ingress.http.body_limits import LIMITS
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.deployments.ingress.http.responses.items import (
    Item,
    Message,
    known_items,
    messages_of,
)
from penstock.deployments.ingress.http.responses.tools import (
    FunctionTool,
    Origin,
    ResponseTool,
    functions_of,
    known_tools,
)
from penstock.deployments.ingress.http.template_fields import Effort, EffortLevel
from penstock.workers.request import RequestError, SamplingParams
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.structured_spec import StructuredKind, StructuredSpec, json_schema

MAX_INCLUDED = 32
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

IGNORED = frozenset(
    (
        *("user", "service_tier", "safety_identifier", "stream_options", "client_metadata"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    )
)
PLAIN_TEXT = {"format": {"type": "text"}}
# Known to clients but not served: without them the answer would be another one.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("conversation", "prompt", "moderation"), (None,)),
    "top_logprobs": (None, 0),
}
# Known to clients, and hints: the setting unknown_fields decides on them.
HINTS: dict[str, tuple[Any, ...]] = {
    "context_management": (None, []),
    **dict.fromkeys(("max_tool_calls", "access_programs", "image"), (None,)),
    "truncation": (None, "disabled"),
}


class ReasoningOptions(Strict):
    """How to reason."""

    effort: EffortLevel | None = Field(
        None, description="how much, where the model's chat template can be told"
    )
    summary: str | None = Field(None, description="ignored")
    generate_summary: str | None = Field(None, description="ignored")


class NamedFunction(Strict):
    type: Literal["function", "custom"]
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
    model: str | None = Field(None, description="as /v1/models names it; default: the first one")
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
    reasoning: ReasoningOptions | None = Field(None, description="how to reason")
    include: list[str] | None = Field(None, description="ignored: reasoning comes as text")

    @cached_property
    def toolset(self) -> Toolset | None:
        """The tools, parsed and checked once. Raises RequestError naming what is wrong."""
        chosen = self.tool_choice
        only = chosen.name if isinstance(chosen, NamedFunction) else None
        tools, _ = functions_of(self.tools or ())
        mode = chosen if isinstance(chosen, str) else None
        return toolset_of(
            tools,
            mode=mode,
            only=only,
            is_parallel=self.parallel_tool_calls is not False,
            within="",
        )

    @cached_property
    def origins(self) -> dict[str, Origin]:
        """What the functions of `toolset` stand for, by name."""
        return functions_of(self.tools or ())[1]

    @property
    def effort(self) -> Effort | None:
        """How much to reason; None: the request does not say."""
        level = self.reasoning.effort if self.reasoning else None
        return None if level is None else Effort(level, "reasoning.effort")

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
                {"parameters": None, "strict": None, **_as_sent(each)}
                if isinstance(each, FunctionTool)
                else _as_sent(each)
                for each in self.tools or ()
            ],
        }

    def _shape(self) -> StructuredSpec | None:
        calls, given = self.toolset, self.text.format if self.text else None
        specs = (given.spec() if given else None, calls.spec() if calls else None)
        return only_one([spec for spec in specs if spec is not None], "tool_choice")

    def params(self, defaults: SamplingDefaults) -> SamplingParams:
        return sampling_params(
            self,
            defaults,
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
        """The conversation without the instructions, which no later response inherits.

        Raises RequestError for items that cannot go on from `before`.
        """
        if isinstance(self.input, str):
            return (*before, {"role": "user", "content": self.input})
        return (*before, *messages_of(self.input, before))

    def prompt(self, messages: tuple[Message, ...]) -> ChatPrompt:
        if self.instructions:
            messages = ({"role": "system", "content": self.instructions}, *messages)
        return ChatPrompt(messages, tools=self.toolset)


def parse(body: bytes, left_out: IgnoredFields | None = None) -> ResponsesRequest:
    """The request in a JSON body. Raises RequestError naming the first parameter that is wrong.

    `left_out`: called with the ignored fields; None: unknown fields are refused.
    """
    left_out = IgnoredFields() if left_out is None else left_out
    values = body_values(
        json_object(body),
        ResponsesRequest.model_fields,
        UNSUPPORTED,
        IGNORED,
        left_out,
        hints=HINTS,
        limits={
            **LIMITS,
            "metadata": (MAX_METADATA_PAIRS, "pairs"),
            "include": (MAX_INCLUDED, "values"),
        },
        conversations=("input",),
    )
    if isinstance(items := values.get("input"), list):
        values["input"] = known_items(items, left_out)
    if isinstance(tools := values.get("tools"), list):
        values["tools"] = known_tools(tools, left_out)
    request = validated(ResponsesRequest, values, left_out)
    if (reasoning := request.reasoning) is not None:
        left_out.add("reasoning.summary", reasoning.summary)
        left_out.add("reasoning.generate_summary", reasoning.generate_summary)
    for each in request.include or ():
        message = f"include: {each[:100]!a} is not served; leave it out"
        left_out.drop(f"include.{each}", message, param="include")
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
