"""One item of a response's output as it grows. draft.py puts the response together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.deployments.ingress.http.responses.tools import Origin

Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
NO_TOOL = Origin("")


@dataclass(slots=True)
class Output:
    """One item of the output as it grows. `call`: call_id and name, of a call. `origin`: the tool
    that is called."""

    kind: Kind
    item_id: str
    index: int
    call: dict[str, str] = field(default_factory=dict)
    origin: Origin = NO_TOOL
    texts: list[str] = field(default_factory=list)
    is_open: bool = True

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_call(self) -> bool:
        return self.kind in ("function_call", "custom_tool_call")

    def part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def body(self, status: str, *, is_new: bool = False) -> dict[str, Any]:
        """`is_new`: as it is announced, before it has content."""
        body: dict[str, Any] = {"id": self.item_id, "type": self.kind, "status": status}
        if self.is_call:
            return {**body, **self.origin.call(self.call["call_id"], "" if is_new else self.text)}
        body["content"] = [] if is_new else [self.part(self.text)]
        if self.kind == "reasoning":
            return {**body, "summary": [], "encrypted_content": None}
        return {**body, "role": "assistant"}
