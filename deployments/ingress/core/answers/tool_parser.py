"""Takes the tool calls out of an answer while it streams, with a parser of the model's form."""

from __future__ import annotations

import logging

import pydantic_core

from penstock.deployments.ingress.core.answers.tool_forms.form_parser import ToolParser
from penstock.deployments.ingress.core.call import TextDelta
from penstock.workers.request import FinishReason

log = logging.getLogger("penstock.ingress")


class ToolCallReader:
    """Takes the calls out of the pieces of one answer.

    `answer_id`: names the answer in the log. Unless `is_parallel` only the first call counts.
    """

    def __init__(self, parser: ToolParser, answer_id: str, *, is_parallel: bool):
        self._parser, self._answer_id = parser, answer_id
        self._is_parallel = is_parallel
        self._last_call = -1  # its index
        self._arguments: list[str] = []  # of the last call, as they came
        self._blank: str | None = ""  # white space that all text so far is; None: it is more

    def read(self, piece: TextDelta) -> TextDelta:
        """`piece`, in which calls have become `tool_calls`. Without parallel ones: the first."""
        text, calls = self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            last_text, last_calls = self._parser.finish()
            text, calls = text + last_text, calls + last_calls
            self._log_unread()
        if not self._is_parallel:
            calls = [call for call in calls if call.index == 0]
        for call in calls:
            if call.index != self._last_call:
                self._last_call, self._arguments = call.index, []
            self._arguments.append(call.arguments)
        piece.text, piece.tool_calls = self._unless_blank(text, piece.finish_reason), calls
        piece.ends_in_tool_calls = (
            self._has_calls
            and piece.finish_reason is FinishReason.STOP
            and not (piece.stop_reason is not None and self._is_cut())
        )
        return piece

    @property
    def _has_calls(self) -> bool:
        return self._last_call >= 0

    def _is_cut(self) -> bool:
        """Whether a stop string or token has ended the answer within the last call's arguments:
        who reads "tool_calls" makes the calls."""
        try:
            pydantic_core.from_json("".join(self._arguments))
        except ValueError:
            return True
        return False

    def _unless_blank(self, text: str, finish: FinishReason | None) -> str:
        """`text`; white space waits until more follows, and goes if that is calls only."""
        if self._blank is None:
            return text
        self._blank += text
        if not self._blank.isspace() or (finish is not None and not self._has_calls):
            text, self._blank = self._blank, None if self._blank else ""
            return text
        return ""

    def _log_unread(self) -> None:
        """Say how many calls came back as text: the client sees text, and no error."""
        if self._parser.num_unread:
            log.warning(
                "request %s: %d blocks of the answer look like tool calls and could not be read, "
                "or name tools that were not offered; the client gets them as text",
                self._answer_id,
                self._parser.num_unread,
            )
