"""The forms in which models write tool calls: their names, and which one a chat template shows.

deployments/ingress/core/answers/tool_forms reads them. The marks are texts of published templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from penstock.workers.errors import ConfigError

AUTO = "auto"
PLAIN = "plain"  # the tools are described in the system message, in the form of Hermes
TEMPLATE = "response_template"  # of the model's repository, which transformers reads

# By our name: the other names that vLLM's --tool-call-parser has for the same text.
FORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hermes": (),
        "llama3_json": ("llama4_json",),
        "mistral": (),
        "qwen3_coder": ("qwen3_xml",),
        "seed_oss": (),
        "minimax_m2": (),
        "glm45": ("glm47",),
        "phi4": ("phi4_mini_json",),
        "granite": (),
        "functiongemma": (),
        "gemma4": (),
        "harmony": ("openai",),
        TEMPLATE: (),
    }
)
_CANONICAL = {
    **{name: name for name in (AUTO, PLAIN, *FORMS)},
    **{other: name for name, others in FORMS.items() for other in others},
}
_LLAMA = re.compile(r'\{"name": .{0,400}?"parameters": ', re.DOTALL)


def form_named(setting: str) -> str:
    """Our name for what the setting `tool_call_parser` says. Raises ConfigError with all names."""
    name = _CANONICAL.get(setting)
    if name is None:
        raise ConfigError(
            f"tool_call_parser must be one of {', '.join(_CANONICAL)}; got {setting!r}"
        )
    return name


def form_in(template: str) -> str | None:
    """The form that a chat template writes calls in, or asks for them in; None: none known here.

    A mark that is part of another one's text is looked for after that.
    """
    source = template.replace('\\"', '"')

    def has(*marks: str) -> bool:
        return all(mark in source for mark in marks)

    known = {
        "mistral": has("[TOOL_CALLS]"),
        "seed_oss": has("<seed:tool_call>"),
        "qwen3_coder": has("<function=", "<parameter="),
        "glm45": has("<arg_key>"),
        "minimax_m2": has("<minimax:tool_call>"),
        "harmony": has("<|channel|>", "<|message|>"),
        "gemma4": has("<|tool_call>"),
        "functiongemma": has("<start_function_call>"),
        "phi4": has("functools") or has("<|tool_call|>", "<|/tool_call|>"),
        # Granite 4 closes its blocks, in the form of Hermes.
        "granite": has("<|tool_call|>")
        or (has("<|start_of_role|>", "<tool_call>") and not has("</tool_call>")),
        "hermes": has("<tool_call>"),
        "llama3_json": has("<|python_tag|>") or _LLAMA.search(source) is not None,
    }
    return next((name for name, is_it in known.items() if is_it), None)
