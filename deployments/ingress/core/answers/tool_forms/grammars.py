"""The grammars of answers that must call a tool, in the form that the model has learnt.

A form whose values are bare text has none: there the call is asked for in the form of Hermes, whose
JSON a schema can enforce.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from penstock.deployments.ingress.core.answers.reasoning import grammar_item
from penstock.deployments.ingress.core.answers.tool_forms.json_forms import (
    ARGS,
    FUNCTOOLS,
    PHI_OPEN,
    TOOL_CALLS,
)
from penstock.deployments.ingress.core.tools import OPEN, Toolset, call_grammar
from penstock.workers.structured_spec import StructuredSpec
from penstock.workers.text.harmony import CHANNEL, CONSTRAIN, MESSAGE
from penstock.workers.text.tokenizer import Tokenizer

Grammar = Callable[[Toolset, Tokenizer], StructuredSpec | None]


def llama3(toolset: Toolset, _: Tokenizer) -> StructuredSpec:
    """Objects with `; ` between."""
    return call_grammar(
        toolset,
        "call",
        '"; " call',
        lambda tool: [json.dumps(f'{{"name": "{tool.name}", "parameters": '), None, '"}"'],
    )


def mistral(toolset: Toolset, tokenizer: Tokenizer) -> StructuredSpec:
    """A list after one mark, or name and arguments after a mark each: as the template has it."""
    mark = grammar_item(TOOL_CALLS, tokenizer)
    if ARGS not in (tokenizer.chat_template or ""):
        return _list_after(mark, toolset)
    args = grammar_item(ARGS, tokenizer)
    return call_grammar(
        toolset,
        f"{mark} call",
        f"{mark} call",
        lambda tool: [json.dumps(tool.name), args, None],
    )


def phi4(toolset: Toolset, _: Tokenizer) -> StructuredSpec:
    """`functools[{…}]`."""
    return _list_after(json.dumps(FUNCTOOLS.removesuffix("[")), toolset)


def granite(toolset: Toolset, tokenizer: Tokenizer) -> StructuredSpec:
    """A list after the mark that the template has."""
    mark = PHI_OPEN if PHI_OPEN in (tokenizer.chat_template or "") else OPEN
    return _list_after(grammar_item(mark, tokenizer), toolset)


def harmony(toolset: Toolset, tokenizer: Tokenizer) -> StructuredSpec:
    """One message to a function: after it, the answer ends."""
    channel, constrain, message = (
        grammar_item(text, tokenizer) for text in (CHANNEL, CONSTRAIN, MESSAGE)
    )
    head = f'{channel} "commentary to=functions.'
    return call_grammar(
        toolset,
        "call",
        None,
        lambda tool: [f'{head}{tool.name} " {constrain} "json" {message}', None],
    )


def _list_after(mark: str, toolset: Toolset) -> StructuredSpec:
    return call_grammar(
        toolset,
        f'{mark} "[" call',
        '", " call',
        lambda tool: [json.dumps(f'{{"name": "{tool.name}", "arguments": '), None, '"}"'],
        '"]"',
    )
