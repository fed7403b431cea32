"""The parts of OpenAI's request bodies: messages, tools, and the shape of the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from penstock.deployments.ingress.core.call import earlier_call
from penstock.deployments.ingress.core.tools import Tool, only_one
from penstock.deployments.ingress.http.body import Strict, refuse_unless_neutral
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.workers.request import RequestError
from penstock.workers.structured_spec import StructuredKind, StructuredSpec, choice, json_schema


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="send usage in a last chunk of its own")
    include_obfuscation: bool | None = Field(None, description="ignored")
    continuous_usage_stats: bool | None = Field(
        None, description="with include_usage: usage so far in every chunk, too"
    )


class NamedSchema(Strict):
    name: str = Field(description="for the caller's own use")
    description: str | None = None
    body: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema")
    strict: bool | None = Field(None, description="refuse keywords that cannot be enforced")


class ResponseFormat(Strict):
    """The shape of the answer, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    body: dict[str, Any] | None = Field(
        None, alias="schema", description="a JSON schema, where llama.cpp has it"
    )

    def spec(self) -> StructuredSpec | None:
        if self.type == "text":
            return None
        given = self.json_schema
        if given is None and self.body is not None:
            return json_schema(self.body, param="response_format.schema", lenient=True)
        if self.type == "json_object" or (given is not None and given.body is None):
            return StructuredSpec(StructuredKind.JSON_OBJECT, param="response_format")
        if given is None:
            raise RequestError(
                "response_format.json_schema: this parameter is required",
                param="response_format.json_schema",
                code="missing_parameter",
            )
        param = "response_format.json_schema.schema"
        return json_schema(given.body, param=param, lenient=not given.strict)


class StructuredOutputs(Strict):
    """The shape of the answer; one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = Field(None, description="any JSON object")
    regex: str | None = Field(None, description="of the whole answer")
    choice: list[str] | None = Field(None, description="the answer is one of these")
    grammar: str | None = Field(None, description="Lark, or GBNF (with ::=)")

    def spec(self) -> StructuredSpec | None:
        given: list[StructuredSpec] = []
        if self.json_ is not None:
            given.append(json_schema(self.json_, param="structured_outputs.json"))
        if self.json_object:
            param = "structured_outputs.json_object"
            given.append(StructuredSpec(StructuredKind.JSON_OBJECT, param=param))
        if self.regex is not None:
            param = "structured_outputs.regex"
            given.append(StructuredSpec(StructuredKind.REGEX, self.regex, param=param))
        if self.choice is not None:
            given.append(choice(self.choice, param="structured_outputs.choice"))
        if self.grammar is not None:
            param = "structured_outputs.grammar"
            given.append(StructuredSpec(StructuredKind.GRAMMAR, self.grammar, param=param))
        return only_one(given, "structured_outputs")


class FunctionBody(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of the arguments")
    strict: bool | None = Field(None, description="refuse keywords that cannot be enforced")


class ToolBody(Strict):
    type: Literal["function"]
    function: FunctionBody

    def tool(self) -> Tool:
        given = self.function
        return Tool(given.name, given.description, given.parameters, is_strict=bool(given.strict))


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    name: str
    arguments: str = Field(description="JSON")


class CalledTool(Strict):
    """A call that an earlier answer made, sent back as part of the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self, where: str) -> dict[str, Any]:
        """As templates expect it: the arguments are data, not text."""
        called = self.function
        return earlier_call(self.id, called.name, called.arguments, f"{where}.function.arguments")


class ShapeFields(Strict):
    """Fields of a request that say what shape its answer must have."""

    response_format: ResponseFormat | None = Field(None, description="text, unless it says more")
    structured_outputs: StructuredOutputs | None = Field(None, description="the answer's shape")
    guided_json: dict[str, Any] | str | None = Field(None, description="older name of the same")
    guided_regex: str | None = Field(None, description="older name of the same")
    guided_choice: list[str] | None = Field(None, description="older name of the same")
    guided_grammar: str | None = Field(None, description="older name of the same")
    json_schema: dict[str, Any] | str | None = Field(
        None, description="llama.cpp's and SGLang's name of guided_json"
    )
    regex: str | None = Field(None, description="SGLang's name of guided_regex")
    ebnf: str | None = Field(None, description="SGLang's name of guided_grammar")
    grammar: str | None = Field(None, description="llama.cpp's name of guided_grammar")

    def shape(self) -> StructuredSpec | None:
        """Raises RequestError if they say several."""
        given = [each.spec() for each in (self.response_format, self.structured_outputs) if each]
        for name, ours in _NAMES_OF_SHAPES.items():
            if (value := getattr(self, name)) is None:
                continue
            spec = StructuredOutputs.model_validate({ours: value}).spec()
            given.append(None if spec is None else replace(spec, param=name))
        return only_one([spec for spec in given if spec is not None], "response_format")


# Fields of a request, and the fields of StructuredOutputs that they stand for.
_NAMES_OF_SHAPES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
ToolChoice = Literal["none", "auto", "required"] | NamedTool


IGNORED_IN_MESSAGES = frozenset(("refusal", "annotations", "reasoning_details"))


UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {"function_call": (None,)}
# Of vLLM's structured_outputs: without it the answer would have no shape.
UNSUPPORTED_SHAPES: dict[str, tuple[Any, ...]] = {"structural_tag": (None, "")}


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: str = Field(description="system, developer, user, assistant or tool")
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="of an assistant's message")
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    tool_calls: list[CalledTool] | None = Field(None, description="of an assistant's message")
    tool_call_id: str | None = Field(None, description="of a tool's message")

    def plain(self, where: str) -> dict[str, Any]:
        """As templates take it. Raises RequestError, naming the field by `where` it is."""
        parts = self.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
        for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) and self.role != role:
                raise RequestError(
                    f"{where}.{field} is for role {role!r}", param=f"{where}.{field}"
                )
        reasoning = self.reasoning_content or self.reasoning
        rest: dict[str, Any] = {"name": self.name, "reasoning_content": reasoning}
        rest["tool_call_id"] = self.tool_call_id
        rest["tool_calls"] = [
            call.plain(f"{where}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls or ())
        ]
        return {"role": self.role, "content": text} | {k: v for k, v in rest.items() if v}


def check_shapes(given: Any) -> None:
    """Raise RequestError for a shape in `structured_outputs` that is not served."""
    for name in UNSUPPORTED_SHAPES.keys() & (given.keys() if isinstance(given, dict) else ()):
        refuse_unless_neutral(f"structured_outputs.{name}", given[name], UNSUPPORTED_SHAPES[name])


def known_messages(messages: Any, left_out: IgnoredFields | None = None) -> Any:
    """`messages` without what is ignored. Raises RequestError for what is not served.

    `left_out`: called with the ignored fields; None: nothing is called.
    """
    if not isinstance(messages, list):
        return messages
    left_out = IgnoredFields() if left_out is None else left_out
    return [_known_message(index, message, left_out) for index, message in enumerate(messages)]


def _known_message(index: int, message: Any, left_out: IgnoredFields) -> Any:
    if not isinstance(message, dict):
        return message
    kept = {}
    is_own = message.get("role") == "assistant"  # an earlier answer, from whatever server
    for name, value in message.items():
        path = f"messages[{index}].{name}"
        if name in UNSUPPORTED_IN_MESSAGES:
            refuse_unless_neutral(path, value, UNSUPPORTED_IN_MESSAGES[name])
        elif name in IGNORED_IN_MESSAGES or (is_own and name not in ChatMessage.model_fields):
            left_out.add(path, value)
        else:
            kept[name] = value
    if isinstance(content := kept.get("content"), list):
        kept["content"] = [_known_part(index, part) for part in content]
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [_known_call(index, call, left_out) for call in calls]
    return kept


def _known_part(index: int, part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else "text"
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if isinstance(kind, str) and kind != "text":
        raise RequestError(
            f"messages[{index}].content: this server takes parts of type 'text' only",
            param=f"messages[{index}].content",
            code="unsupported_parameter",
        )
    return part


def _known_call(index: int, call: Any, left_out: IgnoredFields) -> Any:
    """Clients send back what they were given, also with an index, and what they noted on it."""
    if not isinstance(call, dict):
        return call
    kept = {}
    for name, value in call.items():
        if name in CalledTool.model_fields:
            kept[name] = value
        elif name != "index":
            left_out.add(f"messages[{index}].tool_calls.{name}", value)
    return kept
