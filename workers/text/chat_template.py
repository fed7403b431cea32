"""Renders messages to prompt text with a Jinja template.

Templates come from the operator only, in the model folder or in a file that a setting names, and
never from a request. They are as trusted as the weights, and still run in Jinja's immutable
sandbox, without a loader, in this process. A client sends data only, so the work and the text that
data can cause are bounded: every loop iteration, macro call and block checks this thread's CPU
clock (the checks are inserted into the parsed template, so no template can leave them out), `range`
is capped, large sequence repetitions and powers are refused, and the output is counted while it is
written. The memory of a single filter call, in a template written to attack, is not bounded.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.workers.errors import ConfigError
from penstock.workers.request import RequestError

MAX_OUTPUT_CHARS = 2**20
MAX_RANGE = 100_000
MAX_CPU_S = 1.0
MAX_REFUSAL_CHARS = 300

Message = Mapping[str, Any]

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
_END_OF_LAST = "[[end of the last message]]"  # is cut off again, with what follows it
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class _TemplateRefusal(jinja2.TemplateError):
    """The template itself refused the messages, through raise_exception."""


class _TooMuch(Exception):
    """A bound was reached."""


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks text for training; ignored here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with CPU, size and range limits."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self._render = threading.local()
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum")
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, range=_capped_range
        )

    def start_clock(self) -> None:
        self._render.deadline_s = time.thread_time() + MAX_CPU_S

    def tick(self) -> None:
        """Called in each loop, macro and block. Raises _TooMuch after MAX_CPU_S of this render."""
        if time.thread_time() > self._render.deadline_s:
            raise _TooMuch

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        numbers = [abs(side) for side in (left, right) if isinstance(side, int | float)]
        if operator == "**" and max(numbers, default=0) > 1000:
            raise _TooMuch
        if sizes and numbers and sizes[0] * numbers[0] > MAX_OUTPUT_CHARS:
            raise _TooMuch
        return super().call_binop(context, operator, left, right)

    def compile_with_ticks(self, source: str) -> jinja2.Template:
        tree = self.parse(source)
        places: list[nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block] = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
            *tree.find_all(nodes.CallBlock),
            *tree.find_all(nodes.Block),
        ]
        for place in places:
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            tick = nodes.ExprStmt(call).set_lineno(place.lineno, override=True)
            tick.set_environment(self)
            place.body.insert(0, tick)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))


class ChatTemplate:
    """One compiled template. Renders as transformers' `apply_chat_template` does."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """Raises ConfigError if `source` is not Jinja. `special_tokens`: bos_token, eos_token, …"""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._environment = _Environment()
        try:
            self._template = self._environment.compile_with_ticks(source)
            names = meta.find_undeclared_variables(self._environment.parse(source))
        except RecursionError:
            raise ConfigError("the chat template cannot be read: it nests too deep") from None
        except (jinja2.TemplateError, SyntaxError, ValueError, OverflowError) as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from error
        self.knows_tools = "tools" in names
        own = {*_GIVEN, *self._special_tokens, *self._environment.globals}
        self.variables = frozenset(names - own)  # that a caller may set, such as enable_thinking

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continues_last: bool = False,
    ) -> str:
        """The prompt text of `messages`, which are plain JSON data. `continues_last`: it ends with
        the text of the last message, which the answer goes on with.

        Raises RequestError (chat_template_error) if the template refuses them or hits a limit.
        """
        if continues_last:
            last = {**messages[-1], "content": messages[-1]["content"] + _END_OF_LAST}
            messages = [*messages[:-1], last]
        known = {**self._special_tokens, **(variables or {})}
        known.update(
            messages=[_plain(message) for message in messages],
            tools=list(tools) if tools is not None else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
        pieces, num_chars = [], 0
        self._environment.start_clock()
        try:
            for piece in self._template.generate(known):
                num_chars += len(piece)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise _TooMuch
                pieces.append(piece)
        except _TemplateRefusal as refusal:
            why = str(refusal)[:MAX_REFUSAL_CHARS]
            raise _not_rendered(
                f"the chat template of this model refused the messages: {why}"
            ) from None
        except _TooMuch:
            raise _not_rendered(
                "rendering these messages with the chat template of this model takes more than "
                f"{MAX_CPU_S:g} s, or gives more than {MAX_OUTPUT_CHARS} characters"
            ) from None
        except Exception as error:  # a template may fail on messages in any way
            raise _not_rendered(
                "the chat template of this model cannot render these messages"
            ) from error
        text = "".join(pieces)
        return _up_to_end_of_last(text) if continues_last else text


def _up_to_end_of_last(text: str) -> str:
    """Without the mark at the end of the last message, and what the template writes after it."""
    before, mark, _ = text.rpartition(_END_OF_LAST)
    if not mark:
        raise _not_rendered(
            "the chat template of this model does not write the last message as it is, so that it "
            "cannot be continued"
        )
    return before


def _not_rendered(message: str) -> RequestError:
    return RequestError(message, param="messages", code="chat_template_error")


def _plain(message: Message) -> dict[str, Any]:
    """Without null fields, which break many templates; reasoning under its usual names."""
    plain = {key: value for key, value in message.items() if value is not None}
    for name in _REASONING_NAMES:
        if name in plain:
            return {"thinking": plain[name], **plain, "reasoning_content": plain[name]}
    return plain


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _capped_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise _TooMuch
    return numbers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers defines the filter: no HTML escapes, and json.dumps' own options."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
