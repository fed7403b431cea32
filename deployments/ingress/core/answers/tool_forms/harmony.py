"""Tool calls in harmony, the form of gpt-oss: messages with a recipient.

workers/text/harmony.py takes the messages of an answer apart; those with a recipient come here with
their headers.
"""

from __future__ import annotations

import re

from penstock.deployments.ingress.core.answers.tool_forms.form_parser import (
    MAX_HEAD_CHARS,
    FormParser,
    Reading,
)
from penstock.workers.text.harmony import CHANNEL, ENDS, MESSAGE, START

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_-]{1,64})(?=<\||\s|$)")


class HarmonyParser(FormParser):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`."""

    def _read(self) -> Reading[None]:
        while (opener := (yield from self._text_until((START, CHANNEL)))) is not None:
            header = yield from self._up_to(MESSAGE, MAX_HEAD_CHARS)
            recipient = _RECIPIENT.search(header or "")
            if recipient is None or recipient[1] not in self._names:
                self._unread(opener)
                continue
            yield from self._space()
            if (yield from self._literal("{")) is None:
                self._unread(opener)
                continue
            self._pos -= 1
            self._begin(recipient[1])
            yield from self._pass_arguments()
            yield from self._space()
            yield from self._literal(*ENDS)
            self._drop()
