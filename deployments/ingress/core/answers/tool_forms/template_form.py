"""Calls as a model's own response template describes them, which transformers reads.

For models whose form has no parser here. Arguments come when a call is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from penstock.deployments.ingress.core.answers.tool_forms.form_parser import (
    MAX_BLOCK_CHARS,
    FormParser,
    Reading,
)
from penstock.workers.text.response_template import TemplateEvent, TemplateReader


class TemplateParser(FormParser):
    """One answer. `reader`: makes a reader of an answer, or of the rest of it."""

    def __init__(
        self, reader: Callable[[], TemplateReader], names: Collection[str], answer_id: str
    ):
        super().__init__(names, answer_id)
        self._new_reader, self._reader = reader, reader()
        self._is_in_calls = False

    def _read(self) -> Reading[None]:
        while True:
            while self._pos < len(self._held):
                char = self._held[self._pos]
                self._pos += 1
                self._take(lambda char=char: self._reader.feed(char))  # type: ignore[misc]
                if self._is_in_calls and self._pos > MAX_BLOCK_CHARS:
                    self._give_up()
            if self._is_end:
                self._take(self._reader.finish)
                self._pos = len(self._held)
                self._say(self._held)
                self._drop()
                return
            yield

    def _take(self, read: Callable[[], list[TemplateEvent]]) -> None:
        """The events of one character. What they decide of what is held is no longer held."""
        try:
            events = read()
        except (ValueError, KeyError, TypeError):
            self._give_up()
            return
        for event in events:
            if event.calls is not None:
                self._is_in_calls = False
                self._take_calls([_named(each) for each in event.calls])
            elif event.opens_calls:
                self._is_in_calls = True
            else:
                # Marks before the text belong to the region that it is of.
                end = self._held.index(event.text, 0, self._pos) + len(event.text)
                num_read, self._pos = self._pos, end
                self._say(event.text)
                self._drop()
                self._pos = num_read - end

    def _take_calls(self, calls: list[tuple[str, str] | None]) -> None:
        """Calls that what has been read is, or text, if any of them is not to a tool offered."""
        known = [call for call in calls if call is not None and call[0] in self._names]
        if len(known) < len(calls) or not calls:
            self._unread()
            return
        for call in known:
            self._begin(*call)

    def _give_up(self) -> None:
        """What has been read since the last text is text, too; then all begins anew."""
        self._unread()
        self._reader, self._is_in_calls = self._new_reader(), False


def _named(call: Mapping[str, Any]) -> tuple[str, str] | None:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        return function["name"], arguments
    return function["name"], json.dumps(arguments, ensure_ascii=False)
