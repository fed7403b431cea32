"""Anthropic's Messages API: its requests as Calls.

It makes no decision that the request core makes for all front ends.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import Field

from penstock.deployments.ingress.core.call import CallOptions, ChatPrompt
from penstock.deployments.ingress.core.tools import Tool, Toolset, only_one, toolset_of
from penstock.deployments.ingress.http.anthropic.blocks import (
    TextBlock,
    Turn,
    known_blocks,
    known_turn,
    messages_of,
    text_of,
    without_system_turns,
)
from penstock.deployments.ingress.http.body import (
    Strict,
    body_values,
    json_object,
    sampling_field,
    sampling_params,
    validated,
    validated_at,
)
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.deployments.ingress.http.template_fields import Effort
from penstock.workers.request import PARAMETERS, RequestError, SamplingParams
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.structured_spec import StructuredSpec, json_schema

IGNORED = frozenset(
    (
        *("metadata", "service_tier", "inference_geo", "cache_control", "betas"),
        *("user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token"),
    )
)
# Known to clients but not served: without them the answer would be another one.
UNSUPPORTED: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("container", "fallbacks", "thread", "compaction"), (None,)
)
# Known to clients, and hints: the setting unknown_fields decides on them.
HINTS: dict[str, tuple[Any, ...]] = {
    "mcp_servers": (None, []),
    **dict.fromkeys(("context_management", "diagnostics", "safeguards"), (None,)),
    "speed": (None, "standard"),
}
MAX_EDITS = 32  # of context_management
_IGNORED_IN_TOOLS = frozenset(
    ("cache_control", "eager_input_streaming", "defer_loading", "input_examples", "allowed_callers")
)


class MessagesTool(Strict):
    """A function that the caller would run."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="a JSON schema of the arguments")
    strict: bool | None = Field(None, description="refuse keywords that cannot be enforced")


class ToolChoice(Strict):
    """Whether tools are to be called: `any` of them, or the `tool` of that name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="one call at most")


class OutputFormat(Strict):
    type: Literal["json_schema"]
    body: dict[str, Any] = Field(alias="schema", description="a JSON schema of the answer")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="how much to reason, where the model's chat template can be told"
    )


class Thinking(Strict):
    """Whether to reason before the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, description="ignored")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: leave the reasoning out of the answer"
    )


class CountTokensRequest(Strict):
    """A conversation whose tokens are to be counted."""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = Field(None, description="functions that the model may call")
    tool_choice: ToolChoice | None = Field(None, description="default auto, where there are tools")
    output_config: OutputConfig | None = Field(None, description="the answer's shape")
    output_format: OutputFormat | None = Field(None, description="older name of the same")
    thinking: Thinking | None = Field(None, description="default: as the model does by itself")

    @cached_property
    def toolset(self) -> Toolset | None:
        """The tools, parsed and checked once. Raises RequestError naming what is wrong."""
        chosen = self.tool_choice or ToolChoice(type="auto", disable_parallel_tool_use=None)
        if (chosen.name is not None) != (chosen.type == "tool"):
            raise RequestError(
                "tool_choice.name is for type 'tool', which needs it", param="tool_choice.name"
            )
        tools = tuple(
            Tool(each.name, each.description, each.input_schema, is_strict=bool(each.strict))
            for each in self.tools or ()
        )
        return toolset_of(
            tools,
            mode={"any": "required", "tool": None}.get(chosen.type, chosen.type),
            only=chosen.name,
            is_parallel=not chosen.disable_parallel_tool_use,
            within="",
            schema="input_schema",
        )

    def options(self) -> CallOptions:
        return CallOptions(model=self.model, splits_reasoning=True)

    @property
    def effort(self) -> Effort | None:
        """How much to reason; None: the request does not say."""
        level = self.output_config.effort if self.output_config else None
        kind = self.thinking.type if self.thinking else "adaptive"
        if kind == "disabled":
            return Effort("none", "thinking")
        if kind == "adaptive":
            return None if level is None else Effort(level, "output_config.effort", is_hint=True)
        return Effort(level, "thinking")

    @property
    def hides_thinking(self) -> bool:
        """Whether the reasoning is no part of the answer."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def prompt(self) -> ChatPrompt:
        first, turns = without_system_turns(self.messages)
        messages = messages_of(turns)
        ends_with_answer = bool(messages) and messages[-1]["role"] == "assistant"
        continues = ends_with_answer and "tool_calls" not in messages[-1]
        if system := "\n\n".join([*([text_of(self.system)] if self.system else []), *first]):
            messages.insert(0, {"role": "system", "content": system})
        return ChatPrompt(
            tuple(messages),
            add_generation_prompt=not ends_with_answer,
            continues_last=continues,
            tools=self.toolset,
        )


class MessagesRequest(CountTokensRequest):
    """A conversation to answer."""

    max_tokens: int = Field(description=PARAMETERS["max_tokens"].description)
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k")
    stop_sequences: list[str] | None = sampling_field("stop")
    stream: bool | None = Field(None, description="send server-sent events; default false")

    def prompt(self) -> ChatPrompt:
        """Raises RequestError for a call at the end, which has no answer yet to go on with."""
        prompt = super().prompt()
        if not (prompt.add_generation_prompt or prompt.continues_last):
            raise RequestError(
                "messages: the last message calls a tool; its result must follow",
                param="messages",
                code="unsupported_parameter",
            )
        return prompt

    def params(self, defaults: SamplingDefaults) -> SamplingParams:
        return sampling_params(
            self, defaults, stop=tuple(self.stop_sequences or ()), structured=self._shape()
        )

    def _shape(self) -> StructuredSpec | None:
        newer = self.output_config.format if self.output_config else None
        formats = (("output_config.format", newer), ("output_format", self.output_format))
        specs = [
            json_schema(each.body, param=f"{where}.schema", lenient=True)
            for where, each in formats
            if each is not None
        ]
        calls = self.toolset
        forced = calls.spec() if calls else None
        return only_one([*specs, *([forced] if forced else [])], "tool_choice")


RequestT = TypeVar("RequestT", bound=CountTokensRequest)


def parse(kind: type[RequestT], body: bytes, left_out: IgnoredFields | None = None) -> RequestT:
    """The request in a JSON body. Raises RequestError naming the first parameter that is wrong.

    `left_out`: called with the ignored fields; None: unknown fields are refused.
    """
    left_out = IgnoredFields() if left_out is None else left_out
    values = json_object(body)
    _refuse_compaction(values.get("context_management"))
    values = body_values(
        values,
        kind.model_fields,
        UNSUPPORTED,
        IGNORED,
        left_out,
        hints=HINTS,
        conversations=("system", "messages"),
    )
    if isinstance(system := values.get("system"), list):
        values["system"] = known_blocks(system, "system", "system", left_out)
    if isinstance(messages := values.get("messages"), list):
        values["messages"] = [known_turn(i, turn, left_out) for i, turn in enumerate(messages)]
    if isinstance(tools := values.get("tools"), list):
        values["tools"] = [
            _known_tool(f"tools[{i}]", tool, left_out)
            for i, tool in enumerate(tools)
            if not _is_left_out(f"tools[{i}]", tool, left_out)
        ]
    request = validated(kind, values, left_out)
    if request.thinking is not None:
        left_out.add("thinking.budget_tokens", request.thinking.budget_tokens)
    return request


def _refuse_compaction(context_management: Any) -> None:
    """Other edits take from the conversation what this server does not keep for long, or what only
    costs; a summary of it is a part of the answer. Raises RequestError."""
    edits = context_management.get("edits") if isinstance(context_management, dict) else None
    if isinstance(edits, list) and len(edits) > MAX_EDITS:
        raise RequestError(
            f"context_management.edits takes at most {MAX_EDITS} edits", param="context_management"
        )
    for edit in edits if isinstance(edits, list) else ():
        kind = edit.get("type") if isinstance(edit, dict) else None
        if isinstance(kind, str) and kind.startswith("compact"):
            raise RequestError(
                "context_management: this server does not summarise conversations; leave the "
                "edit out",
                param="context_management",
                code="unsupported_parameter",
            )


def _is_left_out(path: str, tool: Any, left_out: IgnoredFields) -> bool:
    """Whether a tool is one that a server runs, or whose schema only theirs knows.

    Raises RequestError where `left_out` does not allow that.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "custom":
        return False
    message = f"{path}: this server takes tools of type 'custom' only"
    left_out.drop(f"tools.{kind}", message, param=path)
    return True


def _known_tool(path: str, tool: Any, left_out: IgnoredFields) -> Any:
    if not isinstance(tool, dict):
        return tool
    kept = {name: value for name, value in tool.items() if name not in _IGNORED_IN_TOOLS}
    return validated_at(path, MessagesTool, kept, left_out)
