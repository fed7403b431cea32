"""The response template that a model's repository may ship, read by transformers.

It is a declaration in tokenizer_config.json of how answers are read. transformers is imported only
where a model is read by one. The library's expressions are those of the model's folder, which is as
trusted as its weights; what they are run on is bounded by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.workers.errors import ConfigError

CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TemplateEvent:
    """What a character added: `text` of the answer, the beginning of a region of calls
    (`opens_calls`), or its `calls`, each with type and function."""

    text: str = ""
    opens_calls: bool = False
    calls: Sequence[Mapping[str, Any]] | None = None


class ResponseTemplate:
    """A checked response template."""

    def __init__(self, source: Mapping[str, Any]):
        """Raises ConfigError."""
        from transformers.utils import chat_parsing
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._template = load_response_template(dict(source))
        except ValueError as error:
            raise ConfigError(f"response_template in tokenizer_config.json: {error}") from None
        if CALLS not in self._template.fields:
            raise ConfigError("response_template in tokenizer_config.json has no field tool_calls")
        self._parser_type = chat_parsing.ResponseParser

    def reader(self, tools: Sequence[Mapping[str, Any]]) -> TemplateReader:
        """A reader for one answer, which casts arguments by the schemas of `tools`."""
        return TemplateReader(self._parser_type(self._template, prefix="", tools=list(tools)))


class TemplateReader:
    """Reads one answer, character by character: so each event belongs to one of them."""

    def __init__(self, parser: Any):
        self._parser = parser

    def feed(self, char: str) -> list[TemplateEvent]:
        """Raises ValueError, KeyError or TypeError for a region that is not what it should be."""
        return _events(self._parser.feed(char))

    def finish(self) -> list[TemplateEvent]:
        """Raises as `feed` does."""
        _, events = self._parser.finalize()
        return _events(events)


def _events(given: Sequence[Mapping[str, Any]]) -> list[TemplateEvent]:
    found = []
    for event in given:
        kind, is_call = event["type"], event["field"] == CALLS
        if kind == "region_chunk" and not is_call:
            found.append(TemplateEvent(event["text"]))
        elif kind == "region_open" and is_call:
            found.append(TemplateEvent(opens_calls=True))
        elif kind == "region_close" and is_call:
            value = event["value"]
            found.append(TemplateEvent(calls=value if isinstance(value, list) else [value]))
    return found
