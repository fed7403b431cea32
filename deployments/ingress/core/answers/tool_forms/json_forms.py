"""Forms whose calls are JSON objects: of Hermes, Llama 3, Mistral, Phi-4-mini and Granite."""

from __future__ import annotations

from collections.abc import Collection

from penstock.deployments.ingress.core.answers.tool_forms.form_parser import (
    HEAD,
    MAX_HEAD_CHARS,
    FormParser,
    JsonScan,
    Reading,
    call_in,
)
from penstock.deployments.ingress.core.tools import CLOSE, OPEN

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
FUNCTOOLS, PHI_OPEN, PHI_CLOSE = "functools[", "<|tool_call|>", "<|/tool_call|>"


class HermesParser(FormParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them."""

    def _read(self) -> Reading[None]:
        while (yield from self._text_until((OPEN,))) is not None:
            name = yield from self._head(lambda: CLOSE in self._held)
            if name is not None:
                self._begin(name)
                yield from self._pass_arguments()
                yield from self._rest_of_object()
                yield from self._space()
                yield from self._literal(CLOSE)
                self._drop()
                continue
            block = yield from self._up_to(CLOSE)
            call = call_in(self._held[: self._pos] if block is None else block)
            if call is None or call[0] not in self._names:
                self._unread(OPEN)
            else:
                self._begin(*call)


class Llama3Parser(FormParser):
    """`{"name": …, "parameters": {…}}`, several with `;` between, after `<|python_tag|>` or bare.

    Without the mark an object is a call only at the beginning of a line, if it begins with the name
    of an offered tool; any other is text.
    """

    def __init__(self, names: Collection[str], answer_id: str):
        super().__init__(names, answer_id)
        self._is_line_begun = False

    def _read(self) -> Reading[None]:
        while (opener := (yield from self._text_until((PYTHON_TAG, "{")))) is not None:
            if opener == "{":
                self._held = "{" + self._held
            if opener == PYTHON_TAG or not self._is_line_begun:
                yield from self._space()
                if (yield from self._calls()):
                    self._is_line_begun = False
                    continue
                if opener == "{" and HEAD.match(self._held, 0, MAX_HEAD_CHARS) is not None:
                    self.num_unread += 1  # a call of what was not offered
            if opener == PYTHON_TAG:
                self._unread(opener)
            else:
                self._pos = 1
                self._say("{")
                self._drop()

    def _calls(self) -> Reading[bool]:
        """Whether calls come next; all of them are read."""
        num_before = self._num_calls
        while (yield from self._call()):
            yield from self._space()
            if (yield from self._literal(";", ",")):
                yield from self._space()
            if not (yield from self._is_next("{")):
                if self._pos < len(self._held) or not self._is_end:
                    self._pos = 0  # what follows is text
                self._drop()
                break
            self._drop()
        return self._num_calls > num_before

    def _call(self) -> Reading[bool]:
        if not (yield from self._is_next("{")):
            return False
        name = yield from self._head(self._is_no_head)
        if name is None:
            return False
        self._begin(name)
        yield from self._pass_arguments()
        yield from self._rest_of_object()
        return True

    def _is_no_head(self) -> bool:
        """Whether what comes begins as no call does: then it need not wait for its end."""
        rest = self._held[self._pos : self._pos + MAX_HEAD_CHARS]
        head, begun = '{"name":"', "".join(rest.split())
        is_other = not head.startswith(begun[: len(head)])
        return is_other or JsonScan().end(self._held, self._pos) is not None

    def _is_next(self, text: str) -> Reading[bool]:
        if (yield from self._literal(text)) is None:
            return False
        self._pos -= len(text)
        return True

    def _say(self, text: str) -> None:
        _, is_new_line, line = text.rpartition("\n")
        self._is_line_begun = bool(line.strip()) or (self._is_line_begun and not is_new_line)
        super()._say(text)


class ListParser(FormParser):
    """A mark, then calls as objects in a list: `functools[{…}, {…}]`; or one object alone."""

    openers: tuple[str, ...]
    closers: tuple[str, ...] = ()  # left out, where one follows the list

    def _read(self) -> Reading[None]:
        while (opener := (yield from self._text_until(self.openers))) is not None:
            if opener.endswith("["):
                opener, self._held = opener[:-1], "[" + self._held
            yield from self._space()
            if not (yield from self._list()):
                self._unread(opener)

    def _list(self) -> Reading[bool]:
        """Whether calls follow. Else what was read is text."""
        is_list = (yield from self._literal("[")) is not None
        num_before = self._num_calls
        while True:
            yield from self._space()
            if (yield from self._literal("{")) is None:
                break
            self._pos -= 1
            if not (yield from self._json_call()):
                if self._num_calls > num_before:
                    self._unread()
                    return True
                return False
            if not is_list:
                break
            yield from self._space()
            yield from self._literal(",")
        if self._num_calls == num_before:
            return False
        if is_list:
            yield from self._literal("]")
        yield from self._space()
        if self.closers:
            yield from self._literal(*self.closers)
        self._drop()
        return True


class PhiParser(ListParser):
    """`functools[{…}]` or `<|tool_call|>[{…}]<|/tool_call|>`, of Phi-4-mini."""

    openers = (FUNCTOOLS, PHI_OPEN)
    closers = (PHI_CLOSE,)


class GraniteParser(ListParser):
    """`<|tool_call|>[{…}]` of Granite 3.0, `<tool_call>[{…}]` of later ones."""

    openers = (PHI_OPEN, OPEN)
    closers = (CLOSE,)


class MistralParser(ListParser):
    """`[TOOL_CALLS][{…}]`, or `[TOOL_CALLS]name[ARGS]{…}` of newer models, with an id between."""

    openers = (TOOL_CALLS,)

    def _list(self) -> Reading[bool]:
        if (yield from self._literal("[", "{")) is not None:
            self._pos -= 1
            return (yield from super()._list())
        name = yield from self._name()
        if name not in self._names:
            return False
        if (yield from self._literal(CALL_ID)) is not None:
            yield from self._name()
        yield from self._literal(ARGS)
        yield from self._space()
        if (yield from self._literal("{")) is None:
            return False
        self._pos -= 1
        self._begin(name)
        yield from self._pass_arguments()
        return True
