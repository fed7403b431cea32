"""OpenAI's request fields for structured output and tools, as StructuredSpecs and Toolsets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pydantic_core
from pydantic import Field

from penstock.deployments.ingress.core.tools import Tool, Toolset, only_one, toolset_of
from penstock.deployments.ingress.http.body import Strict
from penstock.workers.request import RequestError
from penstock.workers.structured_spec import StructuredKind, StructuredSpec, choice, json_schema


class NamedSchema(Strict):
    name: str = Field(description="for the caller's own use")
    description: str | None = None
    body: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema")
    strict: bool | None = Field(None, description="refuse keywords that cannot be enforced")


class ResponseFormat(Strict):
    """The shape of the answer, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def spec(self) -> StructuredSpec | None:
        if self.type == "text":
            return None
        given = self.json_schema
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
        try:
            arguments = pydantic_core.from_json(self.function.arguments or "{}")
        except ValueError:
            raise RequestError(
                f"{where}.function.arguments is not valid JSON",
                param=f"{where}.function.arguments",
            ) from None
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ShapeFields(Strict):
    """Fields of a request that say what shape its answer must have."""

    response_format: ResponseFormat | None = Field(None, description="text, unless it says more")
    structured_outputs: StructuredOutputs | None = Field(None, description="the answer's shape")
    guided_json: dict[str, Any] | str | None = Field(None, description="older name of the same")
    guided_regex: str | None = Field(None, description="older name of the same")
    guided_choice: list[str] | None = Field(None, description="older name of the same")
    guided_grammar: str | None = Field(None, description="older name of the same")

    def shape(self) -> StructuredSpec | None:
        """Raises RequestError if they say several."""
        older = StructuredOutputs(
            json=self.guided_json,
            json_object=None,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        ).spec()
        if older is not None:
            older = replace(older, param=older.param.replace("structured_outputs.", "guided_"))
        given = (each.spec() for each in (self.response_format, self.structured_outputs) if each)
        specs = [spec for spec in (*given, older) if spec is not None]
        return only_one(specs, "response_format")


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def toolset(
    tools: list[ToolBody] | None, tool_choice: ToolChoice | None, parallel: bool | None
) -> Toolset | None:
    """The tools that the model may call; None: it gets none. Raises RequestError."""
    given = tuple(
        Tool(
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            is_strict=bool(tool.function.strict),
        )
        for tool in tools or ()
    )
    return toolset_of(
        given,
        mode=tool_choice if isinstance(tool_choice, str) else None,
        only=tool_choice.function.name if isinstance(tool_choice, NamedTool) else None,
        is_parallel=parallel is not False,
    )
