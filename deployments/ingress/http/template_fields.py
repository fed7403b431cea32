"""How much a model shall reason, as bodies say it, in the variables of its chat template.

Templates differ in what they read: `enable_thinking` (Qwen3, GLM, SmolLM3), `thinking` (DeepSeek,
Granite), `reasoning_effort` (gpt-oss). A template that reads none of them cannot be told.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from penstock.deployments.ingress.core.call import ChatPrompt
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields

EffortLevel = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_SWITCHES = ("enable_thinking", "thinking")
_LEVEL = "reasoning_effort"
# Templates were trained with three levels: others are the nearest of these.
_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class Effort:
    """What a request asks for. `level` None: to reason, as much as the model does by itself.

    `param`: the field of the body that says so. `is_hint`: no request is refused for it.
    """

    level: EffortLevel | None
    param: str
    is_hint: bool = False

    def variables(self, known: Collection[str]) -> dict[str, bool | str]:
        """For a template that reads `known`; empty, where it reads none of these."""
        found: dict[str, bool | str] = {
            name: self.level != "none" for name in _SWITCHES if name in known
        }
        if _LEVEL in known and self.level is not None and not (self.level == "none" and found):
            found[_LEVEL] = _NEAREST.get(self.level, self.level)
        return found


def fitted(
    prompt: ChatPrompt, effort: Effort | None, known: Collection[str], left_out: IgnoredFields
) -> ChatPrompt:
    """`prompt` for a template that reads the variables `known`.

    What the client says of a variable itself goes before `effort`. Raises RequestError where
    neither can be told to the template, and `left_out` does not ignore that.
    """
    given = {}
    for name, value in prompt.variables.items():
        if name in known or not left_out.ignores_unknown:  # the core refuses it by name
            given[name] = value
        else:
            left_out.add(f"chat_template_kwargs.{name}", True if value is False else value)
    ours = {} if effort is None else effort.variables(known)
    if effort is not None and not ours:
        if effort.is_hint or effort.level == "none":
            left_out.add(effort.param)
        else:
            left_out.drop(
                effort.param,
                f"{effort.param}: the chat template of this model has no variable for it; leave "
                "it out",
            )
    return replace(prompt, variables={**ours, **given})
