"""The messages of a chat request in OpenAI's format, converted for chat templates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.deployments.ingress.http.body import Strict, refuse_unless_neutral
from penstock.deployments.ingress.http.openai.tools import CalledTool
from penstock.workers.request import RequestError

IGNORED_IN_MESSAGES = frozenset(("refusal", "annotations", "reasoning_details"))
UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("function_call", "audio"), (None,)),
}


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


def known_message(index: int, message: Any) -> Any:
    """`message` without what is ignored. Raises RequestError for what is not served."""
    if not isinstance(message, dict):
        return message
    kept = {}
    for name, value in message.items():
        if name in UNSUPPORTED_IN_MESSAGES:
            path = f"messages[{index}].{name}"
            refuse_unless_neutral(path, value, UNSUPPORTED_IN_MESSAGES[name])
        elif name not in IGNORED_IN_MESSAGES:
            kept[name] = value
    if isinstance(content := kept.get("content"), list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else "text"
            if isinstance(kind, str) and kind != "text":
                raise RequestError(
                    f"messages[{index}].content: this server takes parts of type 'text' only",
                    param=f"messages[{index}].content",
                    code="unsupported_parameter",
                )
    if isinstance(calls := kept.get("tool_calls"), list):
        # Clients send back what they were given, also with an index.
        kept["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"}
            if isinstance(call, dict)
            else call
            for call in calls
        ]
    return kept
